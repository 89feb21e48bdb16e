// FlashAttention-3 backward, the math roles of wide heads. Two warpgroups can hold dK and dV of no
// more than 64 keys, so both have the same keys:
//
//   value role   S^T = K Q^T, P = exp(S - lse) -> shared memory; dV += P^T dO
//   key role     dP^T = V dO^T, dS = P (dP - delta) -> shared memory; dK += dS^T Q
//
// Each also computes its columns of dQ = dS K of the step before. A warp of the value role passes
// P, lane to lane and rounded to the storage type, to the warp of the key role that has the same
// keys. Where weights are dropped, a negative P marks a dropped weight. Slopes are multiplied into
// P before that: where they may be negative, nothing is marked and the key role makes the draws
// too.
#pragma once

#include "backward_math.cuh"

namespace cuflash::fa3 {

// The buffers of P lie in the staging of the results: stage 0 in the staging of the value role's
// warps, stage 1 in that of the key role's warps. Where scores have slopes, the buffers hold P
// times the slopes.
template <class Config>
__device__ inline uint4* passed_weights(BackwardStorage<Config>& shared, unsigned stage) {
  static_assert(4 * Config::score_stages <= BackwardTypes<Config>::math_warps &&
                    sizeof(StagedRows) == 2 * 16 * Config::block_q,
                "there is room");
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  return &shared.staging[stage * 4 + warp].chunks[0][0] + ptx::opaque_lane();
}

template <class Config>
__device__ __forceinline__ void meet_over_weights(int barrier, unsigned stage) {
  jitter<Config>();
  ptx::named_barrier(barrier + stage, 2 * kWarpgroup);
}
template <class Config>
__device__ __forceinline__ void arrive_over_weights(int barrier, unsigned stage) {
  jitter<Config>();
  ptx::named_barrier_arrive(barrier + stage, 2 * kWarpgroup);
}

template <class Config>
__device__ __forceinline__ void pass_operand(uint4* to, const ScoreOperand<Config>& weights) {
#pragma unroll
  for (int i = 0; i < Config::block_q / 16; ++i) {
    const auto& four = weights.value[i];
    to[32 * i] = make_uint4(four[0], four[1], four[2], four[3]);
  }
}
template <class Config, class Scores>
__device__ __forceinline__ void pass_weights(uint4* to, const Scores& p) {
  ScoreOperand<Config> weights;
  round_weights(weights, p, rounding_factor<Config>);
  pass_operand(to, weights);
}

template <class Config>
__device__ __forceinline__ void take_weights(ScoreOperand<Config>& weights, const uint4* from) {
#pragma unroll
  for (int i = 0; i < Config::block_q / 16; ++i) {
    const uint4 four = from[32 * i];
    weights.value[i][0] = four.x;
    weights.value[i][1] = four.y;
    weights.value[i][2] = four.z;
    weights.value[i][3] = four.w;
  }
}

template <class Config, class Types = BackwardTypes<Config>>
struct WideMath {
  static_assert(Config::operand_stages == 0,
                "there is no room for what a term of the scores reads");
  using Math = BackwardMath<Config>;
  using Scores = typename Types::Scores;
  using Ring = RingPlace<Config::num_stages>;
  using ScoreRing = RingPlace<Config::score_stages>;
  using Numbered = NumberedBarriers<Config>;
  static constexpr bool drops = Config::Weights::drops;
  static constexpr bool marks = drops && !Config::Score::any_slope;  // dropped weights, by a sign
  using KeyBits = StepBits<Config, drops && !marks>;                 // the draws of the key role
  const Math& math;
  const BackwardContext<Config>& c;

  __device__ explicit WideMath(const Math& math) : math(math), c(math.c) {}

  // The end of a step of either role: adds dQ of the step before to the sums while the gradient of
  // the keys is computed.
  template <class QPart, class Gradient>
  __device__ __forceinline__ void end(StepState& state, QPart& dq, Gradient& gradient, int number,
                                      unsigned dead_rows) const {
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(dq.value[0]);
    if (number > 0) {
      arrive_warp<Config>(c.shared.ds_empty[ScoreRing(number - 1).stage]);
      math.add_q(place_before(c, state, number), state.dead_before, dq, number - 1);
    }
    math.advance(state, dead_rows);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(gradient.value[0]);
    end_step<Config>(Ring(number).stage);
  }

