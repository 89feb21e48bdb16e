// FlashAttention-3 backward, the math roles of wide heads where scores are queries x keys. A
// product has 64 rows, so that a kv tile may then have any multiple of 16 keys. More keys than 64
// mean fewer additions to dQ, which bound wide heads. Two warpgroups share the keys:
//
//   value role   S = Q K^T, P = exp(S - lse) -> shared memory; dV^T += dO^T P
//   key role     dP = dO V^T, dS = P (dP - delta) -> shared memory; dK^T += Q^T dS
//
// Each also computes its columns of dQ = dS K of the step before. A warp of the key role reads P of
// its own 16 queries, lane to lane; products read P and dS of all queries. P is rounded to the
// storage type and multiplied by rounding_factor<Config>.
//
// Who waits for whom, besides the waits listed in backward.cu:
//   barrier 1, 2     the warps of the value role for each other: all of P is written
//   weights_full     the key role for P of a step
//   weights_empty    the value role for the key role: it has read P, which has one buffer
//   ds_full          the key role for itself too: all of dS is written
//   scores           both roles for each other: K and V are free for dK and dV
//
// There are no features, windows or varying lengths, and no blocks that stay or convert rows.
#pragma once

#include "../tile/store_transposed.cuh"
#include "backward_wide.cuh"

namespace cuflash::fa3 {

template <class Config>
struct AcrossTypes {
  static constexpr int rows_of_warp = 16;  // of a product
  using Scores = WarpTile<float, 16, rows_of_warp, Config::block_kv>;
  // Transposed, and product after product: rows m * 64 + warp * 16 and so on.
  using KGradient = WarpTile<float, 16, Config::head_dim / 4, Config::block_kv>;
  using VGradient = WarpTile<float, 16, Config::head_dim_v / 4, Config::block_kv>;
  static constexpr int blocks = Config::block_kv / 16;  // of 16 keys
  using Rounded = unsigned[blocks][4];                  // P or dS of a warp: two fragments a block
  static_assert(Config::head_dim % 64 == 0 && Config::head_dim_v % 64 == 0, "whole products");
};

// Where the lanes of a warp store or load their 16 rows of P or dS, 16 keys at a time.
template <class Panels>
struct ScoreRows {
  unsigned first;
  __device__ __forceinline__ ScoreRows(const Panels& panels, unsigned stage, int warp_row) {
    const int lane = ptx::opaque_lane();
    first = ptx::shared_address(panels.data) + stage * static_cast<unsigned>(sizeof(Panels)) +
            (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
  }
  __device__ __forceinline__ unsigned at(int block) const {
    return (first ^ block % 4 * 32) + block / 4 * Panels::panel_bytes;
  }
};

template <class Config, class Types = BackwardTypes<Config>, class Across = AcrossTypes<Config>>
struct AcrossMath {
  static_assert(!Mask<Config>::has_first && !Config::Lengths::vary && !Config::listed &&
                    !Config::stays && !Config::Weights::drops && !Config::Score::has_slope &&
                    !Config::Score::summed && Config::operand_stages == 0 &&
                    Config::kv_tiles_per_convert_block == 0,
                "tiles of queries x keys do not support these options");
  static_assert(Config::block_q == kRowsOfProduct, "a product has all queries");
  using Storage = typename Config::Storage;
  using Math = BackwardMath<Config>;
  using Scores = typename Across::Scores;
  using Rounded = typename Across::Rounded;
  using ScorePanels = typename Types::ScorePanels;
  using Ring = RingPlace<Config::num_stages>;
  using ScoreRing = RingPlace<Config::score_stages>;
  using Numbered = NumberedBarriers<Config>;
  static constexpr int exponent = rounding_exponent<Config>;
  const Math& math;
  const BackwardContext<Config>& c;

  __device__ explicit AcrossMath(const Math& math) : math(math), c(math.c) {}

  // S = Q K^T or dP = dO V^T, as one group of products.
  template <int depth_end, class Queries, class Keys>
  __device__ __forceinline__ void issue_scores(Scores& scores, const Queries& queries,
                                               const Keys& keys, unsigned stage) const {
    const DepthInColumns<Queries> a(queries);
    const DepthInColumns<Keys> b(keys);
    const unsigned a_step = stage * (sizeof(Queries) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < depth_end; depth += 16) {
      ptx::wgmma<false, false>(Storage{}, scores.value[0], a.at(depth) + a_step, b.at(depth),
                               depth > 0);
    }
    ptx::wgmma_commit();
  }

