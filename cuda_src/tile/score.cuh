// Where a configuration may change scores and the state of rows. Today's configurations change
// nothing and these functions vanish; a new kind of score or row state is written here once and
// every generation's kernels have it.
#pragma once

#include "numeric.cuh"
#include "schedule.cuh"

namespace cuflash {

// Where a score stands: query i, key j of (batch, head).
struct ScorePosition {
  int batch;
  int head;
  int i;
  int j;
};

// The score that enters the softmax, from the raw product q . k (before the scale).
template <class Config, class Compute>
__device__ inline Compute modify_score(Compute raw, const ScorePosition&) {
  return raw;
}

// The gradient of the raw product from the gradient of the modified score.
template <class Config, class Compute>
__device__ inline Compute modify_score_gradient(Compute gradient, const ScorePosition&) {
  return gradient;
}

// A tile's finished dS, in registers, before it is rounded: for whoever needs it summed.
template <class Config, class Tile>
__device__ inline void hand_on_score_gradient(const Tile&, const WorkItem&, int, int) {}

// The reference and sum that a row starts from.
template <class Config, class Compute>
__device__ inline void begin_row(Compute& row_max, Compute& row_sum, const WorkItem&, int) {
  row_max = -infinity<Compute>();
  row_sum = Compute(0);
}

// The sum of weights of a row at its end. One that has seen a key has a weight of 1 or more: if its
// sum is 0, its reference has overflowed, and what comes of it must not pass for a dead row's.
template <class Compute>
__device__ inline Compute checked_sum(Compute reference, Compute sum) {
  const bool lost = sum == Compute(0) && reference != -infinity<Compute>();
  return lost ? reference - reference + sum / sum : sum;
}

// A last change to a row's reference and sum before its output is written.
template <class Config, class Compute>
__device__ inline void end_row(Compute&, Compute&, const WorkItem&, int) {}

}  // namespace cuflash