  // Clears the dropped weights, and marks them in `passed` by a negative sign, unless P may be
  // negative.
  __device__ __forceinline__ void drop(ScoreOperand<Config>& weights, ScoreOperand<Config>& passed,
                                       const RowsOfKeys& place) const {
    const StepDraws<Config> draws(c.params, place);
#pragma unroll
    for (int i = 0; i < Config::block_q / 16; ++i) {
      unsigned masks[4];
      draws.of_block(masks, i);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        weights.value[i][part] &= masks[part];
        if constexpr (marks) passed.value[i][part] |= ~masks[part] & 0x80008000u;
      }
    }
  }

  // dS from the passed weights; `bits` says which are dropped, or else the negative ones are.
  __device__ __forceinline__ void differentiate_passed(ScoreOperand<Config>& gradients,
                                                       ScoreOperand<Config>& weights,
                                                       const Scores& dp, const RowsOfKeys& place,
                                                       const QueryNumbers<Config>& delta,
                                                       const KeyBits& bits) const {
    DroppedGradients<Config, rounding_exponent<Config>> dropped(c, place, delta);
#pragma unroll
    for (int i = 0; i < Config::block_q / 16; ++i) {
      unsigned masks[4];
      if constexpr (marks) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          masks[part] = ~weights.value[i][part] & 0x80008000u;
          weights.value[i][part] &= 0x7fff7fffu;
        }
      } else {
        bits.of_block(masks, i);
      }
      dropped.of_block(gradients.value[i], masks, i, weights, weights, dp);
    }
    dropped.store();
  }

  __device__ __forceinline__ void value_step(StepState& state, typename Types::VGradient& dv,
                                             int number) const {
    const Ring ring(number);
    const unsigned stage = ring.stage;
    const unsigned passing = ScoreRing(number).stage;
    Scores p;
    typename Types::QGradient dq;
    math.find_place(state, number);
    wait<Config>(c.shared.q_full[stage], ring.phase);
    math.template issue_scores<Config::head_dim>(p, c.shared.k[0], c.shared.q[0], stage);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(p.value[0]);

    const RowsOfKeys place = math.score_place(state);
    const auto& lse = c.shared.lse[stage];
    ScoreOperand<Config> weights;
    if constexpr (Math::has_slope) {
      exponentiate<Config>(c.params, p, weights, p, lse, place, math.factor);
    } else {
      exponentiate<Config>(c.params, p, lse, place, math.factor);
    }
    const bool dead = has_dead_queries(lse);
    if (dead || math.is_edge(state.place)) {
      if constexpr (Math::has_slope) {
        apply_mask<Config>(lse, c.seq, place, p, weights);
      } else {
        apply_mask<Config>(lse, c.seq, place, p);
      }
    }
    [[maybe_unused]] ScoreOperand<Config> passed;
    if constexpr (drops) {
      round_weights(passed, p, rounding_factor<Config>);
      if constexpr (!Math::has_slope) round_weights(weights, p, 1);
      drop(weights, passed, place);
    }
    // ds_full of two steps ago implies that P of that step has been read, but only lane 0 of each
    // warp arrives there. This barrier orders all lanes.
    if (number >= Config::score_stages) meet_over_weights<Config>(Numbered::weights_empty, passing);
    if constexpr (drops) {
      pass_operand(passed_weights(c.shared, passing), passed);
    } else {
      pass_weights<Config>(passed_weights(c.shared, passing), p);
    }
    arrive_over_weights<Config>(Numbered::weights_full, passing);
    if constexpr (!Math::has_slope && !drops) round_weights(weights, p, 1);

    wait<Config>(c.shared.dout_full[stage], ring.phase);
    unsigned dead_rows = 0;
    if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.dout[stage]);
    math.issue_q(dq, number - 1, number > 0);
    math.issue_kv(dv, weights, c.shared.dout[0], stage);
    end(state, dq, dv, number, dead_rows);
  }

  __device__ __forceinline__ void key_step(StepState& state, typename Types::KGradient& dk,
                                           int number) const {
    const Ring ring(number);
    const ScoreRing score_ring(number);
    const unsigned stage = ring.stage;
    Scores dp;
    typename Types::LastQGradient dq;
    math.find_place(state, number);
    wait<Config>(c.shared.dout_full[stage], ring.phase);
    math.template issue_scores<Config::head_dim_v>(dp, c.shared.v[0], c.shared.dout[0], stage);
    const KeyBits bits(c.params, math.score_place(state));
    wait<Config>(c.shared.q_full[stage], ring.phase);
    const auto& lse = c.shared.lse[stage];
    const bool dead = has_dead_queries(lse);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dp.value[0]);

    const RowsOfKeys place = math.score_place(state);
    if (dead || math.is_edge(state.place)) apply_mask<Config>(lse, c.seq, place, dp);
    unsigned dead_rows = 0;
    if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.q[stage]);
    meet_over_weights<Config>(Numbered::weights_full, score_ring.stage);
    ScoreOperand<Config> weights;
    take_weights(weights, passed_weights(c.shared, score_ring.stage));
    arrive_over_weights<Config>(Numbered::weights_empty, score_ring.stage);
    static_assert(!(Config::Score::summed && Math::has_slope), "P without slopes is not here");
    ScoreOperand<Config> gradients;
    if constexpr (drops) {
      differentiate_passed(gradients, weights, dp, place, c.shared.delta[stage], bits);
    } else {
      sum_pairs<Config, rounding_exponent<Config>>(c, place, weights, dp, c.shared.delta[stage]);
      differentiate_rounded<Config>(gradients, weights, dp, c.shared.delta[stage]);
    }
    wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);
    store_gradients<Config>(gradients, c.shared.ds[0], score_ring.stage, 0);

    math.issue_q(dq, number - 1, number > 0);
    math.issue_kv(dk, gradients, c.shared.q[0], stage);
    // The fence waits for additions to device memory that are under way, so it comes before dQ is
    // added.
    ptx::fence_async_shared();
    __syncwarp();
    arrive_warp<Config>(c.shared.ds_full[score_ring.stage]);
    end(state, dq, dk, number, dead_rows);
  }

  // dQ of the last step.
  template <class QPart>
  __device__ __forceinline__ void finish_q(const StepState& state, int steps) const {
    QPart dq;
    math.issue_q(dq, steps - 1, true);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dq.value[0]);
    math.add_q(place_before(c, state, steps), state.dead_before, dq, steps - 1);
    math.end_sums();
  }
};

