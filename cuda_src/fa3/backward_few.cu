// FlashAttention-3 backward for few queries: all queries of a head fit in one q tile. A block keeps
// Q, dO and dQ and goes through kv tiles, while a block of backward.cu keeps K, V, dK and dV and
// goes through q tiles. Nothing is added up in memory from step to step: dK and dV of a tile have
// all their queries, and dQ of all tiles stays in registers. So the pass reads K and V once and
// writes dK and dV once, and that bounds it.
//
//   load   Q and dO with lse and delta once; K and V of a tile -> rings
//   math   S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse), dS = P (dP - delta) -> shared memory;
//          dV = P^T dO, dQ += dS K (of all keys of the tile), dK = dS^T Q
//
// Where heads are few, several blocks share the kv tiles of a head, and each adds its dQ to the sum
// in memory, once.
//
// Who waits for whom (see tile/pipeline.cuh):
//   q_full, dout_full   all warps of math for load, once; lse and delta arrive with them
//   k_full, v_full      all warps of math for load
//   k_empty             load for all warps of math: S and dQ have read K
//   v_empty             load for all warps of math: dP has read V
//   ds_full             all warps of math for each other: dS of the tile is written
//   ds_empty            all warps of math for each other: dQ has read dS
//   barrier 1           the warps of math for each other, once: dead queries are cleared
#include "../ptx/bulk_copy.cuh"
#include "../ptx/register_budget.cuh"
#include "backward_few_types.cuh"

namespace cuflash::fa3 {

// One thread loads Q or dO, with a number for each of its rows.
template <class Config, class Matrix>
__device__ inline void load_queries(const FewContext<Config>& c, Matrix& matrix,
                                    const TensorMap* map, QueryNumbers<Config>& numbers,
                                    const void* all_numbers, Barrier& full) {
  constexpr unsigned bytes = sizeof(numbers.value);
  const unsigned barrier = ptx::shared_address(&full);
  arrive_expecting<Config>(full, Matrix::bytes + bytes);
  load_panels(matrix, map, barrier, 0, c.head, c.seq.batch, ptx::kEvictFirst);
  ptx::bulk_load(ptx::shared_address(numbers.value),
                 static_cast<const float*>(all_numbers) + c.head_row(), bytes, barrier);
}

// One thread loads K or V of a tile as soon as its place in the ring is free.
template <class Config, class Matrix, int stages>
__device__ inline void load_keys(const FewContext<Config>& c, Matrix (&ring)[stages],
                                 const TensorMap* map, Barrier (&full)[stages],
                                 const Barrier (&empty)[stages], int step, int tile) {
  const RingPlace<stages> place(step);
  wait_empty<Config>(empty[place.stage], place.phase);
  arrive_expecting<Config>(full[place.stage], Matrix::bytes);
  load_panels(ring[place.stage], map, ptx::shared_address(&full[place.stage]),
              tile * Config::block_kv, c.head, c.seq.batch, ptx::kEvictFirst);
}

// One thread loads everything.
template <class Config>
__device__ inline void few_load_role(const FewContext<Config>& c) {
  auto& shared = c.shared;
  int step = 0;
#pragma unroll 1
  for (int tile = c.first_tile; tile < c.end_tile; ++tile) {
    if (c.is_hidden(tile)) continue;
    if (step == 0) {
      load_queries(c, shared.q, &c.params.q_map, shared.lse, c.params.row_lse, shared.q_full);
    }
    load_keys(c, shared.k, &c.params.k_map, shared.k_full, shared.k_empty, step, tile);
    if (step == 0) {
      load_queries(c, shared.dout, &c.params.dout_map, shared.delta, c.params.delta,
                   shared.dout_full);
    }
    load_keys(c, shared.v, &c.params.v_map, shared.v_full, shared.v_empty, step, tile);
    ++step;
  }
}

// A warpgroup of math: 64 keys of every tile, and 64 rows of dQ.
template <class Config, class Types = BackwardTypes<Config>>
struct FewMath {
  using Storage = typename Config::Storage;
  using Scores = typename Types::Scores;
  using Operand = ScoreOperand<Config>;
  const FewContext<Config>& c;
  const int warpgroup;
  const int warp_row;  // of this warp among the 64 rows of its warpgroup
  const float factor;

  __device__ FewMath(const FewContext<Config>& c, int warpgroup)
      : c(c),
        warpgroup(warpgroup),
        warp_row(static_cast<int>(threadIdx.x) / 32 % 4 * 16),
        factor(Logits<Config>::factor(Config::Score::unit(c.params))) {}

