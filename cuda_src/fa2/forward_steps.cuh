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

// Copies keys or values of a step from pages to a tile; nothing if there is no such step.
template <class Config, class Tile>
__device__ inline void load_from_pages(const ForwardContext<Config>& c, const Tile& tile,
                                       const Tensor& tensor, int columns, int step) {
  if (step >= c.blocks.count()) return;
  const int kv_head = c.item.head / (c.params.shape.heads_q / c.params.shape.heads_kv);
  const int key = c.blocks[step].index * Config::block_kv;
  Config::Keys::template copy<Config, ForwardTypes<Config>::threads>(tile, tensor, c.params, c.seq,
                                                                     kv_head, key, columns);
}

// Loads the K tile of a step to its stage; nothing if there is no such step. The first step has the
// last tile, the only one that may reach beyond the keys.
template <bool first = false, class Config>
__device__ inline void load_k_tile(ForwardContext<Config>& c, int step) {
  if constexpr (Config::Score::skips) {
    if (step < c.blocks.count()) {
      c.blocks.find(step);
      c.k_stream.move(-c.blocks.left_out(step) * Config::block_kv * c.k_stream.row_stride);
    }
  }
  if constexpr (Config::Keys::paged) {
    load_from_pages(c, c.k(step), c.params.k, c.params.shape.head_dim, step);
  } else {
    c.k_stream.template load<!first>(c.k(step), step < c.blocks.count(), c.last_rows());
  }
}

template <bool first = false, class Config>
__device__ inline void load_v_tile(ForwardContext<Config>& c, int step) {
  if constexpr (Config::Score::skips) {
    if (step < c.blocks.count()) {
      c.v_stream.move(-c.blocks.left_out(step) * Config::block_kv * c.v_stream.row_stride);
    }
  }
  if constexpr (Config::Keys::paged) {
    load_from_pages(c, c.v(step), c.params.v, c.params.shape.head_dim_v, step);
  } else {
    c.v_stream.template load<!first>(c.v(step), step < c.blocks.count(), c.last_rows());
  }
}

// Initialises the reference and sum of this warp's rows, and its output.
template <class Config>
__device__ inline void begin_rows(const ForwardContext<Config>& c, ForwardState<Config>& state) {
  const LanePosition lane;
  state.output.fill(0);
  state.settled = false;
  state.reference.for_each([&](typename Config::Compute& reference, int m, int group) {
    begin_row(reference, state.sum.value[m][group]);
    // Only one of the lanes that share a row holds the sum of begin_row().
    if (lane.column != 0 || c.part() != 0) state.sum.value[m][group] = 0;
  });
}

