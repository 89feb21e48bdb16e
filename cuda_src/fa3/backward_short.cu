// FlashAttention-3 backward for short heads: up to q_tiles tiles of 64 queries. A block has a whole
// head: it keeps Q, dO and dQ of all queries and goes through kv tiles, as in backward_few.cu, and
// each kv tile goes through the q tiles, as in backward.cu. So dQ, dK and dV all stay in registers
// until they are finished, and the block stores them itself, rounded: no sums in device memory, and
// no kernel that converts them.
//
//   load   Q and dO of each q tile with lse and delta once; K and V of a kv tile -> rings
//   math   for each kv tile, for each pair of q tiles: of both, one after the other,
//          S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse), dS = P (dP - delta) -> shared memory,
//          dV += P^T dO, dK += dS^T Q; then dQ += dS K (of all keys of the kv tile), of one q
//          tile in each warpgroup
//
// Who waits for whom (see tile/pipeline.cuh):
//   q_full, dout_full   all warps of math for load, once for each q tile, with the rows' numbers
//   k_full, v_full      all warps of math for load
//   kv_empty            load for all warps of math: they have read K and V of the kv tile
//   ds_full             all warps of math for each other: dS of the pair is written
//   ds_empty            all warps of math for each other: dQ has read dS
//   barrier 1 + w       the warps of warpgroup w for each other: dead queries are cleared
#include "../ptx/bulk_copy.cuh"
#include "../ptx/register_budget.cuh"
#include "backward_short_types.cuh"

namespace cuflash::fa3 {

// One thread loads Q or dO of a q tile, with a number for each of its rows.
template <class Config, class Matrix>
__device__ inline void load_queries(const ShortContext<Config>& c, Matrix& matrix,
                                    const TensorMap* map, QueryNumbers<Config>& numbers,
                                    const void* all_numbers, Barrier& full, int q_tile) {
  constexpr unsigned bytes = sizeof(numbers.value);
  const unsigned barrier = ptx::shared_address(&full);
  const int row = q_tile * Config::block_q;
  arrive_expecting<Config>(full, Matrix::bytes + bytes);
  load_panels(matrix, map, barrier, row, c.head, c.seq.batch, ptx::kEvictFirst);
  ptx::bulk_load(ptx::shared_address(numbers.value),
                 static_cast<const float*>(all_numbers) + c.head_row() + row, bytes, barrier);
}

// One thread loads K or V of a kv tile.
template <class Config, class Matrix>
__device__ inline void load_keys(const ShortContext<Config>& c, Matrix& matrix,
                                 const TensorMap* map, Barrier& full, int tile) {
  arrive_expecting<Config>(full, Matrix::bytes);
  load_panels(matrix, map, ptx::shared_address(&full), tile * Config::block_kv, c.head, c.seq.batch,
              ptx::kEvictFirst);
}

// By one thread: what the first step needs, then the other q tiles, then the other kv tiles. Each
// q tile is loaded once the head before needs it no more.
template <class Config>
__device__ inline void load_head(const ShortContext<Config>& c, int tiles) {
  auto& shared = c.shared;
  const auto load_q = [&](int i) {
    wait_empty<Config>(shared.q_empty[i], c.round % 2);
    load_queries(c, shared.q[i], &c.params.q_map, shared.lse[i], c.params.row_lse, shared.q_full[i],
                 i);
  };
  const auto load_dout = [&](int i) {
    load_queries(c, shared.dout[i], &c.params.dout_map, shared.delta[i], c.params.delta,
                 shared.dout_full[i], i);
  };
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const RingPlace<Config::kv_stages> place(c.steps_before + tile);
    wait_empty<Config>(shared.kv_empty[place.stage], place.phase);
    load_keys(c, shared.k[place.stage], &c.params.k_map, shared.k_full[place.stage], tile);
    if (tile == 0) load_q(0);
    load_keys(c, shared.v[place.stage], &c.params.v_map, shared.v_full[place.stage], tile);
    if (tile == 0) load_dout(0);
#pragma unroll 1
    for (int i = 1; tile == 0 && i < c.q_tiles(); ++i) {
      load_q(i);
      load_dout(i);
    }
  }
}