  // dV^T += dO^T P or dK^T += Q^T dS, as one group of products.
  template <class Gradient, class Queries>
  __device__ __forceinline__ void issue_kv(Gradient& gradient, const Queries& queries,
                                           unsigned stage, const ScorePanels& scores,
                                           unsigned score_stage) const {
    const DepthInRows<Queries> a(queries);
    const DepthInRows<ScorePanels> b(scores);
    const unsigned a_step = stage * (sizeof(Queries) / 16);
    const unsigned b_step = score_stage * (sizeof(ScorePanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < Gradient::row_fragments; ++m) {
      const unsigned panel = a_step + m * (Queries::panel_bytes / 16);
#pragma unroll
      for (int query = 0; query < Config::block_q; query += 16) {
        ptx::wgmma<true, true>(Storage{}, gradient.value[m], a.at(query) + panel,
                               b.at(query) + b_step, true);
      }
    }
    ptx::wgmma_commit();
  }
  template <class Gradient>
  __device__ __forceinline__ void hold(Gradient& gradient) const {
#pragma unroll
    for (int m = 0; m < Gradient::row_fragments; ++m) ptx::wgmma_hold(gradient.value[m]);
  }

  // Whether some pair of the step is masked.
  __device__ bool is_edge(const QPlace& place) const {
    return Mask<Config>::template is_edge<Config::block_q, Config::block_kv>(
        c.seq, place.tile * Config::block_q, c.item.kv_begin);
  }

  // Clears the pairs of P or dP that are hidden or have a dead query, whatever numbers they hold.
  __device__ __forceinline__ void hide(Scores& scores, const QPlace& place,
                                       const QueryNumbers<Config>& lse) const {
    const LanePosition lane;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int row = math.warp_row() + lane.row + 8 * group;
      const int query = place.tile * Config::block_q + row;
      int end = Mask<Config>::visible_end(c.seq, query) - c.item.kv_begin - lane.column;
      if (lse.value[row] == infinity<float>()) end = 0;
#pragma unroll
      for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (Scores::column(n, which) >= end) scores.value[0][n][group][which] = 0;
        }
      }
    }
  }

  // Turns the products Q K^T into P, and stores it rounded.
  __device__ __forceinline__ void exponentiate(Scores& scores,
                                               const QueryNumbers<Config>& lse) const {
    const LanePosition lane;
    const int row = math.warp_row() + lane.row;
    const float offset[2] = {lse.value[row] - exponent, lse.value[row + 8] - exponent};
    scores.for_each([&](float& s, int, int, int group, int) {
      s = Logits<Config>::exponential(s, math.factor, offset[group]);
    });
  }
  __device__ __forceinline__ void store_weights(const Scores& p) const {
    const ScoreRows<ScorePanels> to(c.shared.staging, 0, math.warp_row());
#pragma unroll
    for (int i = 0; i < Across::blocks; ++i) {
      const auto& near = p.value[0][2 * i];
      const auto& far = p.value[0][2 * i + 1];
      ptx::store_matrix_x4(
          to.at(i),
          {pack(Storage{}, near[0][0], near[0][1]), pack(Storage{}, near[1][0], near[1][1]),
           pack(Storage{}, far[0][0], far[0][1]), pack(Storage{}, far[1][0], far[1][1])});
    }
  }
  __device__ __forceinline__ void take_weights(Rounded& weights) const {
    const ScoreRows<ScorePanels> from(c.shared.staging, 0, math.warp_row());
#pragma unroll
    for (int i = 0; i < Across::blocks; ++i) ptx::load_matrix_x4(weights[i], from.at(i));
  }

