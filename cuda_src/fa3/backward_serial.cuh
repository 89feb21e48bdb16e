// FlashAttention-3 backward, a step of the math role where dK and dV of 64 keys leave a warpgroup
// no room for two tiles of scores: K has more than 128 columns and V at most 128.
//
// The warpgroup computes one tile of scores after the other. It keeps P rounded, as the operand of
// dV, and dS only in shared memory, where dK reads it too. dQ of the step before takes the
// registers of P after dV has read them. Work that a warpgroup cannot overlap with its own other
// work overlaps with that of the other warpgroup.
#pragma once

#include "backward_math.cuh"

namespace cuflash::fa3 {

template <class Config, class Types = BackwardTypes<Config>>
struct SerialMath {
  using Storage = typename Config::Storage;
  using Scores = typename Types::Scores;
  using Ring = RingPlace<Config::num_stages>;
  using ScoreRing = RingPlace<Config::score_stages>;
  static constexpr float factor = rounding_factor<Config>;
  using Math = BackwardMath<Config>;
  const Math& math;
  const BackwardContext<Config>& c;

  __device__ explicit SerialMath(const Math& math) : math(math), c(math.c) {}

  // Adds dQ of the step before to the sums. The state only says whether that step has dead queries;
  // the lane reads again which of its rows are dead.
  __device__ __forceinline__ void add_q(const StepState& state, typename Types::QGradient& dq,
                                        int number) const {
    const QPlace before = place_before(c, state, number + 1);
    unsigned dead_rows = 0;
    if (state.dead_before) {
      const LanePosition lane;
      const auto* lse = static_cast<const float*>(c.params.row_lse) + c.head_row(before.head) +
                        before.tile * Config::block_q + math.warp_row() + lane.row;
      dead_rows = (lse[0] == infinity<float>() ? 1u : 0u) | (lse[8] == infinity<float>() ? 2u : 0u);
    }
    math.add_q(before, dead_rows, dq, number);
  }

  // A whole warpgroup waits for its turn to make scores. The other one passes the turn on before it
  // makes gradients.
  __device__ __forceinline__ void await_turn() const {
    jitter<Config>();
    ptx::named_barrier(NumberedBarriers<Config>::scores + math.warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    jitter<Config>();
    ptx::named_barrier_arrive(NumberedBarriers<Config>::scores + 1 - math.warpgroup,
                              2 * kWarpgroup);
  }

  // P of a step, rounded, with zeros where it is hidden; also P times the slopes where scores have
  // slopes.
  __device__ __forceinline__ void score(ScoreOperand<Config>& weights, ScoreOperand<Config>& sloped,
                                        const StepState& state, const Ring& ring, bool edge,
                                        bool& dead, int number) const {
    const RowsOfKeys place = math.await_operand(state, number);
    const auto& lse = c.shared.lse[ring.stage];
    Scores p;
    wait<Config>(c.shared.q_full[ring.stage], ring.phase);
    math.template issue_scores<Config::head_dim>(p, c.shared.k[0], c.shared.q[0], ring.stage);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(p.value[0]);
    constexpr int exponent = rounding_exponent<Config>;
    if constexpr (Math::has_slope) {
      exponentiate<Config, exponent>(c.params, p, weights, sloped, lse, place, math.factor);
      math.release_operand(number);
      dead = has_dead_queries(lse);
      if (dead || edge) apply_mask<Config>(lse, c.seq, place, weights, sloped);
      ptx::wgmma_hold(sloped.value);
    } else {
      exponentiate<Config, exponent>(c.params, p, lse, place, math.factor);
      math.release_operand(number);
      dead = has_dead_queries(lse);
      if (dead || edge) apply_mask<Config>(lse, c.seq, place, p);
      round_weights(weights, p, 1);
    }
    ptx::wgmma_hold(weights.value);
  }

  // Makes dS of a step and stores it in shared memory.
  __device__ __forceinline__ void differentiate(ScoreOperand<Config>& weights,
                                                const ScoreOperand<Config>& sloped,
                                                const StepState& state, const Ring& ring,
                                                unsigned score_stage, bool edge, bool dead) const {
    // The place is recomputed: otherwise the compiler would keep the hidden pairs of P for dP.
    const RowsOfKeys place = math.score_place(state);
    Scores dp;
    wait<Config>(c.shared.dout_full[ring.stage], ring.phase);
    math.template issue_scores<Config::head_dim_v>(dp, c.shared.v[0], c.shared.dout[0], ring.stage);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dp.value[0]);
    if (dead) {
      apply_mask<Config>(c.shared.lse[ring.stage], c.seq, place, dp);
    } else if (edge) {
      apply_mask_to_live_queries<Config>(c.seq, place, dp);
    }
    if constexpr (Config::Weights::drops) {
      differentiate_dropped(weights, sloped, dp, place, ring, score_stage);
      return;
    }
    sum_pairs<Config, rounding_exponent<Config>>(c, place, weights, dp, c.shared.delta[ring.stage]);
    const GradientsPlace<typename Types::ScorePanels> to(c.shared.ds[0], score_stage, math.part);
#pragma unroll
    for (int i = 0; i < Config::block_q / 16; ++i) {
      unsigned gradients[4];
      differentiate_rounded(gradients, i, Math::has_slope ? sloped : weights, dp,
                            c.shared.delta[ring.stage]);
      to.store(i, gradients);
    }
  }