  // S^T = K Q^T or dP^T = V dO^T of the warpgroup's keys, as one group of products.
  template <int depth_end, class Keys, class Queries>
  __device__ __forceinline__ void issue_scores(Scores& scores, const Keys& keys, unsigned stage,
                                               const Queries& queries) const {
    const DepthInColumns<Keys> a(keys);
    const DepthInColumns<Queries> b(queries);
    const unsigned a_step =
        stage * (sizeof(Keys) / 16) + warpgroup * (kKeysOfWarpgroup * Keys::row_bytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < depth_end; depth += 16) {
      ptx::wgmma<false, false>(Storage{}, scores.value[0], a.at(depth) + a_step, b.at(depth),
                               depth > 0);
    }
    ptx::wgmma_commit();
  }

  // dV = P^T dO or dK = dS^T Q of the warpgroup's keys, as one group of products.
  template <class Gradient, class Queries>
  __device__ __forceinline__ void issue_kv(Gradient& gradient, const Operand& scores,
                                           const Queries& queries) const {
    const DepthInRows<Queries> b(queries);
    gradient.fill(0);
    ptx::wgmma_fence();
#pragma unroll
    for (int query = 0; query < Config::block_q; query += 16) {
      ptx::wgmma<true>(Storage{}, gradient.value[0], scores.value[query / 16], b.at(query));
    }
    ptx::wgmma_commit();
  }

  // dQ += dS K of the warpgroup's rows and all keys of the tile, as one group of products.
  __device__ __forceinline__ void issue_q(typename Types::QGradient& dq, unsigned stage) const {
    const DepthInColumns<typename Types::ScorePanels> a(c.shared.ds);
    const DepthInRows<typename Types::KPanels> b(c.shared.k[0]);
    const unsigned a_step = warpgroup * (kRowsOfProduct * Types::ScorePanels::row_bytes / 16);
    const unsigned b_step = stage * (sizeof(typename Types::KPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Config::block_kv; key += 16) {
      ptx::wgmma<false, true>(Storage{}, dq.value[0], a.at(key) + a_step, b.at(key) + b_step, true);
    }
    ptx::wgmma_commit();
  }

  // Waits for Q and dO, and clears the rows of dead queries: a NaN there, multiplied by the zeros
  // of P and dS, would give NaN. Returns whether there are dead queries. Rows beyond the length do
  // not count: the copy engine fills them with zeros.
  __device__ bool await_queries() const {
    wait<Config>(c.shared.q_full, 0);
    wait<Config>(c.shared.dout_full, 0);
    if (!must_clear<Config>(c.shared.lse, c.seq, 0)) return false;
    clear_dead_queries<Config>(c.shared.q, c.shared.lse);
    clear_dead_queries<Config>(c.shared.dout, c.shared.lse);
    ptx::fence_async_shared();
    jitter<Config>();
    ptx::named_barrier(1, 2 * kWarpgroup);
    return true;
  }

  // P and dS of a tile, rounded; `dead`: whether there are dead queries.
  __device__ __forceinline__ void scores(Operand& weights, Operand& gradients, int step, int key0,
                                         bool dead) const {
    const RingPlace<Config::k_stages> of_k(step);
    const RingPlace<Config::v_stages> of_v(step);
    Scores p, dp;
    wait<Config>(c.shared.k_full[of_k.stage], of_k.phase);
    issue_scores<Config::head_dim>(p, c.shared.k[0], of_k.stage, c.shared.q);
    wait<Config>(c.shared.v_full[of_v.stage], of_v.phase);
    issue_scores<Config::head_dim_v>(dp, c.shared.v[0], of_v.stage, c.shared.dout);
    const RowsOfKeys place{c.seq.entry, c.head, 0, key0 + warp_row};
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(p.value[0]);
    exponentiate<Config>(c.params, p, c.shared.lse, place, factor);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dp.value[0]);
    arrive_warp<Config>(c.shared.v_empty[of_v.stage]);
    differentiate<Config>(gradients, p, dp, c.shared.delta, weights);
    // The mask is applied to the rounded numbers, which take half as many registers.
    if (dead || is_edge(key0)) {
      apply_mask<Config>(c.shared.lse, c.seq, place, weights, gradients);
    } else if (c.seq.seqlen_q < Config::block_q) {
      clear_surplus(weights, gradients);
    }
  }

  // A kv tile. `step` is its number among the tiles that are not hidden.
  __device__ __forceinline__ void step(typename Types::QGradient& dq, int step, int tile,
                                       bool dead) const {
    const RingPlace<1> of_ds(step);
    const unsigned stage = RingPlace<Config::k_stages>(step).stage;
    const int key0 = tile * Config::block_kv + warpgroup * kKeysOfWarpgroup;
    Operand weights, gradients;
    scores(weights, gradients, step, key0, dead);
    wait_empty<Config>(c.shared.ds_empty, of_ds.phase);
    store_gradients<Config>(gradients, c.shared.ds, 0, warpgroup);
    ptx::fence_async_shared();
    __syncwarp();
    arrive_warp<Config>(c.shared.ds_full);

    typename Types::VGradient dv;
    issue_kv(dv, weights, c.shared.dout);
    wait<Config>(c.shared.ds_full, of_ds.phase);
    issue_q(dq, stage);
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(dv.value[0]);
    store(dv, c.params.dv, c.params.shape.head_dim_v, key0, 1.0f);
    typename Types::KGradient dk;
    issue_kv(dk, gradients, c.shared.q);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dq.value[0]);
    ptx::wgmma_hold(dk.value[0]);
    arrive_warp<Config>(c.shared.ds_empty);
    arrive_warp<Config>(c.shared.k_empty[stage]);
    store(dk, c.params.dk, c.params.shape.head_dim, key0, static_cast<float>(c.params.scale));
  }