  // Replaces P by dS = P * (dP - delta), rounded.
  __device__ __forceinline__ void differentiate(Rounded& weights, const Scores& dp,
                                                const QueryNumbers<Config>& delta) const {
    constexpr float inverse = 1 / rounding_factor<Config>;
    const LanePosition lane;
    const int row = math.warp_row() + lane.row;
    const float offset[2] = {delta.value[row] * inverse, delta.value[row + 8] * inverse};
#pragma unroll
    for (int i = 0; i < Across::blocks; ++i) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const auto& pair = dp.value[0][2 * i + part / 2][part % 2];
        const float2 p = unpack(Storage{}, weights[i][part]);
        // `inverse` is a power of two, so the result is exactly the difference times `inverse`.
        weights[i][part] = pack(Storage{}, p.x * fma(pair[0], inverse, -offset[part % 2]),
                                p.y * fma(pair[1], inverse, -offset[part % 2]));
      }
    }
  }
  __device__ __forceinline__ void store_gradients(const Rounded& gradients, unsigned stage) const {
    const ScoreRows<ScorePanels> to(c.shared.ds[0], stage, math.warp_row());
#pragma unroll
    for (int i = 0; i < Across::blocks; ++i) ptx::store_matrix_x4(to.at(i), gradients[i]);
  }

  // The end of a step of either role: adds dQ of the step before to the sums while the gradient of
  // the keys is computed.
  template <class QPart, class Gradient>
  __device__ __forceinline__ void end(StepState& state, QPart& dq, Gradient& gradient, int number,
                                      unsigned dead_rows) const {
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(dq.value[0]);
    if (number > 0) {
      arrive_warp<Config>(c.shared.ds_empty[ScoreRing(number - 1).stage]);
      math.add_q(c.before(state.place), state.dead_before, dq, number - 1);
    }
    ptx::wgmma_wait<0>();
    hold(gradient);
    end_step<Config>(Ring(number).stage);
    math.advance(state, dead_rows);
  }

  __device__ __forceinline__ void value_step(StepState& state, typename Across::VGradient& dv,
                                             int number) const {
    const Ring ring(number);
    const unsigned stage = ring.stage;
    const auto& lse = c.shared.lse[stage];
    typename Types::QGradient dq;
    Scores p;
    wait<Config>(c.shared.q_full[stage], ring.phase);
    issue_scores<Config::head_dim>(p, c.shared.q[0], c.shared.k[0], stage);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(p.value[0]);
    exponentiate(p, lse);
    const bool dead = has_dead_queries(lse);
    if (dead || is_edge(state.place)) hide(p, state.place, lse);
    if (number > 0) meet_over_weights<Config>(Numbered::weights_empty, 0);
    store_weights(p);
    ptx::fence_async_shared();
    jitter<Config>();
    ptx::named_barrier(1, kWarpgroup);
    arrive_over_weights<Config>(Numbered::weights_full, 0);

    wait<Config>(c.shared.dout_full[stage], ring.phase);
    unsigned dead_rows = 0;
    if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.dout[stage]);
    math.issue_q(dq, number - 1, number > 0);
    issue_kv(dv, c.shared.dout[0], stage, c.shared.staging, 0);
    end(state, dq, dv, number, dead_rows);
  }

  __device__ __forceinline__ void key_step(StepState& state, typename Across::KGradient& dk,
                                           int number) const {
    const Ring ring(number);
    const ScoreRing score_ring(number);
    const unsigned stage = ring.stage;
    const auto& lse = c.shared.lse[stage];
    typename Types::LastQGradient dq;
    Scores dp;
    wait<Config>(c.shared.dout_full[stage], ring.phase);
    issue_scores<Config::head_dim_v>(dp, c.shared.dout[0], c.shared.v[0], stage);
    wait<Config>(c.shared.q_full[stage], ring.phase);
    const bool dead = has_dead_queries(lse);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dp.value[0]);
    if (dead || is_edge(state.place)) hide(dp, state.place, lse);
    unsigned dead_rows = 0;
    if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.q[stage]);
    meet_over_weights<Config>(Numbered::weights_full, 0);
    Rounded weights;
    take_weights(weights);
    arrive_over_weights<Config>(Numbered::weights_empty, 0);
    differentiate(weights, dp, c.shared.delta[stage]);
    wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);
    store_gradients(weights, score_ring.stage);
    // The fence waits for additions to device memory that are under way, so it comes before dQ is
    // added.
    ptx::fence_async_shared();
    __syncwarp();
    arrive_warp<Config>(c.shared.ds_full[score_ring.stage]);

    math.issue_q(dq, number - 1, number > 0);
    wait<Config>(c.shared.ds_full[score_ring.stage], score_ring.phase);
    issue_kv(dk, c.shared.q[0], stage, c.shared.ds[0], score_ring.stage);
    end(state, dq, dk, number, dead_rows);
  }

  // The number of steps, computed anew: a register that holds it from the block's beginning spills.
  __device__ __forceinline__ int steps() const {
    if constexpr (Config::cut) return c.steps();
    return (static_cast<int>(ptx::opaque(c.blocks.end)) - c.blocks.begin) * c.group;
  }

  // dQ of the last step.
  template <class QPart>
  __device__ __forceinline__ void finish_q(const StepState& state, int steps) const {
    QPart dq;
    math.issue_q(dq, steps - 1, true);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dq.value[0]);
    math.add_q(c.before(state.place), state.dead_before, dq, steps - 1);
  }

  // Stores a finished gradient, times `factor`, in the tensor or in this block's part.
  template <class Gradient, class Matrix>
  __device__ __forceinline__ void store(Gradient& gradient, Matrix& matrix, const Tensor& tensor,
                                        void* parts, int columns, float factor) const {
    gradient.for_each([&](float& x, int, int, int, int) { x *= factor; });
    bool whole = !Config::parted;
    if constexpr (Config::cut_last) whole = c.has_whole_tile();
    if constexpr (Config::parted) {
      if (!whole) store_part_transposed(static_cast<float*>(parts), gradient, part_row(c));
    }
    if constexpr (!Config::parted || Config::cut_last) {
      if (whole) store_whole(gradient, matrix, tensor, columns);
    }
  }
  // Through the memory of K or V, which the other role may have read too.
  template <class Gradient, class Matrix>
  __device__ __forceinline__ void store_whole(const Gradient& gradient, Matrix& matrix,
                                              const Tensor& tensor, int columns) const {
    jitter<Config>();
    ptx::named_barrier(Numbered::scores, 2 * kWarpgroup);
    write_transposed(gradient, matrix);
    jitter<Config>();
    ptx::named_barrier(static_cast<int>(threadIdx.x) / kWarpgroup, kWarpgroup);
    store_matrix_rows(matrix, kv_row<Storage>(tensor, c.seq, c.item.head, c.item.kv_begin),
                      tensor.row_stride, c.seq.rows_kv - c.item.kv_begin, columns);
  }
};

