// How features change scores and rows. Config::Score and Config::Rows name the features; a kernel
// calls the functions below and names no feature.
//
//   Config::Score = ScoreChain<Term...>  a term changes the raw product q . k of a query and a key.
//       struct Term : AddedTerm {                // its slope is 1: it leaves dS unchanged
//         Term(params, const Lane& lane, unit);  // once a tile
//         Compute operator()(Compute score, int di, int dj) const;  // minus infinity hides a pair
//       };
//       struct Term : FunctionTerm {             // a function of the score, before all added terms
//         Term(params, const Lane& lane, unit);
//         static double unit(params, double before);
//         Graded<Compute> operator()(Compute score, int di, int dj) const;  // its value and slope
//       };
//     The lane has a first query and a first key; an element belongs to query lane.i + di and key
//     lane.j + dj; di and dj are compile-time constants. A score in natural units is the
//     number in the register times the unit: first the scale, then what the function returns.
//     An added term may say where scores rise:
//         static constexpr bool may_rise = true;
//         bool rises(int keys, Compute much) const;  // by over `much` for keys `keys` earlier
//     One added term may have a gradient, if it has a number for each head:
//         static constexpr bool summed = true;
//         static void* pair_sums(params);          // see tile/pair_sums.cuh
//         Compute partial(int di, int dj) const;   // the score's derivative by that number
//     One may read an array that the copy engine brings to shared memory (Config::operand_stages):
//         static constexpr bool staged = true;     // its lane has the tile
//         static StagedPlace staged_place(params, int batch, int head);
//     One may hide the pairs that its lane's bits do not show (Config::packed), and say which tiles
//     it hides entirely, or not at all (Config::listed):
//         static constexpr bool hides = true;      // it comes after all terms that do not hide
//         static HiddenPairs hidden(params, int batch, int head);
//         // Where no bits of pairs are packed: for the tile that begins at a query and a key, bit
//         // 2 m + n covers its n-th 64 queries and m-th 64 keys. Only a backward pass calls it.
//         static unsigned shown_parts(params, int batch, int head, int query, int key);
//     One may say which tiles it hides entirely if there are no bits (FlashAttention-1 and 2):
//         static constexpr bool skips = true;
//         static bool shows(params, int batch, int head, int query, int key);  // of a tile
//   Config::Rows = RowChain<End...>      an end changes the sums of a finished row.
//       struct End {
//         static constexpr bool finite_when_dead;  // the log-sum-exp of a row that sees no key
//         static Compute end<Config>(params, head, Compute& reference, Compute& sum);
//       };
#pragma once

#include "numeric.cuh"
#include "schedule.cuh"
#include "score_place.cuh"

