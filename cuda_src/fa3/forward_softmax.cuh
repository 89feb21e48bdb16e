// FlashAttention-3 forward: online softmax of a warp's 16 rows.
//
// A row's reference follows its maximum only when a weight would exceed 2^slack, as FlashAttention-4
// does (Zadouri et al. 2026): output and sum share the reference, so the division at the end takes
// it out again exactly, and most steps need neither shuffles nor a rescaling.
#pragma once

#include "forward_types.cuh"

namespace cuflash::fa3 {

template <class Config, class Rows = typename ForwardTypes<Config>::Rows>
struct RowState {
  Rows reference;  // log2 units; 0 while the row has seen nothing, so that it can be subtracted
  Rows sum;        // of the weights, over this lane's columns
  bool seen[2];    // the row has a reference
  bool settled;    // every row of the warp has one
};

template <class Config>
__device__ __forceinline__ void begin_rows(RowState<Config>& rows, const WorkItem& item, int row0) {
  const LanePosition lane;
  rows.settled = false;
  rows.reference.for_each([&](float& reference, int m, int group) {
    float& sum = rows.sum.value[m][group];
    begin_row<Config>(reference, sum, item, row0 + lane.row + 8 * group);
    if (lane.column != 0) sum = 0;  // one of the four lanes holds it
    rows.seen[group] = reference != -infinity<float>();
    reference = subtrahend(reference);
  });
}

// Hides what the mask hides, in the block of keys from key0 on, for the warp's rows from row0 on.
template <class Config, class Scores>
__device__ __forceinline__ void hide_scores(Scores& scores, const Sequence& seq, int row0,
                                            int key0) {
  const LanePosition lane;
  int visible[2];  // columns, from this lane's first
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    visible[group] =
        Mask<Config>::visible_end(seq, row0 + lane.row + 8 * group) - key0 - lane.column;
  }
  scores.for_each([&](float& s, int, int n, int group, int which) {
    if (Scores::column(n, which) >= visible[group]) s = -infinity<float>();
  });
}

template <class Config, class Scores>
__device__ __forceinline__ void modify_scores(Scores& scores, const WorkItem& item, int row0,
                                              int key0) {
  const LanePosition lane;
  scores.for_each([&](float& s, int m, int n, int group, int which) {
    s = modify_score<Config>(s, ScorePosition{item.batch, item.head,
                                              row0 + lane.row + Scores::row(m, group),
                                              key0 + lane.column + Scores::column(n, which)});
  });
}

// Moves the references up to the maxima met so far. `top`: this lane's largest raw scores; it
// becomes what the sums, and whatever else the old references scale, are multiplied by.
template <class Config, class Rows>
__device__ __forceinline__ void follow_maxima(RowState<Config>& rows, Rows& top, float factor) {
  top.for_each([&](float& x, int m, int group) {
    const float maximum = combine_row_lanes(x, [](float a, float b) { return larger(a, b); });
    const float candidate = rounded_product(maximum, factor);
    float& reference = rows.reference.value[m][group];
    x = 1.0f;
    if (rows.seen[group]) {
      const float raised = larger(reference, candidate);
      x = Logits<Config>::exponential(reference - raised);
      reference = raised;
    } else if (candidate != -infinity<float>()) {
      reference = candidate;
      rows.seen[group] = true;
    }
    rows.sum.value[m][group] *= x;
  });
  rows.settled = __all_sync(0xffffffffu, rows.seen[0] && rows.seen[1]);
}

// scores -> weights in the scale of the rows' references, and their sums. Says whether references
// have moved: then what was summed before has to be multiplied by `keep`.
template <class Config, class Scores>
__device__ __forceinline__ bool weigh_scores(Scores& scores, RowState<Config>& rows,
                                             RowValues<Scores>& keep, float factor) {
  RowValues<Scores>& top = keep;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    float& largest = top.value[0][group];
    largest = scores.value[0][0][group][0];
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
      const float(&pair)[2] = scores.value[0][n][group];
      largest = larger(largest, larger(pair[0], pair[1]));
    }
  }
  bool high = !rows.settled;
  top.for_each([&](float& x, int m, int group) {
    high |= fma(x, factor, -rows.reference.value[m][group]) > Logits<Config>::slack();
  });
  const bool moved = __any_sync(0xffffffffu, high);
  if (moved) follow_maxima(rows, top, factor);
  scores.for_each([&](float& s, int m, int, int group, int) {
    s = Logits<Config>::exponential(s, factor, rows.reference.value[m][group]);
  });
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    float even = 0;
    float odd = 0;
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
      even += scores.value[0][n][group][0];
      odd += scores.value[0][n][group][1];
    }
    rows.sum.value[0][group] += even + odd;
  }
  return moved;
}

}  // namespace cuflash::fa3