template <class Config>
__device__ inline void across_value_role(const BackwardContext<Config>& c) {
  const BackwardMath<Config> math(c, 0);
  const AcrossMath<Config> across(math);
  typename AcrossTypes<Config>::VGradient dv;
  dv.fill(0);
  StepState state(c.first(), false);
  const int steps = across.steps();
  wait<Config>(c.shared.k_full, 0);
  int step = 0;
#pragma unroll 1
  do {
    across.value_step(state, dv, step);
  } while (is_step<Config>(++step, steps));
  across.template finish_q<typename BackwardTypes<Config>::QGradient>(state, steps);
  // Meets the last readers of P: a barrier must not be left in the middle of a phase.
  meet_over_weights<Config>(NumberedBarriers<Config>::weights_empty, 0);
  across.store(dv, c.shared.v[0], c.params.dv, c.params.dv_parts, c.params.shape.head_dim_v,
               1 / rounding_factor<Config>);
}

template <class Config>
__device__ inline void across_key_role(const BackwardContext<Config>& c) {
  const BackwardMath<Config> math(c, 1);
  const AcrossMath<Config> across(math);
  typename AcrossTypes<Config>::KGradient dk;
  dk.fill(0);
  StepState state(c.first(), false);
  const int steps = across.steps();
  wait<Config>(c.shared.k_full, 0);
  wait<Config>(c.shared.v_full, 0);
  int step = 0;
#pragma unroll 1
  do {
    across.key_step(state, dk, step);
  } while (is_step<Config>(++step, steps));
  across.template finish_q<typename BackwardTypes<Config>::LastQGradient>(state, steps);
  across.store(dk, c.shared.k[0], c.params.dk, c.params.dk_parts, c.params.shape.head_dim,
               static_cast<float>(c.params.scale));
}

}  // namespace cuflash::fa3