// A pair of q tiles and a kv tile, whose dQ comes late.
struct LatePair {
  int number;  // of pairs that are not hidden, through all heads of the block
  int step;
};

// A warpgroup of math: 64 keys of every kv tile, and dQ of every other q tile.
template <class Config, class Types = ShortTypes<Config>>
struct ShortMath {
  using Storage = typename Config::Storage;
  using Scores = typename Types::Scores;
  using Operand = ScoreOperand<Config>;
  using QGradient = typename Types::QGradient;
  using KGradient = typename Types::KGradient;
  using VGradient = typename Types::VGradient;
  static constexpr int tiles_of_pair = Types::tiles_of_pair;
  const ShortContext<Config>& c;
  const int warpgroup;
  const int warp_row;  // of this warp among the 64 rows of its warpgroup
  const float factor;

  __device__ ShortMath(const ShortContext<Config>& c, int warpgroup)
      : c(c),
        warpgroup(warpgroup),
        warp_row(static_cast<int>(threadIdx.x) / 32 % 4 * 16),
        factor(Logits<Config>::factor(Config::Score::unit(c.params))) {}

  // The first key of the warpgroup in a kv tile.
  __device__ int first_key(int tile) const {
    return tile * Config::block_kv + warpgroup * kKeysOfWarpgroup;
  }

  // S^T = K Q^T or dP^T = V dO^T of the warpgroup's keys, as one group of products.
  template <int depth_end, class Keys, class Queries>
  __device__ __forceinline__ void issue_scores(Scores& scores, const Keys& keys, unsigned stage,
                                               const Queries& queries, unsigned q_tile) const {
    const DepthInColumns<Keys> a(keys);
    const DepthInColumns<Queries> b(queries);
    const unsigned a_step =
        stage * (sizeof(Keys) / 16) + warpgroup * (kKeysOfWarpgroup * Keys::row_bytes / 16);
    const unsigned b_step = q_tile * (sizeof(Queries) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < depth_end; depth += 16) {
      ptx::wgmma<false, false>(Storage{}, scores.value[0], a.at(depth) + a_step,
                               b.at(depth) + b_step, depth > 0);
    }
    ptx::wgmma_commit();
  }

  // dV += P^T dO or dK += dS^T Q of the warpgroup's keys, as one group of products.
  template <class Gradient, class Queries>
  __device__ __forceinline__ void issue_kv(Gradient& gradient, const Operand& scores,
                                           const Queries& queries, unsigned q_tile) const {
    const DepthInRows<Queries> b(queries);
    const unsigned b_step = q_tile * (sizeof(Queries) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int query = 0; query < Config::block_q; query += 16) {
      ptx::wgmma<true>(Storage{}, gradient.value[0], scores.value[query / 16],
                       b.at(query) + b_step);
    }
    ptx::wgmma_commit();
  }

