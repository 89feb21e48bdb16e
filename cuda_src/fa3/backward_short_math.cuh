// FlashAttention-3 backward for short heads: the math role.
#pragma once

#include "backward_short_types.cuh"

namespace cuflash::fa3 {

// A warpgroup of math: 64 keys of every kv tile, and dQ of one q tile of every pair.
template <class Config, class Types = ShortTypes<Config>>
struct ShortMath {
  using Storage = typename Config::Storage;
  using Scores = typename Types::Scores;
  using Operand = ScoreOperand<Config>;
  using QGradient = typename Types::QGradient;
  using KGradient = typename Types::KGradient;
  using VGradient = typename Types::VGradient;
  using PairScores = typename Types::PairScores;
  static constexpr int pairs = Types::pairs;
  static constexpr int tiles_of_pair = Types::tiles_of_pair;
  // Whether dP of a q tile is issued together with its S. Wide heads have no registers for both.
  static constexpr bool dp_early = Config::head_dim + Config::head_dim_v <= 64;
  const ShortContext<Config>& c;
  const int warpgroup;
  const float factor;

  __device__ ShortMath(const ShortContext<Config>& c, int warpgroup)
      : c(c), warpgroup(warpgroup), factor(Logits<Config>::factor(Config::Score::unit(c.params))) {}

  // Row of this warp among the 64 of its warpgroup; recomputed, as registers are full.
  __device__ int warp_row() const { return ptx::opaque_warp() % 4 * 16; }
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

  // Issue S^T or dP^T of a q tile once both operands have arrived. Only the `first` call for a kv
  // tile waits for K or V.
  __device__ __forceinline__ void issue_s(Scores& s, unsigned q_tile, int step, bool first) const {
    const RingPlace<Config::kv_stages> ring(step);
    if (first) wait<Config>(c.shared.k_full[ring.stage], ring.phase);
    wait<Config>(c.shared.q_full[q_tile], c.phase());
    issue_scores<Config::head_dim>(s, c.shared.k[0], ring.stage, c.shared.q[0], q_tile);
  }
  __device__ __forceinline__ void issue_dp(Scores& dp, unsigned q_tile, int step,
                                           bool first) const {
    const RingPlace<Config::kv_stages> ring(step);
    if (first) wait<Config>(c.shared.v_full[ring.stage], ring.phase);
    wait<Config>(c.shared.dout_full[q_tile], c.phase());
    issue_scores<Config::head_dim_v>(dp, c.shared.v[0], ring.stage, c.shared.dout[0], q_tile);
  }