// scores = Q K^T of a step, masked, for this warp's keys.
template <class Config, class Scores>
__device__ inline void score_tile(const ForwardContext<Config>& c, Scores& scores, int step) {
  scores.fill(0);
  Products<Config>::template multiply_ahead<Config::head_dim>(
      scores, rows_by_depth(c.q(), c.row0), rows_by_depth(c.k(step), c.first_key()));
  const Block block = c.blocks[step];
  prepare_scores<Config>(c.params, scores, c.seq, c.item.head, c.first_query(),
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
// where they have risen by more than the slack. The columns before are in the output already.
template <class Config, class Scores>
__device__ inline void raise_references(ForwardState<Config>& state, Scores& scores,
                                        typename Config::Compute factor, int first) {
  typename ForwardTypes<Config>::Rows maxima = row_maxima(scores, first);
  typename ForwardTypes<Config>::Rows keep;
  if (move_references<Config>(state.reference, keep, maxima, factor)) rescale(state, keep);
}

template <class Config, class Rows>
__device__ inline void add_to_sums(ForwardState<Config>& state, Rows& sums) {
  sums.for_each(
      [&](typename Config::Compute& x, int m, int group) { state.sum.value[m][group] += x; });
}

// The position of this warp's keys in the weights of a step.
template <class Config>
__device__ inline RowsOfQueries place_of(const ForwardContext<Config>& c, int step) {
  return {c.seq.entry, c.item.head, c.first_query(),
          c.blocks[step].index * Config::block_kv + c.first_key()};
}

// Drops weights from a part of a step that begins at column `first` of this warp's keys.
template <class Config, class Part>
__device__ inline void drop_columns(const ForwardContext<Config>& c, int step, Part& part,
                                    int first) {
  if constexpr (Config::Weights::drops) {
    RowsOfQueries place = place_of(c, step);
    place.key0 += first;
    drop_weights<Config>(c.params, place, part);
  }
}

// Exponentiates a few scores just before the products that need their weights.
template <class Config, class Scores>
struct PartWeights {
  const ForwardContext<Config>& c;
  int step;
  ForwardState<Config>& state;
  Scores& scores;
  const typename ForwardTypes<Config>::Rows& offset;
  typename Config::Compute factor;
  template <int columns>
  __device__ void prepare(int first) const {
    using Compute = typename Config::Compute;
    WarpTile<Compute, Config::fragment_rows, Scores::rows, columns> part;
    typename ForwardTypes<Config>::Rows sums;
    exponentiate_columns<Config>(part, sums, scores, offset, factor, first);
    drop_columns(c, step, part, first);
    part.for_each([&](Compute& x, int m, int n, int group, int which) {
      scores.value[m][first / 8 + n][group][which] = x;
    });
    add_to_sums(state, sums);
  }
};

// Does the work of PartWeights, but computes new references only if the sums show that weights are
// too large for the old ones. It keeps the scores, from which it then computes the weights again.
template <class Config, class Scores>
struct WeightsOnDemand {
  using Rows = typename ForwardTypes<Config>::Rows;
  const ForwardContext<Config>& c;
  int step;
  ForwardState<Config>& state;
  Scores& scores;
  Rows& offset;
  float factor;

  template <int columns>
  struct Part {
    static constexpr int count = columns;
    using Weights = WarpTile<float, Config::fragment_rows, Scores::rows, columns>;
    typename Products<Config>::template Operands<Weights> operands;
    Rows sums;
  };

  template <int columns>
  __device__ Part<columns> exponentiate(int first) const {
    typename Part<columns>::Weights weights;
    Part<columns> part;
    exponentiate_columns<Config>(weights, part.sums, scores, offset, factor, first);
    drop_columns(c, step, weights, first);
    part.operands = Products<Config>::operands_of(weights);
    return part;
  }
  template <class Part>
  __device__ void settle(Part& part, int first) const {
    bool fits = true;  // a NaN does not fit
    part.sums.for_each(
        [&](float& x, int, int) { fits = fits && x < Logits<Config>::most_weight(); });
    if (!__all_sync(0xffffffffu, fits)) {
      raise_references<Config>(state, scores, factor, first);
      offset = offsets_of(state.reference);
      part = exponentiate<Part::count>(first);
    }
    add_to_sums(state, part.sums);
  }
};

// Whether every row of the warp has a reference.
template <class Config>
__device__ inline bool all_settled(ForwardState<Config>& state) {
  using Compute = typename Config::Compute;
  bool settled = true;
  state.reference.for_each(
      [&](Compute& x, int, int) { settled = settled && x != -infinity<Compute>(); });
  return __all_sync(0xffffffffu, settled);
}

// Exponentiates scores and adds weights V of a step to the output; for a warp that shares no rows.
template <class Config, class Scores>
__device__ inline void exponentiate_tile(const ForwardContext<Config>& c,
                                         ForwardState<Config>& state, Scores& scores, int step) {
  using Types = ForwardTypes<Config>;
  const auto factor = logit_factor<Config>(c.params);
  const auto v = depth_by_rows(c.v(step), Zero{});
  if constexpr (Config::maxima_on_demand) {
    if (!state.settled) {
      raise_references<Config>(state, scores, factor, 0);
      state.settled = all_settled(state);
    }
    auto offset = offsets_of(state.reference);
    Products<Config>::template multiply_parts<Types::keys_at_once, Scores::columns>(
        state.output, v, WeightsOnDemand<Config, Scores>{c, step, state, scores, offset, factor});
  } else {
    raise_references<Config>(state, scores, factor, 0);
    const auto offset = offsets_of(state.reference);
    Products<Config>::template multiply_prepared_weights<Types::keys_at_once>(
        state.output, scores, v, c.p(), c.row0, 0,
        PartWeights<Config, Scores>{c, step, state, scores, offset, factor});
  }
}

}  // namespace cuflash::fa2