  // dQ += dS K of the warpgroup's q tile of a pair and all keys of the kv tile, as one group of
  // products.
  __device__ __forceinline__ void issue_q(QGradient& dq, const LatePair& pair) const {
    using PairScores = typename Types::PairScores;
    const RingPlace<Config::score_stages> of_ds(pair.number);
    wait<Config>(c.shared.ds_full[of_ds.stage], of_ds.phase);
    const DepthInColumns<PairScores> a(c.shared.ds[0]);
    const DepthInRows<typename Types::KPanels> b(c.shared.k[0]);
    const unsigned a_step = of_ds.stage * (sizeof(PairScores) / 16) +
                            warpgroup * (kRowsOfProduct * PairScores::row_bytes / 16);
    const unsigned b_step =
        RingPlace<Config::kv_stages>(pair.step).stage * (sizeof(typename Types::KPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Config::block_kv; key += 16) {
      ptx::wgmma<false, true>(Storage{}, dq.value[0], a.at(key) + a_step, b.at(key) + b_step, true);
    }
    ptx::wgmma_commit();
  }

  // Clears the rows of dead queries in Q and dO of a q tile, since zeros of P and dS would make NaN
  // of a NaN there. Each warpgroup does, before its own dV and dK read them. The other one's scores
  // may be reading them: these are hidden, and both write the same zeros, so no order is needed.
  __device__ void clear_dead(unsigned q_tile) const {
    const QueryNumbers<Config>& lse = c.shared.lse[q_tile];
    clear_dead_queries<Config>(c.shared.q[q_tile], lse);
    clear_dead_queries<Config>(c.shared.dout[q_tile], lse);
    ptx::fence_async_shared();
    jitter<Config>();
    ptx::named_barrier(static_cast<int>(threadIdx.x) / kWarpgroup, kWarpgroup);
  }

  // P and dS of a q tile and a kv tile, rounded.
  __device__ __forceinline__ void scores(Operand& weights, Operand& gradients, unsigned q_tile,
                                         int tile, int step) const {
    const auto [stage, phase] = RingPlace<Config::kv_stages>(step);
    const QueryNumbers<Config>& lse = c.shared.lse[q_tile];
    const int query0 = static_cast<int>(q_tile) * Config::block_q;
    const RowsOfKeys place{c.seq.entry, c.head, query0, first_key(tile) + warp_row};
    Scores p, dp;
    wait<Config>(c.shared.k_full[stage], phase);
    wait<Config>(c.shared.q_full[q_tile], c.round % 2);
    issue_scores<Config::head_dim>(p, c.shared.k[0], stage, c.shared.q[0], q_tile);
    wait<Config>(c.shared.v_full[stage], phase);
    wait<Config>(c.shared.dout_full[q_tile], c.round % 2);
    issue_scores<Config::head_dim_v>(dp, c.shared.v[0], stage, c.shared.dout[0], q_tile);
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(p.value[0]);
    exponentiate<Config>(c.params, p, lse, place, factor);
    const bool dead = has_dead_queries<Config>(lse);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dp.value[0]);
    differentiate<Config>(gradients, p, dp, c.shared.delta[q_tile], weights);
    // The rounded numbers are masked: they take half of the registers.
    if (dead) {
      apply_mask<Config>(lse, c.seq, place, weights, gradients);
      if (tile == 0) clear_dead(q_tile);
    } else if (Mask<Config>::template is_edge<Config::block_q, kKeysOfWarpgroup>(c.seq, query0,
                                                                                 first_key(tile))) {
      apply_mask_to_live_queries<Config>(c.seq, place, weights, gradients);
    }
  }

  // Stores dS of a q tile: the rows of one half of the pair.
  __device__ __forceinline__ void store_scores(const Operand& gradients, unsigned ds_stage,
                                               unsigned half) const {
    GradientsPlace<typename Types::PairScores> place(c.shared.ds[0], ds_stage, warpgroup);
    place.to += half * (Config::block_q * Types::PairScores::row_bytes);
#pragma unroll
    for (int i = 0; i < Config::block_q / 16; ++i) place.store(i, gradients.value[i]);
  }

  // dV and dK of a q tile and, if `late`, dQ of the pair before.
  template <bool late>
  __device__ __forceinline__ void multiply(const Operand& weights, const Operand& gradients,
                                           unsigned q_tile, KGradient& dk, VGradient& dv,
                                           QGradient& dq, const LatePair& before) const {
    if constexpr (late) issue_q(dq, before);
    issue_kv(dv, weights, c.shared.dout[0], q_tile);
    issue_kv(dk, gradients, c.shared.q[0], q_tile);
    ptx::wgmma_wait<0>();
    if constexpr (late) ptx::wgmma_hold(dq.value[0]);
    ptx::wgmma_hold(dv.value[0]);
    ptx::wgmma_hold(dk.value[0]);
    if constexpr (late) release_scores(before);
  }