namespace cuflash {

// A score and its slope, d score / d raw product, both in natural units.
template <class Compute>
struct Graded {
  Compute value;
  Compute slope;
};

// The defaults of a term that adds to a score or hides it.
struct AddedTerm {
  static constexpr bool has_slope = false;
  static constexpr bool any_slope = false;
  static constexpr bool by_position = false;
  static constexpr bool summed = false;
  static constexpr bool may_rise = false;
  static constexpr bool staged = false;
  static constexpr bool hides = false;
  static constexpr bool skips = false;
  template <class Params>
  __device__ static double unit(const Params&, double before) {
    return before;
  }
};

// The defaults of a function of the score.
struct FunctionTerm {
  static constexpr bool has_slope = true;
  static constexpr bool any_slope =
      false;  // the slope may be infinite or NaN, also where a pair is hidden
  static constexpr bool by_position = false;  // whether the function reads positions
  static constexpr bool summed = false;
  static constexpr bool may_rise = false;
  static constexpr bool staged = false;
  static constexpr bool hides = false;
  static constexpr bool skips = false;
};

// The terms of a chain that are applied.
enum class Applied { all, changing, hiding };  // changing: all but those that hide

// The terms of one lane.
template <class... Terms>
struct TermList {
  template <class Params>
  __device__ TermList(const Params&, const Lane&, double) {}
  template <Applied applied, class Compute>
  __device__ void apply(Graded<Compute>&, int, int) const {}
  template <class Compute>
  __device__ bool rises(int, Compute) const {
    return false;
  }
};
template <class First, class... Rest>
struct TermList<First, Rest...> {
  static_assert(First::has_slope || !(Rest::has_slope || ...),
                "functions of the score come before all added terms");
  First first;
  TermList<Rest...> rest;
  template <class Params>
  __device__ TermList(const Params& params, const Lane& lane, double unit)
      : first(params, lane, unit), rest(params, lane, unit) {}
  template <Applied applied, class Compute>
  __device__ void apply(Graded<Compute>& score, int di, int dj) const {
    constexpr bool skipped = applied == (First::hides ? Applied::changing : Applied::hiding);
    if constexpr (First::has_slope && !skipped) {
      const Graded<Compute> result = first(score.value, di, dj);
      score = {result.value, score.slope * result.slope};
    } else if constexpr (!skipped) {
      score.value = first(score.value, di, dj);
    }
    rest.template apply<applied>(score, di, dj);
  }
  template <class Compute>
  __device__ bool rises(int keys, Compute much) const {
    if constexpr (First::may_rise) {
      return first.rises(keys, much) || rest.rises(keys, much);
    } else {
      return rest.rises(keys, much);
    }
  }
  // The derivative by the term that has a gradient.
  __device__ auto partial(int di, int dj) const {
    if constexpr (First::summed) {
      return first.partial(di, dj);
    } else {
      return rest.partial(di, dj);
    }
  }
  template <class Params>
  __device__ static StagedPlace staged_place(const Params& params, int batch, int head) {
    if constexpr (First::staged) {
      return First::staged_place(params, batch, head);
    } else {
      return TermList<Rest...>::staged_place(params, batch, head);
    }
  }
  template <class Params>
  __device__ static HiddenPairs hidden(const Params& params, int batch, int head) {
    if constexpr (First::hides) {
      return First::hidden(params, batch, head);
    } else {
      return TermList<Rest...>::hidden(params, batch, head);
    }
  }
  template <class Params>
  __device__ static unsigned shown_parts(const Params& params, int batch, int head, int query,
                                         int key) {
    if constexpr (First::hides) {
      return First::shown_parts(params, batch, head, query, key);
    } else {
      return TermList<Rest...>::shown_parts(params, batch, head, query, key);
    }
  }
  template <class Params>
  __device__ static bool shows(const Params& params, int batch, int head, int query, int key) {
    if constexpr (First::skips) {
      return First::shows(params, batch, head, query, key);
    } else {
      return TermList<Rest...>::shows(params, batch, head, query, key);
    }
  }
  template <class Params>
  __device__ static void* pair_sums(const Params& params) {
    if constexpr (First::summed) {
      return First::pair_sums(params);
    } else {
      return TermList<Rest...>::pair_sums(params);
    }
  }
};

// A chain of terms; each term takes the score that the one before returns.
template <class... Terms>
struct ScoreChain {
  static constexpr bool is_empty = sizeof...(Terms) == 0;
  // Some term changes dS.
  static constexpr bool has_slope = (Terms::has_slope || ...);
  static constexpr bool any_slope = (Terms::any_slope || ...);
  static constexpr bool by_position = (Terms::by_position || ...);
  // Some term has a gradient, which is summed over pairs.
  static constexpr bool summed = (Terms::summed || ...);
  static constexpr bool may_rise = (Terms::may_rise || ...);
  // Some term says which tiles it hides entirely.
  static constexpr bool skips = (Terms::skips || ...);

  using List = TermList<Terms...>;