  // dQ += dS K of the warpgroup's q tile of a pair and all keys of the kv tile, as one group of
  // products.
  __device__ __forceinline__ void issue_q(QGradient& dq, unsigned pair, int step) const {
    wait<Config>(c.shared.ds_full[pair], step % 2);
    const DepthInColumns<PairScores> a(c.shared.ds[0]);
    const DepthInRows<typename Types::KPanels> b(c.shared.k[0]);
    const unsigned a_step = pair * (sizeof(PairScores) / 16) +
                            warpgroup * (kRowsOfProduct * PairScores::row_bytes / 16);
    const unsigned b_step =
        RingPlace<Config::kv_stages>(step).stage * (sizeof(typename Types::KPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Config::block_kv; key += 16) {
      ptx::wgmma<false, true>(Storage{}, dq.value[0], a.at(key) + a_step, b.at(key) + b_step, true);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void end_q(QGradient& dq, unsigned pair) const {
    ptx::wgmma_hold(dq.value[0]);
    arrive_warp<Config>(c.shared.ds_empty[pair]);
  }

  // Clears the rows of dead queries in Q and dO of a q tile: a NaN there, multiplied by the zeros
  // of P and dS, would give NaN. Each warpgroup does so before its own dV and dK read these rows.
  // The other warpgroup may read them meanwhile for scores that are hidden, and both write the same
  // zeros, so no order is needed.
  __device__ void clear_dead(unsigned q_tile) const {
    const QueryNumbers<Config>& lse = c.shared.lse[q_tile];
    clear_dead_queries<Config>(c.shared.q[q_tile], lse);
    clear_dead_queries<Config>(c.shared.dout[q_tile], lse);
    ptx::fence_async_shared();
    jitter<Config>();
    ptx::named_barrier(static_cast<int>(threadIdx.x) / kWarpgroup, kWarpgroup);
  }

  __device__ RowsOfKeys score_place(unsigned q_tile, int tile) const {
    return {c.seq.entry, c.head, static_cast<int>(q_tile) * Config::block_q,
            first_key(tile) + warp_row()};
  }

  // Turns the products K Q^T into P.
  __device__ __forceinline__ void weigh(Scores& p, unsigned q_tile, int tile) const {
    ptx::wgmma_hold(p.value[0]);
    exponentiate<Config>(c.params, p, c.shared.lse[q_tile], score_place(q_tile, tile), factor);
  }

  // Turns P and dP into P and dS, rounded. The mask is applied to the rounded numbers, which take
  // half as many registers.
  __device__ __forceinline__ void differentiate_tile(Operand& weights, Operand& gradients,
                                                     const Scores& p, Scores& dp, unsigned q_tile,
                                                     int tile) const {
    const QueryNumbers<Config>& lse = c.shared.lse[q_tile];
    const RowsOfKeys place = score_place(q_tile, tile);
    ptx::wgmma_hold(dp.value[0]);
    differentiate<Config>(gradients, p, dp, c.shared.delta[q_tile], weights);
    if (has_dead_queries<Config>(lse)) {
      apply_mask<Config>(lse, c.seq, place, weights, gradients);
      if (tile == 0 && must_clear<Config>(lse, c.seq, place.query0)) clear_dead(q_tile);
    } else if (Mask<Config>::template is_edge<Config::block_q, kKeysOfWarpgroup>(
                   c.seq, place.query0, first_key(tile))) {
      apply_mask_to_live_queries<Config>(c.seq, place, weights, gradients);
    }
  }

  // Stores dS of a q tile to its half of the pair's rows in shared memory.
  __device__ __forceinline__ void store_scores(const Operand& gradients, unsigned q_tile) const {
    GradientsPlace<PairScores> place(c.shared.ds[0], q_tile / tiles_of_pair, warpgroup);
    place.to += q_tile % tiles_of_pair * (Config::block_q * PairScores::row_bytes);
#pragma unroll
    for (int i = 0; i < Config::block_q / 16; ++i) place.store(i, gradients.value[i]);
    if (q_tile % tiles_of_pair + 1 < tiles_of_pair) return;
    ptx::fence_async_shared();
    __syncwarp();
    arrive_warp<Config>(c.shared.ds_full[q_tile / tiles_of_pair]);
  }

  // Computes a kv tile of which every q tile sees some key. S of a q tile is issued before the
  // other products of the previous q tile, so that exponentials run beside these products. Calls
  // `end(i)` when q tile i is done.
  template <class End>
  __device__ __forceinline__ void whole_tile(QGradient (&dq)[pairs], KGradient& dk, VGradient& dv,
                                             int tile, int step, End end) const {
    Scores p, dp;
    Operand weights, gradients;
    issue_s(p, 0, step, true);
    issue_dp(dp, 0, step, true);
    ptx::wgmma_wait<1>();
    weigh(p, 0, tile);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Config::q_tiles; ++i) {
      const int pair = i / tiles_of_pair;
      const bool begins = i % tiles_of_pair == 0;
      const bool late = begins && pair > 0;
      const bool last = i + 1 == Config::q_tiles;
      if (begins) wait_empty<Config>(c.shared.ds_empty[pair], step % 2);
      differentiate_tile(weights, gradients, p, dp, i, tile);
      store_scores(gradients, i);
      if (!last) issue_s(p, i + 1, step, false);
      if (!last && dp_early) issue_dp(dp, i + 1, step, false);
      if (late) issue_q(dq[pair - 1], pair - 1, step);
      issue_kv(dv, weights, c.shared.dout[0], i);
      issue_kv(dk, gradients, c.shared.q[0], i);
      if (!last) {
        if (late) {
          ptx::wgmma_wait<3 + dp_early>();
        } else {
          ptx::wgmma_wait<2 + dp_early>();
        }
        weigh(p, i + 1, tile);
      }
      ptx::wgmma_wait<0>();
      if (late) end_q(dq[pair - 1], pair - 1);
      ptx::wgmma_hold(dv.value[0]);
      ptx::wgmma_hold(dk.value[0]);
      if (!last && !dp_early) {
        issue_dp(dp, i + 1, step, false);
        ptx::wgmma_wait<0>();
      }
      end(i);
    }
  }

  // Does the work of whole_tile() where some q tiles see no key of the kv tile, or do not exist.
  template <class End>
  __device__ __forceinline__ void partial_tile(QGradient (&dq)[pairs], KGradient& dk, VGradient& dv,
                                               int tile, int step, End end) const {
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      const int first = pair * tiles_of_pair;
      const bool hidden = c.template is_hidden<tiles_of_pair>(first, tile);
      wait_empty<Config>(c.shared.ds_empty[pair], step % 2);
      if (hidden) {    // the barriers pass through their phases
        __syncwarp();  // no lane may still wait for the phase that the arrival ends
        arrive_warp<Config>(c.shared.ds_full[pair]);
        arrive_warp<Config>(c.shared.ds_empty[pair]);
      }
#pragma unroll 1
      for (int i = first; i < first + tiles_of_pair; i = uniform(i + 1)) {
        if (!hidden) one_q_tile(dk, dv, i, tile, step);
        end(i);
      }
      if (hidden || pair + 1 == pairs) continue;
      multiply_q(dq[pair], pair, step);
    }
  }

  // dQ of a pair, with no other product at the same time.
  __device__ __forceinline__ void multiply_q(QGradient& dq, unsigned pair, int step) const {
    issue_q(dq, pair, step);
    ptx::wgmma_wait<0>();
    end_q(dq, pair);
  }

  // After the last kv tile: tells load that it may overwrite the q tile. Returns this lane's dead
  // rows of dQ, one bit for each of its two rows; 0 for a tile whose dQ the other warpgroup
  // computes.
  __device__ unsigned release_queries(int q_tile) const {
    if (q_tile >= c.q_tiles()) return 0;
    wait<Config>(c.shared.q_full[q_tile], c.phase());  // maybe no step has waited for it
    wait<Config>(c.shared.dout_full[q_tile], c.phase());
    const int row = warp_row() + LanePosition().row;
    const QueryNumbers<Config>& lse = c.shared.lse[q_tile];
    const unsigned dead = (lse.value[row] == infinity<float>() ? 1u : 0u) |
                          (lse.value[row + 8] == infinity<float>() ? 2u : 0u);
    __syncwarp();
    arrive_warp<Config>(c.shared.q_empty[q_tile]);
    return q_tile % tiles_of_pair == warpgroup ? dead : 0;
  }
  // Tells load that all products that read K and V of a step are done.
  __device__ __forceinline__ void release_keys(int step) const {
    arrive_warp<Config>(c.shared.kv_empty[RingPlace<Config::kv_stages>(step).stage]);
  }

  // Stores the warp's rows of dK or dV of a kv tile, times `scale`.
  template <class Gradient>
  __device__ __forceinline__ void store_kv(Gradient& gradient, const Tensor& tensor, int columns,
                                           int tile, float scale) const {
    const int key = first_key(tile) + warp_row();
    gradient.for_each([&](float& x, int, int, int, int) { x *= scale; });
    const auto now = context_now();
    store(gradient, kv_row<Storage>(tensor, now.seq, now.head, key), tensor, c.seq.rows_kv - key,
          columns);
  }

  // Stores the warp's rows of dQ of the warpgroup's q tile of a pair: zeros in `dead` rows.
  __device__ __forceinline__ void store_q(QGradient& dq, unsigned first, unsigned dead) const {
    const int row = static_cast<int>(first + warpgroup) * Config::block_q + warp_row();
    if (row >= c.seq.rows_q) return;
    const auto scale = static_cast<float>(c.params.scale);
    dq.for_each([&](float& x, int, int, int group, int) { x = dead >> group & 1 ? 0 : x * scale; });
    const auto now = context_now();
    store(dq, q_row<Storage>(c.params.dq, now.seq, now.head, row), c.params.dq, c.seq.rows_q - row,
          c.params.shape.head_dim);
  }

 private:
  // The context, computed again: a head kept for the stores would take registers.
  __device__ __forceinline__ ShortContext<Config> context_now() const {
    return short_context<Config>(c.params, c.shared,
                                 static_cast<int>(ptx::opaque(static_cast<unsigned>(c.round))));
  }
  // Adds the q tile's terms to dK and dV, and stores its dS.
  __device__ __forceinline__ void one_q_tile(KGradient& dk, VGradient& dv, int i, int tile,
                                             int step) const {
    Scores p, dp;
    if (c.template is_hidden<1>(i, tile)) {
      store_scores(Operand{}, i);
      return;
    }
    Operand weights, gradients;
    issue_s(p, i, step, true);
    if (dp_early) issue_dp(dp, i, step, true);
    ptx::wgmma_wait<dp_early>();
    weigh(p, i, tile);
    if (!dp_early) issue_dp(dp, i, step, true);
    ptx::wgmma_wait<0>();
    differentiate_tile(weights, gradients, p, dp, i, tile);
    store_scores(gradients, i);
    issue_kv(dv, weights, c.shared.dout[0], i);
    issue_kv(dk, gradients, c.shared.q[0], i);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dv.value[0]);
    ptx::wgmma_hold(dk.value[0]);
  }