template <class Config>
__device__ inline void value_role(const BackwardContext<Config>& c) {
  using Types = BackwardTypes<Config>;
  const BackwardMath<Config> math(c, 0);
  const WideMath<Config> wide(math);
  typename Types::VGradient dv;
  dv.fill(0);
  StepState state(c.first(), false);
  const int steps = c.steps();
  wait<Config>(c.shared.k_full, 0);
  int step = 0;
#pragma unroll 1
  do {
    wide.value_step(state, dv, step);
  } while (is_step<Config>(++step, steps));
  wide.template finish_q<typename Types::QGradient>(state, steps);
  // Meets the last readers of P: a barrier must not be left in the middle of a phase.
  for (step = max(0, steps - Config::score_stages); step < steps; ++step) {
    meet_over_weights<Config>(NumberedBarriers<Config>::weights_empty, step % Config::score_stages);
  }
  math.store_v(dv, 1.0f);
}

template <class Config>
__device__ inline void key_role(const BackwardContext<Config>& c) {
  using Types = BackwardTypes<Config>;
  const BackwardMath<Config> math(c, 1);
  const WideMath<Config> wide(math);
  typename Types::KGradient dk;
  dk.fill(0);
  StepState state(c.first(), false);
  const int steps = c.steps();
  wait<Config>(c.shared.k_full, 0);
  wait<Config>(c.shared.v_full, 0);
  int step = 0;
#pragma unroll 1
  do {
    wide.key_step(state, dk, step);
  } while (is_step<Config>(++step, steps));
  wide.template finish_q<typename Types::LastQGradient>(state, steps);
  math.store_k(dk);
}

}  // namespace cuflash::fa3