  // dQ of a pair alone.
  __device__ __forceinline__ void multiply_q(QGradient& dq, const LatePair& pair) const {
    issue_q(dq, pair);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dq.value[0]);
    release_scores(pair);
  }

  // A pair of q tiles that begins at `first` and a kv tile; dQ of the pair before, if it `exists`.
  __device__ __forceinline__ void pair(unsigned first, int tile, const LatePair& now, KGradient& dk,
                                       VGradient& dv, QGradient& dq, const LatePair& before,
                                       bool exists) const {
    const RingPlace<Config::score_stages> of_ds(now.number);
    wait_empty<Config>(c.shared.ds_empty[of_ds.stage], of_ds.phase);
#pragma unroll
    for (unsigned half = 0; half < tiles_of_pair; ++half) {
      const unsigned q_tile = first + half;
      const bool hidden = c.template is_hidden<1>(q_tile, tile);
      Operand weights{}, gradients{};
      if (!hidden) scores(weights, gradients, q_tile, tile, now.step);
      store_scores(gradients, of_ds.stage, half);
      if (half + 1 == tiles_of_pair) {
        ptx::fence_async_shared();
        __syncwarp();
        arrive_warp<Config>(c.shared.ds_full[of_ds.stage]);
      }
      if (hidden) continue;
      if (exists) {
        multiply<true>(weights, gradients, q_tile, dk, dv, dq, before);
      } else {
        multiply<false>(weights, gradients, q_tile, dk, dv, dq, before);
      }
      exists = false;
    }
  }

  // After the last kv tile: load may overwrite a pair of q tiles. Returns this lane's dead rows of
  // dQ, bit 8-row group.
  __device__ unsigned release_queries(unsigned first) const {
    unsigned dead = 0;
#pragma unroll 1
    for (unsigned i = first; i < first + tiles_of_pair; ++i) {
      if (static_cast<int>(i) >= c.q_tiles()) break;
      wait<Config>(c.shared.q_full[i], c.round % 2);  // it may be hidden from all
      wait<Config>(c.shared.dout_full[i], c.round % 2);
      if (i == first + warpgroup) {
        const int row = warp_row + LanePosition().row;
        const QueryNumbers<Config>& lse = c.shared.lse[i];
        dead = (lse.value[row] == infinity<float>() ? 1u : 0u) |
               (lse.value[row + 8] == infinity<float>() ? 2u : 0u);
      }
      __syncwarp();
      arrive_warp<Config>(c.shared.q_empty[i]);
    }
    return dead;
  }

  // Stores the warp's rows of dK or dV of a kv tile, times `scale`.
  template <class Gradient>
  __device__ __forceinline__ void store_kv(Gradient& gradient, const Tensor& tensor, int columns,
                                           int tile, float scale) const {
    const int key = first_key(tile) + warp_row;
    gradient.for_each([&](float& x, int, int, int, int) { x *= scale; });
    store(gradient, kv_row<Storage>(tensor, c.seq, c.head, key), tensor, c.seq.rows_kv - key,
          columns);
  }

  // Stores the warp's rows of dQ of the warpgroup's q tile of a pair: zeros in `dead` rows.
  __device__ __forceinline__ void store_q(QGradient& dq, unsigned first, unsigned dead) const {
    const int row = static_cast<int>(first + warpgroup) * Config::block_q + warp_row;
    if (row >= c.seq.rows_q) return;
    const auto scale = static_cast<float>(c.params.scale);
    dq.for_each([&](float& x, int, int, int group, int) { x = dead >> group & 1 ? 0 : x * scale; });
    store(dq, q_row<Storage>(c.params.dq, c.seq, c.head, row), c.params.dq, c.seq.rows_q - row,
          c.params.shape.head_dim);
  }

  // dS of a pair has been read.
  __device__ __forceinline__ void release_scores(const LatePair& pair) const {
    arrive_warp<Config>(c.shared.ds_empty[RingPlace<Config::score_stages>(pair.number).stage]);
  }
  // All products that read K and V of a step are done.
  __device__ __forceinline__ void release_keys(int step) const {
    arrive_warp<Config>(c.shared.kv_empty[RingPlace<Config::kv_stages>(step).stage]);
  }

 private:
  template <class Gradient>
  __device__ __forceinline__ void store(const Gradient& gradient, Storage* to, const Tensor& tensor,
                                        int rows, int columns) const {
    store_staged(gradient, c.shared.staging[threadIdx.x / 32 - 4], to, tensor.row_stride, rows,
                 columns);
  }
};