  template <class Gradient>
  __device__ __forceinline__ void store(const Gradient& gradient, Storage* to, const Tensor& tensor,
                                        int rows, int columns) const {
    store_staged(gradient, c.shared.staging[threadIdx.x / 32 - 4], to, tensor.row_stride, rows,
                 columns);
  }
};

// A warpgroup takes its keys of all kv tiles of a head through the q tiles.
template <class Config, class Types = ShortTypes<Config>>
__device__ __forceinline__ void multiply_head(const ShortContext<Config>& c, int warpgroup) {
  const ShortMath<Config> math(c, warpgroup);
  const Shape& shape = c.params.shape;
  typename Types::QGradient dq[Types::pairs];
#pragma unroll
  for (int i = 0; i < Types::pairs; ++i) dq[i].fill(0);
  unsigned dead = 0;  // rows of dQ: two bits for each pair
  constexpr int last = Types::pairs - 1;
#pragma unroll 1
  for (int tile = 0; tile < c.kv_tiles(); ++tile) {
    typename Types::KGradient dk;
    typename Types::VGradient dv;
    dk.fill(0);
    dv.fill(0);
    const int step = uniform(c.step_of(tile));
    const auto end = [&](int i) {
      if (tile + 1 == c.seen_tiles())
        dead |= math.release_queries(i) << 2 * (i / Types::tiles_of_pair);
    };
    if (tile < c.seen_tiles()) {
      if (c.q_tiles() == Config::q_tiles && !c.template is_hidden<1>(0, tile)) {
        math.whole_tile(dq, dk, dv, tile, step, end);
      } else {
        math.partial_tile(dq, dk, dv, tile, step, end);
      }
    }
    math.store_kv(dv, c.params.dv, shape.head_dim_v, tile, 1.0f);
    math.store_kv(dk, c.params.dk, shape.head_dim, tile, static_cast<float>(c.params.scale));
    if (tile >= c.seen_tiles()) continue;
    // By now the other warpgroup has written its dS.
    if (!c.template is_hidden<Types::tiles_of_pair>(last * Types::tiles_of_pair, tile)) {
      math.multiply_q(dq[last], last, step);
    }
    math.release_keys(step);
  }
#pragma unroll
  for (int i = 0; i < Types::pairs; ++i) {
    math.store_q(dq[i], i * Types::tiles_of_pair, dead >> 2 * i);
  }
}

}  // namespace cuflash::fa3
