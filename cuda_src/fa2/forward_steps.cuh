// FlashAttention-2 forward: the parts of one step, in the order they happen.
#pragma once

#include "forward_types.cuh"

namespace cuflash::fa2 {

template <class Config>
__device__ inline void load_q_tile(const ForwardContext<Config>& c) {
  const int begin = c.item.q_tile * Config::block_q;
  copy_tile<Config::copies, ForwardTypes<Config>::threads>(
      c.q(), q_row<const typename Config::Storage>(c.params.q, c.seq, c.item.head, begin),
      c.params.q.row_stride, c.seq.seqlen_q - begin, c.params.shape.head_dim);
}

// The K tile of a step -> its stage; nothing if there is no such step.
template <class Config>
__device__ inline void load_k_tile(const ForwardContext<Config>& c, int step) {
  if (step < c.blocks.count) c.k_stream.load(c.k(step), c.blocks[step].index * Config::block_kv);
}

template <class Config>
__device__ inline void load_v_tile(const ForwardContext<Config>& c, int step) {
  if (step < c.blocks.count) c.v_stream.load(c.v(step), c.blocks[step].index * Config::block_kv);
}

// Reference and sum of this warp's rows, and its output, as they begin.
template <class Config>
__device__ inline void begin_rows(const ForwardContext<Config>& c, ForwardState<Config>& state) {
  const LanePosition lane;
  state.output.fill(0);
  state.settled = false;
  state.reference.for_each([&](typename Config::Compute& reference, int m, int group) {
    begin_row<Config>(reference, state.sum.value[m][group], c.item,
                      c.first_query() + lane.row + ForwardTypes<Config>::Scores::row(m, group));
    // One of the lanes that share the row holds it.
    if (lane.column != 0 || c.part() != 0) state.sum.value[m][group] = 0;
  });
}

// scores = Q K^T of a step, masked; of this warp's keys.
template <class Config, class Scores>
__device__ inline void score_tile(const ForwardContext<Config>& c, Scores& scores, int step) {
  scores.fill(0);
  Products<Config>::template multiply_ahead<Config::head_dim>(
      scores, rows_by_depth(c.q(), c.row0), rows_by_depth(c.k(step), c.first_key()));
  const Block block = c.blocks[step];
  prepare_scores<Config>(scores, c.item, c.seq, c.first_query(),
                         block.index * Config::block_kv + c.first_key(), block.edge);
}

// output *= keep, sum *= keep.
template <class Config, class Rows>
__device__ inline void rescale(ForwardState<Config>& state, const Rows& keep) {
  using Compute = typename Config::Compute;
  state.sum.for_each([&](Compute& x, int m, int group) { x *= keep.value[m][group]; });
  state.output.for_each([&](Compute& x, int m, int, int group, int) { x *= keep.value[m][group]; });
}

// Moves the references of this warp's rows to the maxima of the scores from column `first` on,
// where they have risen by more than the slack. The columns before are weights already; those of
// the last group of them have not been multiplied yet.
template <class Config, int group_columns, class Scores>
__device__ inline void follow_maxima(ForwardState<Config>& state, Scores& scores,
                                     typename Config::Compute factor, int first) {
  using Compute = typename Config::Compute;
  typename ForwardTypes<Config>::Rows maxima = row_maxima(scores, first);
  typename ForwardTypes<Config>::Rows keep;
  if (!move_references<Config>(state.reference, keep, maxima, factor)) return;
  rescale(state, keep);
  scores.for_each([&](Compute& x, int m, int n, int group, int) {
    if (n * 8 < first && n * 8 >= first - group_columns) x *= keep.value[m][group];
  });
}

// Columns [first, first + columns) of the scores -> weights, and their sums.
//
// With `maxima_on_demand` the maxima of a tile are looked for only if they can matter: while a row
// has no reference, and where these weights come out too large for it, which their sums tell.
template <class Config, int columns, class Scores>
__device__ inline void weigh_part(ForwardState<Config>& state, Scores& scores,
                                  typename ForwardTypes<Config>::Rows& offset,
                                  typename Config::Compute factor, int first) {
  using Compute = typename Config::Compute;
  WarpTile<Compute, Config::fragment_rows, Scores::rows, columns> part;
  typename ForwardTypes<Config>::Rows sums;
  weigh_columns<Config>(part, sums, scores, offset, factor, first);
  if constexpr (Config::maxima_on_demand) {
    bool fits = true;  // a NaN does not
    sums.for_each([&](Compute& x, int, int) { fits = fits && x < Logits<Config>::most_weight(); });
    if (!__all_sync(0xffffffffu, fits)) {
      follow_maxima<Config, columns>(state, scores, factor, first);
      offset = offsets_of(state.reference);
      weigh_columns<Config>(part, sums, scores, offset, factor, first);
    }
  }
  part.for_each([&](Compute& x, int m, int n, int group, int which) {
    scores.value[m][first / 8 + n][group][which] = x;
  });
  sums.for_each([&](Compute& x, int m, int group) { state.sum.value[m][group] += x; });
}

// What turns scores into weights as products ask for them.
template <class Config, class Scores>
struct PartWeights {
  ForwardState<Config>& state;
  Scores& scores;
  typename ForwardTypes<Config>::Rows& offset;
  typename Config::Compute factor;
  template <int columns>
  __device__ void prepare(int first) const {
    weigh_part<Config, columns>(state, scores, offset, factor, first);
  }
};

// scores -> weights, output += weights V of a step; by a warp whose rows no other one shares.
template <class Config, class Scores>
__device__ inline void weigh_tile(const ForwardContext<Config>& c, ForwardState<Config>& state,
                                  Scores& scores, int step) {
  using Compute = typename Config::Compute;
  const Compute factor = Logits<Config>::factor(c.params.scale);
  if (!Config::maxima_on_demand || !state.settled) {
    follow_maxima<Config, 0>(state, scores, factor, 0);
    if constexpr (Config::maxima_on_demand) {
      bool settled = true;
      state.reference.for_each(
          [&](Compute& x, int, int) { settled = settled && x != -infinity<Compute>(); });
      state.settled = __all_sync(0xffffffffu, settled);
    }
  }
  auto offset = offsets_of(state.reference);
  Products<Config>::template multiply_prepared_weights<ForwardTypes<Config>::keys_at_once>(
      state.output, scores, depth_by_rows(c.v(step), Zero{}), c.p(), c.row0, 0,
      PartWeights<Config, Scores>{state, scores, offset, factor});
}

}  // namespace cuflash::fa2