  // The same where weights are dropped; removes the dropped ones from `weights`.
  __device__ __forceinline__ void differentiate_dropped(ScoreOperand<Config>& weights,
                                                        const ScoreOperand<Config>& sloped,
                                                        const Scores& dp, const RowsOfKeys& place,
                                                        const Ring& ring,
                                                        unsigned score_stage) const {
    const GradientsPlace<typename Types::ScorePanels> to(c.shared.ds[0], score_stage, math.part);
    const StepDraws<Config> draws(c.params, place);
    DroppedGradients<Config, rounding_exponent<Config>> dropped(c, place,
                                                                c.shared.delta[ring.stage]);
#pragma unroll
    for (int i = 0; i < Config::block_q / 16; ++i) {
      unsigned gradients[4], masks[4];
      draws.of_block(masks, i);
      dropped.of_block(gradients, masks, i, weights, Math::has_slope ? sloped : weights, dp);
      to.store(i, gradients);
#pragma unroll
      for (int part = 0; part < 4; ++part) weights.value[i][part] &= masks[part];
    }
    dropped.store();
  }

  // dK += dS^T Q from the warpgroup's own dS in shared memory, as one group of products.
  __device__ __forceinline__ void issue_k(typename Types::KGradient& dk, unsigned score_stage,
                                          unsigned stage) const {
    using Panels = typename Types::ScorePanels;
    const DepthInRows<Panels> a(c.shared.ds[0]);
    const DepthInRows<typename Types::QPanels> b(c.shared.q[0]);
    const unsigned a_step =
        score_stage * (sizeof(Panels) / 16) + math.part * (Panels::panel_bytes / 16);
    const unsigned b_step = stage * (sizeof(typename Types::QPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int query = 0; query < Config::block_q; query += 16) {
      ptx::wgmma<true, true>(Storage{}, dk.value[0], a.at(query) + a_step, b.at(query) + b_step,
                             true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void step(StepState& state, typename Types::KGradient& dk,
                                       typename Types::VGradient& dv, int number) const {
    const Ring ring(number);
    const ScoreRing score_ring(number);
    const unsigned stage = ring.stage;
    math.find_place(state, number);
    const bool edge = math.is_edge(state.place);
    ScoreOperand<Config> weights, sloped;
    bool dead;
    await_turn();
    score(weights, sloped, state, ring, edge, dead, number);
    if (math.warpgroup == 0 || number + 1 < c.steps()) pass_turn();
    wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);
    differentiate(weights, sloped, state, ring, score_ring.stage, edge, dead);
    if (dead) {
      math.clear_dead(state.place, c.shared.lse[stage], c.shared.q[stage], c.shared.dout[stage]);
    }

    math.issue_kv(dv, weights, c.shared.dout[0], stage);
    ptx::fence_async_shared();
    // All of the warpgroup's dS is written after this barrier, for its own dK and for dQ.
    // clear_dead() uses the same barrier, but before this wait or not at all.
    jitter<Config>();
    ptx::named_barrier(static_cast<int>(threadIdx.x) / kWarpgroup, kWarpgroup);
    arrive_warp<Config>(c.shared.ds_full[score_ring.stage]);
    issue_k(dk, score_ring.stage, stage);
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(dv.value[0]);

    typename Types::QGradient dq;
    math.issue_q(dq, number - 1, number > 0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dk.value[0]);
    ptx::wgmma_hold(dq.value[0]);
    end_step<Config>(stage);
    if (number > 0) {
      arrive_warp<Config>(c.shared.ds_empty[ScoreRing(number - 1).stage]);
      add_q(state, dq, number - 1);
    }
    math.advance(state, dead);
  }
};

template <class Config>
__device__ inline void serial_role(const BackwardContext<Config>& c, int warpgroup) {
  using Types = BackwardTypes<Config>;
  const BackwardMath<Config> math(c, warpgroup);
  const SerialMath<Config> serial(math);
  typename Types::KGradient dk;
  typename Types::VGradient dv;
  dk.fill(0);
  dv.fill(0);
  StepState state(c.first(), false);
  const int steps = c.steps();
  wait<Config>(c.shared.k_full, 0);
  wait<Config>(c.shared.v_full, 0);
  if (warpgroup == 1) serial.pass_turn();
  int step = 0;
#pragma unroll 1
  do {
    serial.step(state, dk, dv, step);
  } while (is_step<Config>(++step, steps));
  typename Types::QGradient dq;
  math.issue_q(dq, steps - 1, true);
  ptx::wgmma_wait<0>();
  ptx::wgmma_hold(dq.value[0]);
  serial.add_q(state, dq, steps - 1);
  math.end_sums();
  math.store_v(dv, 1 / serial.factor);
  math.store_k(dk);
}

}  // namespace cuflash::fa3