  // The natural value of one unit of the changed scores.
  template <class Params>
  __device__ static double unit(const Params& params) {
    double unit = params.scale;
    ((unit = Terms::unit(params, unit)), ...);
    return unit;
  }
  template <class Params>
  __device__ static List terms(const Params& params, const Lane& lane) {
    return {params, lane, unit(params)};
  }
};

// Changes the raw products of a tile one at a time.
template <class Config, class Scores, class Place, Applied applied = Applied::all>
struct ScoreChange {
  using Compute = typename Scores::Compute;
  static constexpr bool may_rise = Config::Score::may_rise;
  const typename Config::Score::List terms;
  __device__ ScoreChange(const typename Config::Params& params, const Place& place)
      : terms(Config::Score::terms(params, place.lane())) {}
  __device__ Graded<Compute> graded(Compute raw, int m, int n, int group, int which) const {
    Graded<Compute> score{raw, 1};
    terms.template apply<applied>(score, Place::template query_step<Scores>(m, n, group, which),
                                  Place::template key_step<Scores>(m, n, group, which));
    return score;
  }
  // Whether scores of the tile before this one are likely to be larger, by more than `much`, in
  // some lane.
  __device__ bool rises(Compute much) const {
    return __any_sync(0xffffffffu, terms.rises(Scores::columns, much));
  }
  // For a tile of one fragment of rows.
  __device__ Compute operator()(Compute raw, int n, int group, int which) const {
    return graded(raw, 0, n, group, which).value;
  }
};

// Stands for ScoreChange where the scores have been changed before.
struct NoChange {
  static constexpr bool may_rise = false;
  template <class Compute>
  __device__ Compute operator()(Compute score, int, int, int) const {
    return score;
  }
};

// Calls function(element, graded score) for every element of a tile of raw products.
template <class Config, Applied applied = Applied::all, class Place, class Scores, class Function>
__device__ inline void for_each_score(const typename Config::Params& params, const Place& place,
                                      Scores& scores, Function function) {
  const ScoreChange<Config, Scores, Place, applied> change(params, place);
  scores.for_each([&](typename Scores::Compute& s, int m, int n, int group, int which) {
    function(s, change.graded(s, m, n, group, which), m, n, group, which);
  });
}

// Changes raw products, in registers, to the scores that enter the softmax.
template <class Config, Applied applied = Applied::all, class Place, class Scores>
__device__ inline void change_scores(const typename Config::Params& params, const Place& place,
                                     Scores& scores) {
  using Compute = typename Scores::Compute;
  if constexpr (Config::Score::is_empty) {  // ptxas takes fewer registers with this loop
    scores.for_each([](Compute& s, int, int, int, int) { s = s; });
  } else {
    for_each_score<Config, applied>(
        params, place, scores,
        [](Compute& s, const Graded<Compute>& score, int, int, int, int) { s = score.value; });
  }
}

// P times the slope of its score. A P of 0 stays 0, whatever the slope is.
template <class Config, class Compute>
__device__ inline Compute times_slope(Compute p, Compute slope) {
  if constexpr (Config::Score::any_slope) return p == Compute(0) ? p : p * slope;
  return p * slope;
}

// Slopes of a tile of scores. Nothing is kept where all slopes are 1.
template <class Config, class Scores, bool kept>
struct Slopes {
  __device__ void multiply(Scores&) const {}
};
template <class Config, class Scores>
struct Slopes<Config, Scores, true> {
  Scores slope;
  // Multiplies each element by its slope: P becomes the factor that gives dS.
  __device__ void multiply(Scores& p) const {
    p.for_each([&](typename Scores::Compute& x, int m, int n, int group, int which) {
      x = times_slope<Config>(x, slope.value[m][n][group][which]);
    });
  }
};
template <class Config, class Scores>
using SlopesOf = Slopes<Config, Scores, Config::Score::has_slope>;

// change_scores() that also keeps the slopes.
template <class Config, class Place, class Scores>
__device__ inline void change_scores(const typename Config::Params& params, const Place& place,
                                     Scores& scores, SlopesOf<Config, Scores>& slopes) {
  using Compute = typename Scores::Compute;
  if constexpr (Config::Score::has_slope) {
    for_each_score<Config>(
        params, place, scores,
        [&](Compute& s, const Graded<Compute>& score, int m, int n, int group, int which) {
          s = score.value;
          slopes.slope.value[m][n][group][which] = score.slope;
        });
  } else {
    change_scores<Config>(params, place, scores);
  }
}

// A chain of ends, applied in turn.
template <class... Ends>
struct RowChain {
  // A row that sees no key still has a finite log-sum-exp.
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

// The reference and sum with which a row starts.
template <class Compute>
__device__ inline void begin_row(Compute& reference, Compute& sum) {
  reference = -infinity<Compute>();
  sum = Compute(0);
}

// The sum of a row's weights at its end. A row that has seen a key has a weight of 1 or more. If
// its sum is 0 its reference has overflowed, and the result is NaN so that the row does not pass
// for a dead one.
template <class Compute>
__device__ inline Compute checked_sum(Compute reference, Compute sum) {
  const bool lost = sum == Compute(0) && reference != -infinity<Compute>();
  return lost ? reference - reference + sum / sum : sum;
}

// Ends a row: changes its reference and sum a last time. Returns a factor of its output. The factor
// is 0 exactly for a row that has seen nothing, even if such a row has a sum.
template <class Config, class Compute>
__device__ inline Compute end_row(const typename Config::Params& params, int head,
                                  Compute& reference, Compute& sum) {
  sum = checked_sum(reference, sum);
  const bool dead = sum == Compute(0);  // false for a NaN, which leaves no reference either
  const Compute keep = Config::Rows::template end<Config>(params, head, reference, sum);
  if constexpr (!Config::Rows::changes) return keep;
  return dead ? Compute(0) : larger(keep, least<Compute>());
}

// The factor of a row's output; 0 for a row that has seen nothing.
template <class Compute>
__device__ inline Compute inverse_of(Compute sum, Compute keep) {
  return sum == Compute(0) || keep == Compute(0) ? Compute(0) : keep / sum;
}

// A row's log-sum-exp for the backward pass. Minus infinity marks a row that sees no key, even if
// the end of rows has given it a finite one. No value of such a row reaches a gradient.
template <class Config, class Compute>
__device__ inline Compute lse_or_dead(const Sequence& seq, int row, Compute lse) {
  if (is_surplus<Config>(seq, row)) return -infinity<Compute>();
  if constexpr (Config::Rows::finite_when_dead) {
    if (Mask<Config>::sees_nothing(seq, row)) return -infinity<Compute>();
  }
  return lse;
}

}  // namespace cuflash
