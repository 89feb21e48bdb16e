// What features change of scores and of rows. Config::Score and Config::Rows name the features; a
// kernel calls the functions below and never asks which there are.
//
//   Config::Score = ScoreChain<Term...>  a term changes the raw product q . k of query i and key j.
//                                        Its slope is 1, so that dS is what it would be without it.
//       struct Term {
//         Term(params, batch, head);             // what depends on the head is read once
//         Compute operator()(Compute score, int i, int j) const;  // minus infinity hides a pair
//       };
//   Config::Rows = RowChain<End...>      an end changes what a finished row has summed.
//       struct End {
//         static constexpr bool finite_when_dead;  // the log-sum-exp of a row that sees no key
//         static Compute end<Config>(params, head, Compute& reference, Compute& sum);
//       };
#pragma once

#include "numeric.cuh"
#include "schedule.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// Where a tile of scores stands whose rows are queries, and what an element of it is of.
struct RowsOfQueries {
  int batch;
  int head;  // of the queries
  int query0;
  int key0;
  template <class Tile>
  __device__ int query(const LanePosition& lane, int m, int, int group, int) const {
    return query0 + lane.row + Tile::row(m, group);
  }
  template <class Tile>
  __device__ int key(const LanePosition& lane, int, int n, int, int which) const {
    return key0 + lane.column + Tile::column(n, which);
  }
};

// The same of a transposed tile, whose rows are keys.
struct RowsOfKeys {
  int batch;
  int head;  // of the queries
  int query0;
  int key0;
  template <class Tile>
  __device__ int query(const LanePosition& lane, int, int n, int, int which) const {
    return query0 + lane.column + Tile::column(n, which);
  }
  template <class Tile>
  __device__ int key(const LanePosition& lane, int m, int, int group, int) const {
    return key0 + lane.row + Tile::row(m, group);
  }
};

// Terms one after the other, each applied to what the one before has made of a score.
template <class... Terms>
struct ScoreChain {
  template <class Params, class Place, class Scores>
  __device__ static void apply(const Params& params, const Place& place, Scores& scores) {
    apply_terms(place, scores, Terms(params, place.batch, place.head)...);
  }

 private:
  template <class Place, class Scores>
  __device__ static void apply_terms(const Place& place, Scores& scores, const Terms&... terms) {
    using Compute = typename Scores::Compute;
    if constexpr (sizeof...(Terms) == 0) {  // ptxas takes fewer registers than without this loop
      scores.for_each([](Compute& s, int, int, int, int) { s = changed(s, 0, 0); });
    } else {
      const LanePosition lane;
      scores.for_each([&](Compute& s, int m, int n, int group, int which) {
        const int i = place.template query<Scores>(lane, m, n, group, which);
        const int j = place.template key<Scores>(lane, m, n, group, which);
        s = changed(s, i, j, terms...);
      });
    }
  }

  template <class Compute>
  __device__ static Compute changed(Compute score, int i, int j, const Terms&... terms) {
    ((score = terms(score, i, j)), ...);
    return score;
  }
};

// Changes raw products, in registers, to the scores that enter the softmax.
template <class Config, class Place, class Scores>
__device__ inline void change_scores(const typename Config::Params& params, const Place& place,
                                     Scores& scores) {
  Config::Score::apply(params, place, scores);
}

// Where a score stands: query i, key j of (batch, head).
struct ScorePosition {
  int batch;
  int head;
  int i;
  int j;
};

// The gradient of a raw product from that of its score: the slope of every term is 1.
template <class Config, class Compute>
__device__ inline Compute raw_gradient(Compute gradient, const ScorePosition&) {
  return gradient;
}

// Ends one after the other.
template <class... Ends>
struct RowChain {
  // A row that sees no key has a log-sum-exp all the same.
  static constexpr bool finite_when_dead = (Ends::finite_when_dead || ...);
  static constexpr bool changes = sizeof...(Ends) > 0;

  template <class Config, class Compute>
  __device__ static Compute end(const typename Config::Params& params, int head, Compute& reference,
                                Compute& sum) {
    Compute keep = 1;
    ((keep *= Ends::template end<Config>(params, head, reference, sum)), ...);
    return keep;
  }
};

// The reference and sum that a row starts from.
template <class Compute>
__device__ inline void begin_row(Compute& reference, Compute& sum) {
  reference = -infinity<Compute>();
  sum = Compute(0);
}

// The sum of weights of a row at its end. One that has seen a key has a weight of 1 or more: if its
// sum is 0, its reference has overflowed, and what comes of it must not pass for a dead row's.
template <class Compute>
__device__ inline Compute checked_sum(Compute reference, Compute sum) {
  const bool lost = sum == Compute(0) && reference != -infinity<Compute>();
  return lost ? reference - reference + sum / sum : sum;
}

// The end of a row: a last change to its reference and sum. Returns what its output is to be
// multiplied by besides; 0 exactly for a row that has seen nothing and may have a sum all the same.
template <class Config, class Compute>
__device__ inline Compute end_row(const typename Config::Params& params, int head,
                                  Compute& reference, Compute& sum) {
  sum = checked_sum(reference, sum);
  const bool dead = reference == -infinity<Compute>();
  const Compute keep = Config::Rows::template end<Config>(params, head, reference, sum);
  if constexpr (!Config::Rows::changes) return keep;
  return dead ? Compute(0) : larger(keep, least<Compute>());
}

// What the output of a row is multiplied by; 0 for a row that has seen nothing.
template <class Compute>
__device__ inline Compute inverse_of(Compute sum, Compute keep) {
  return sum == Compute(0) || keep == Compute(0) ? Compute(0) : keep / sum;
}

// A row's log-sum-exp for the backward pass: minus infinity marks a row that sees no key, also
// where the end of rows has given it a finite one. What such a row holds reaches no gradient.
template <class Config, class Compute>
__device__ inline Compute lse_or_dead(const Sequence& seq, int row, Compute lse) {
  if constexpr (Config::Rows::finite_when_dead) {
    if (Mask<Config>::sees_nothing(seq, row)) return -infinity<Compute>();
  }
  return lse;
}

}  // namespace cuflash