// A warpgroup takes its keys of all kv tiles of a head through the q tiles. `number` counts pairs.
template <class Config, class Types = ShortTypes<Config>>
__device__ __forceinline__ void multiply_head(const ShortContext<Config>& c, int tiles,
                                              int warpgroup, int& number) {
  const ShortMath<Config> math(c, warpgroup);
  const Shape& shape = c.params.shape;
  typename Types::QGradient dq[Types::pairs];
#pragma unroll
  for (int i = 0; i < Types::pairs; ++i) dq[i].fill(0);
  unsigned dead[Types::pairs] = {};
  bool is_late = false;  // dQ of the pair before is still to be computed
#pragma unroll 1
  for (int tile = 0; tile < c.kv_tiles(); ++tile) {
    typename Types::KGradient dk;
    typename Types::VGradient dv;
    dk.fill(0);
    dv.fill(0);
    const int step = uniform(c.steps_before + tile);
#pragma unroll
    for (int i = 0; tile < tiles && i < Types::pairs; ++i) {
      const unsigned first = i * Types::tiles_of_pair;
      number = uniform(number);
      auto& dq_before = dq[(i + Types::pairs - 1) % Types::pairs];
      const LatePair before{number - 1, i == 0 ? step - 1 : step};
      const bool ends_step = i == 0 && is_late;
      if (!c.template is_hidden<Types::tiles_of_pair>(first, tile)) {
        math.pair(first, tile, {number, step}, dk, dv, dq_before, before, is_late);
        ++number;
        is_late = true;
      } else if (is_late) {
        math.multiply_q(dq_before, before);
        is_late = false;
      }
      if (ends_step) math.release_keys(step - 1);
      if (tile + 1 == tiles) dead[i] = math.release_queries(first);
    }
    if (tile < tiles && !is_late) math.release_keys(step);
    math.store_kv(dv, c.params.dv, shape.head_dim_v, tile, 1.0f);
    math.store_kv(dk, c.params.dk, shape.head_dim, tile, static_cast<float>(c.params.scale));
  }
  if (is_late) {
    const int step = c.steps_before + tiles - 1;
    math.multiply_q(dq[Types::pairs - 1], {number - 1, step});
    math.release_keys(step);
  }
#pragma unroll
  for (int i = 0; i < Types::pairs; ++i) math.store_q(dq[i], i * Types::tiles_of_pair, dead[i]);
}

template <class Config>
__device__ inline void backward_short(const typename Config::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ShortStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ShortStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  static_assert(!Config::Lengths::vary && Config::Score::is_empty && !Config::Weights::drops &&
                    !Mask<Config>::has_first,
                "no features");
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    ptx::tensor_map_prefetch(&params.q_map);
    ptx::tensor_map_prefetch(&params.k_map);
    ptx::tensor_map_prefetch(&params.v_map);
    ptx::tensor_map_prefetch(&params.dout_map);
    init_short_barriers<Config>(shared);
  }
  __syncthreads();
  if (role == 0) {
    ptx::give_registers<Config::load_registers>();
    if (threadIdx.x != 0) return;
    for_each_head<Config>(params, shared,
                          [](const ShortContext<Config>& c, int tiles) { load_head(c, tiles); });
  } else {
    ptx::take_registers<Config::math_registers>();
    int number = 0;
    for_each_head<Config>(params, shared, [&](const ShortContext<Config>& c, int tiles) {
      multiply_head(c, tiles, role - 1, number);
    });
  }
}

}  // namespace cuflash::fa3