  // Clears dK or dV of a tile that no query sees.
  template <int columns>
  __device__ void store_zeros(const Tensor& tensor, int valid_columns, int tile) const {
    WarpTile<float, 16, 16, columns> zeros;
    zeros.fill(0);
    const int key0 = tile * Config::block_kv + warpgroup * kKeysOfWarpgroup;
    store(zeros, tensor, valid_columns, key0, 1.0f);
  }

  // Adds dQ to the sums in device memory, and nothing to dead rows.
  __device__ void add_q(const typename Types::QGradient& dq) const {
    const int row = warpgroup * kRowsOfProduct + warp_row;
    add_to_accumulator<Config, ByFragments>(
        static_cast<float*>(c.params.dq_accumulator), dq, c.head_row(), row, 0,
        [&](int i) { return c.shared.lse.value[row + i] == infinity<float>(); });
  }

 private:
  // Clears P and dS of rows beyond the length, where an infinite key makes NaN.
  __device__ __forceinline__ void clear_surplus(Operand& weights, Operand& gradients) const {
    const LanePosition lane;
#pragma unroll
    for (int n = 0; n < Config::block_q / 8; ++n) {
      const int left = c.seq.seqlen_q - lane.column - 8 * n;
      const unsigned kept = left >= 2 ? 0xffffffffu : left == 1 ? 0x0000ffffu : 0;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        weights.value[n / 2][n % 2 * 2 + group] &= kept;
        gradients.value[n / 2][n % 2 * 2 + group] &= kept;
      }
    }
  }

  // Whether some query sees only some of the warpgroup's keys.
  __device__ bool is_edge(int key0) const {
    return Mask<Config>::template is_edge<Config::block_q, kKeysOfWarpgroup>(c.seq, 0, key0);
  }

  // Stores the warp's rows of a gradient of keys, times `scale`.
  template <class Gradient>
  __device__ __forceinline__ void store(Gradient& gradient, const Tensor& tensor, int columns,
                                        int key0, float scale) const {
    gradient.for_each([&](float& x, int, int, int, int) { x *= scale; });
    const int key = key0 + warp_row;
    store_staged(gradient, c.shared.staging[threadIdx.x / 32 - 4],
                 kv_row<Storage>(tensor, c.seq, c.head, key), tensor.row_stride,
                 c.seq.rows_kv - key, columns);
  }
};

template <class Config>
__device__ inline void few_math_role(const FewContext<Config>& c, int warpgroup) {
  const FewMath<Config> math(c, warpgroup);
  typename BackwardTypes<Config>::QGradient dq;
  dq.fill(0);
  bool dead = false;
  int step = 0;
#pragma unroll 1
  for (int tile = c.first_tile; tile < c.end_tile; ++tile) {
    if (c.is_hidden(tile)) {
      math.template store_zeros<Config::head_dim>(c.params.dk, c.params.shape.head_dim, tile);
      math.template store_zeros<Config::head_dim_v>(c.params.dv, c.params.shape.head_dim_v, tile);
      continue;
    }
    if (step == 0) dead = math.await_queries();
    math.step(dq, step, tile, dead);
    ++step;
  }
  if (step > 0) math.add_q(dq);
}

template <class Config>
__device__ inline void backward_few(const typename Config::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<FewStorage<Config>*>(shared_bytes);
  static_assert(sizeof(FewStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  static_assert(BackwardTypes<Config>::q_parted_by_rows && !Config::Lengths::vary &&
                    Config::Score::is_empty && !Config::Weights::drops && !Mask<Config>::has_first,
                "a tile of 128 queries, without features");
  const auto c = few_context<Config>(params, shared);
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    ptx::tensor_map_prefetch(&params.q_map);
    ptx::tensor_map_prefetch(&params.k_map);
    ptx::tensor_map_prefetch(&params.v_map);
    ptx::tensor_map_prefetch(&params.dout_map);
    init_few_barriers<Config>(shared);
  }
  __syncthreads();
  if (role == 0) {
    ptx::give_registers<Config::load_registers>();
    if (threadIdx.x == 0) few_load_role(c);
  } else {
    ptx::take_registers<Config::math_registers>();
    few_math_role(c, role - 1);
  }
}

}  // namespace cuflash::fa3
