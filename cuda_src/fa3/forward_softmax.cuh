// FlashAttention-3 forward: online softmax of a warp's 16 rows.
//
// A row's reference need not be its maximum: output and sum are relative to the same reference, and
// the final division cancels it exactly. FlashAttention-4 raises a reference only when the maximum
// has risen far enough. Here even the maximum is computed only if the sum of a row's weights is too
// large: one comparison for each row replaces one for each score.
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
__device__ __forceinline__ void begin_rows(RowState<Config>& rows) {
  const LanePosition lane;
  rows.settled = false;
  rows.reference.for_each([&](float& reference, int m, int group) {
    float& sum = rows.sum.value[m][group];
    begin_row(reference, sum);
    if (lane.column != 0) sum = 0;  // one of the four lanes holds it
    rows.seen[group] = reference != -infinity<float>();
    reference = subtrahend(reference);
  });
}

// Writes minus infinity to hidden scores. The limits of a row are computed once.
template <class Config, class Scores>
__device__ __forceinline__ void apply_mask(Scores& scores, const Sequence& seq,
                                           const RowsOfQueries& place) {
  const LanePosition lane;
  int begin[2] = {}, end[2];  // columns that a row sees, counted from this lane's first
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int row = place.query0 + lane.row + 8 * group;
    if constexpr (Mask<Config>::has_first) {
      begin[group] = Mask<Config>::visible_begin(seq, row) - place.key0 - lane.column;
    }
    end[group] = Mask<Config>::visible_end(seq, row) - place.key0 - lane.column;
  }
  scores.for_each([&](float& s, int, int n, int group, int which) {
    const int column = Scores::column(n, which);
    const bool before = Mask<Config>::has_first && column < begin[group];
    if (before || column >= end[group]) s = -infinity<float>();
  });
}

// Raises the references to the maxima so far, and rescales the sums. `top` holds this lane's
// largest raw scores; on return it holds the factor that rescales everything relative to the old
// references.
template <class Config, class Rows>
__device__ __forceinline__ void raise_references(RowState<Config>& rows, Rows& top, float factor) {
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

// This lane's largest score of each row.
template <class Scores, class Change>
__device__ __forceinline__ RowValues<Scores> lane_maxima(const Scores& scores,
                                                         const Change& change) {
  RowValues<Scores> top;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    float& largest = top.value[0][group];
    largest = change(scores.value[0][0][group][0], 0, group, 0);
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
      const float (&pair)[2] = scores.value[0][n][group];
      largest = larger(largest, larger(change(pair[0], n, group, 0), change(pair[1], n, group, 1)));
    }
  }
  return top;
}

// Turns change(scores) into weights relative to the rows' references, rounded, as the operand of a
// product: two 16x8 accumulators are one 16x16 operand. Returns the weights' sums over this lane.
template <class Config, class Scores, class Change>
__device__ __forceinline__ RowValues<Scores> exponentiate_scores(
    unsigned (&weights)[Scores::columns / 16][4], const Scores& scores,
    const RowState<Config>& rows, float factor, const Change& change) {
  float sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      float pair[2];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        pair[which] =
            Logits<Config>::exponential(change(scores.value[0][n][group][which], n, group, which),
                                        factor, rows.reference.value[0][group]);
        sums[group][which] += pair[which];
      }
      weights[n / 2][n % 2 * 2 + group] = pack(typename Config::Storage{}, pair[0], pair[1]);
    }
  }
  RowValues<Scores> result;
  result.for_each([&](float& x, int, int group) { x = sums[group][0] + sums[group][1]; });
  return result;
}

}  // namespace cuflash::fa3
