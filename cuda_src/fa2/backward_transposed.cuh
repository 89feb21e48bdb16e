// FlashAttention-2 backward with scores as keys x queries: the warps divide the keys, and a warp's
// P and dS are, in its registers, the left operands of its own dV and dK. Only dS passes through
// shared memory, for dQ.
#pragma once

#include "backward_steps.cuh"

namespace cuflash::fa2 {

template <class Config>
struct TransposedTypes {
  static constexpr int keys = Config::block_kv / Config::warps;  // of a warp
  using Scores = WarpTile<typename Config::Compute, Config::fragment_rows, keys, Config::block_q>;
};

// One number for each query of a tile of scores, in the layout of the columns that a lane holds.
template <class Config>
struct QueryNumbers {
  using Compute = typename Config::Compute;
  using Scores = typename TransposedTypes<Config>::Scores;
  Compute value[Scores::column_fragments][2];
  __device__ explicit QueryNumbers(const Compute* from) {
    const LanePosition lane;
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        value[n][which] = from[lane.column + Scores::column(n, which)];
      }
    }
  }
};

// Clears the dead queries of a tile: their rows of Q and dO are zeros, but a K or V that is not
// finite makes NaN of them.
template <class Config, class Tile>
__device__ inline void clear_dead_queries(const BackwardContext<Config>& c, const QStep& step,
                                          Tile& tile) {
  using Compute = typename Config::Compute;
  const QueryNumbers<Config> lse(c.lse(step.stage));
  tile.for_each([&](Compute& x, int, int n, int, int which) {
    if (lse.value[n][which] == infinity<Compute>()) x = Compute(0);
  });
}

// Exponentiates scores to P^T = exp(scores * factor - lse); clears hidden pairs and dead queries.
template <class Config, class Scores>
__device__ inline void exponentiate_transposed(const BackwardContext<Config>& c, const QStep& step,
                                               Scores& scores, SlopesOf<Config, Scores>& slopes,
                                               int key0, bool dead) {
  using Compute = typename Config::Compute;
  const LanePosition lane;
  const QueryNumbers<Config> lse(c.lse(step.stage));
  const Compute factor = logit_factor<Config>(c.params);
  change_scores<Config>(c.params,
                        RowsOfKeys{c.item.entry, step.head, step.q_begin, c.item.kv_begin + key0},
                        scores, slopes);
  scores.for_each([&](Compute& s, int, int n, int, int which) {
    s = Logits<Config>::exponential(s, factor, lse.value[n][which]);
  });
  if (dead) clear_dead_queries(c, step, scores);
  if (!step.edge) return;
  scores.for_each([&](Compute& s, int m, int n, int group, int which) {
    const int i = step.q_begin + lane.column + Scores::column(n, which);
    const int j = c.item.kv_begin + key0 + lane.row + Scores::row(m, group);
    if (!Mask<Config>::visible(c.seq, i, j)) s = Compute(0);
  });
}

// Turns dP^T into dS^T = P^T * (dP^T - delta); `p` is P times the slopes. Clears dead queries.
template <class Config, class Scores>
__device__ inline void differentiate_transposed(const BackwardContext<Config>& c, const QStep& step,
                                                Scores& ds, const Scores& p, bool dead) {
  using Compute = typename Config::Compute;
  const QueryNumbers<Config> delta(c.delta(step.stage));
  ds.for_each([&](Compute& x, int m, int n, int group, int which) {
    x = p.value[m][n][group][which] * (x - delta.value[n][which]);
  });
  if (dead) clear_dead_queries(c, step, ds);
}

// dV_j += P_ij^T dO_i and dK_j += dS_ij^T Q_i for this warp's keys; stores dS_ij^T in its stage.
template <class Config, class KGradient, class VGradient>
__device__ inline void transposed_step(const BackwardContext<Config>& c, const QStep& step, int i,
                                       bool dead, KGradient& dk, VGradient& dv) {
  using Scores = typename TransposedTypes<Config>::Scores;
  using P = Products<Config>;
  const int key0 = static_cast<int>(threadIdx.x) / 32 * Scores::rows;
  const auto unused = c.p(0);
  Scores p;
  p.fill(0);
  P::template multiply_ahead<Config::head_dim>(p, rows_by_depth(c.k(), key0),
                                               rows_by_depth(c.q(step.stage), 0));
  SlopesOf<Config, Scores> slopes;
  exponentiate_transposed(c, step, p, slopes, key0, dead);
  const RowsOfKeys place{c.item.entry, step.head, step.q_begin, c.item.kv_begin + key0};
  const KeptPairs<Config, Scores> kept(c.params, place);
  P::multiply_weights(dv, kept.of_weights(p), depth_by_rows(c.dout(step.stage), Zero{}), unused, 0,
                      0);
  if constexpr (!Config::Score::summed) slopes.multiply(p);
  Scores ds;
  ds.fill(0);
  // With fragments loaded ahead, the product would need more registers than P leaves.
  P::template multiply<Config::head_dim_v>(ds, rows_by_depth(c.v(), key0),
                                           rows_by_depth(c.dout(step.stage), 0));
  kept.scale_gradients(c.params, ds);
  differentiate_transposed(c, step, ds, p, dead);
  if constexpr (Config::Score::summed) {
    sum_pairs<Config>(c.params, place, c.item.kv_begin, p, ds);
    slopes.multiply(ds);
  }
  store_shared<Config::architecture>(ds, c.ds_transposed(i), key0, Zero{});
  P::multiply_weights(dk, ds, depth_by_rows(c.q(step.stage), Zero{}), unused, 0, 0);
}

// All steps. At the one barrier of a step i its Q and dO have arrived, dS of step i - 1 is
// complete, and every warp has read Q, dO and dS of step i - 2. Half of the warps add dQ of the
// step before to its sums before the scores, the others after them.
template <class Config, class KGradient, class VGradient>
__device__ inline void steps_transposed(const BackwardContext<Config>& c,
                                        const QSteps<Config>& steps, KGradient& dk, VGradient& dv) {
  static_assert(Config::num_stages == 3 && Config::score_stages == 2, "three steps are under way");
  QStep step = steps.first();
  QStep before = step;
  bool dead_before = false;
  QLoads<Config> loads(c, steps);
  OpenTurn<Config::ordered> open;
  load_step(c, steps, loads);
  const bool scores_first = static_cast<int>(threadIdx.x) / 32 < Config::warps / 2;
  for (int i = 0; i < steps.count; ++i) {
    arrive_step<Config>();
    const bool seen = sees_dead_row(c, step);  // its latency is hidden behind the copies
    load_step(c, steps, loads);
    const bool dead = clear_inputs(c, step, seen);
    if (!scores_first && i > 0) accumulate_q(c, before, i - 1, dead_before, open);
    transposed_step(c, step, i, dead, dk, dv);
    if (scores_first && i > 0) accumulate_q(c, before, i - 1, dead_before, open);
    before = step;
    dead_before = dead;
    step = steps.after(step);
  }
  __syncthreads();
  accumulate_q(c, before, steps.count - 1, dead_before, open);
  open.pass();
}

}  // namespace cuflash::fa2
