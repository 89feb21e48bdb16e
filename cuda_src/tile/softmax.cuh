// Online softmax over the rows of a score tile. Every exponent of a row is the difference to one
// rounded number, its reference, so that number's rounding cancels however far the logits are from
// zero. No finite number stands in for minus infinity.
#pragma once

#include "exponential.cuh"
#include "numeric.cuh"
#include "score.cuh"
#include "warp_tile.cuh"
#include "weights.cuh"

namespace cuflash {

// Whether logits are in natural units: those of float32 and float64, whatever multiplies them.
template <class Config>
constexpr bool natural_logits = sizeof(typename Config::Storage) > 2;

// A positive factor of the logits in the compute type: never 0 or infinite, which would make NaN of
// a hidden score.
template <class Compute>
__device__ inline Compute factor_of(double factor) {
  if constexpr (sizeof(Compute) == 4) factor = min(max(factor, 0x1p-126), 0x1.fffffep127);
  return static_cast<Compute>(factor);
}

// Units and exponentials of logits. 16-bit storage: log2 units, so that scale and exponential are
// one fused multiply-add and one instruction of the special function unit.
template <class Config, bool natural = natural_logits<Config>>
struct Logits {
  __device__ static float factor(double scale) { return factor_of<float>(scale * kLog2E); }
  // 2^(raw * factor - offset), and of a difference that is in these units already.
  __device__ static float exponential(float raw, float factor, float offset) {
    return ptx::exp2_approximate(fma(raw, factor, -offset));
  }
  __device__ static float exponential(float difference) {
    return ptx::exp2_approximate(difference);
  }
  // How far a row's maximum may rise above its reference before the reference follows: weights
  // stay below 2^8, which every storage type holds with the same relative rounding. That much of
  // the range of float32 is lost to the sums of bfloat16 values.
  __device__ static constexpr float slack() { return 8.0f; }
  // Without the maximum at hand weights may be larger, as long as the sum of a lane's part stays
  // below this: as much as sixteen of the largest weights within the slack come to.
  __device__ static constexpr float most_weight() { return 0x1p12f; }
  __device__ static float to_natural(float logit) { return logit * static_cast<float>(kLn2); }
  __device__ static float from_natural(float logit) { return logit * static_cast<float>(kLog2E); }
  // A row's sum of products, times what is kept of it, over the sum of its weights; zero for a row
  // that has seen nothing, also where a weight of zero has met a value that is not finite.
  __device__ static float normalise(float x, float, float, float inverse) {
    return inverse == 0.0f ? 0.0f : x * inverse;
  }
};

// float32 and float64: natural units and the operations one would write, each rounded by itself.
template <class Config>
struct Logits<Config, true> {
  using Compute = typename Config::Compute;
  __device__ static Compute factor(double scale) { return factor_of<Compute>(scale); }
  __device__ static Compute exponential(Compute raw, Compute factor, Compute offset) {
    return exp_of(rounded_product(raw, factor) - offset);
  }
  __device__ static Compute exponential(Compute difference) { return exp_of(difference); }
  __device__ static constexpr Compute slack() { return Compute(0); }
  __device__ static Compute to_natural(Compute logit) { return logit; }
  __device__ static Compute from_natural(Compute logit) { return logit; }
  __device__ static Compute normalise(Compute x, Compute sum, Compute keep, Compute) {
    if (Config::Rows::changes) {
      if (keep == Compute(0)) return Compute(0);
      x *= keep;
    }
    return sum == Compute(0) ? Compute(0) : x / sum;
  }
};

// The log-sum-exp of a row, in natural units; minus infinity of one that has summed nothing.
template <class Config, class Compute>
__device__ inline Compute log_sum_exp(Compute reference, Compute sum) {
  return sum == Compute(0) ? -infinity<Compute>()
                           : Logits<Config>::to_natural(reference) + log_of(sum);
}

// The same of a row of a sequence: minus infinity too of one that does not count.
template <class Config, class Compute>
__device__ inline Compute lse_of_row(const Sequence& seq, int row, Compute reference, Compute sum) {
  if (is_surplus<Config>(seq, row)) return -infinity<Compute>();
  return log_sum_exp<Config>(reference, sum);
}

// All keys of a q tile are walked by one block: Config::Chunks of a plain kernel.
struct WholeRows {
  static constexpr bool split = false;  // whether results are parts, which another kernel merges

  template <class Config>
  __device__ static const Tensor& out(const typename Config::Params& params, int) {
    return params.out;
  }
  // Whether the end of a row is asked for, and where it goes.
  template <class Params>
  __device__ static bool keeps_rows(const Params& params) {
    return params.lse.data != nullptr;
  }
  template <class Config, class Compute>
  __device__ static void keep_row(const typename Config::Params& params, const Sequence& seq,
                                  const WorkItem& item, int row, Compute reference, Compute sum) {
    *row_number<typename Config::Statistics>(params.lse, seq, item.head, row) =
        lse_of_row<Config>(seq, row, reference, sum);
  }
};

// What multiplies the scores of a kernel whose parameters bring it, rounded by the host as
// Logits<Config>::factor rounds: it is then in constant memory, and takes no register. Doubles have
// the unit of scores itself.
template <class Config, class Params>
__device__ inline typename Config::Compute logit_factor(const Params& params) {
  if constexpr (sizeof(typename Config::Compute) == 8) {
    return Config::Score::unit(params);
  } else {
    return params.factor;
  }
}

// x -> exponential(x * factor - offset(m, n, group, which)) of every element of a tile.
template <class Config, class Tile, class Compute, class Offset>
__device__ inline void exponentials(Tile& tile, Compute factor, Offset offset) {
  if constexpr (sizeof(Compute) == 8) {
    tile.for_each([&](Compute& x, int m, int n, int group, int which) {
      x = rounded_product(x, factor) - offset(m, n, group, which);
    });
    exponentials(tile);
  } else {
    tile.for_each([&](Compute& x, int m, int n, int group, int which) {
      x = Logits<Config>::exponential(x, factor, offset(m, n, group, which));
    });
  }
}

// Raw products of queries from row0 on and keys from key0 on -> scores; on an edge tile minus
// infinity for what the mask hides. `slopes` are asked for by the backward pass.
template <class Config, class Scores, class... Slopes>
__device__ inline void prepare_scores(const typename Config::Params& params, Scores& scores,
                                      const Sequence& seq, int head, int row0, int key0, bool edge,
                                      Slopes&... slopes) {
  using Compute = typename Scores::Compute;
  const LanePosition lane;
  change_scores<Config>(params, RowsOfQueries{seq.entry, head, row0, key0}, scores, slopes...);
  if (!edge) return;
  scores.for_each([&](Compute& s, int m, int n, int group, int which) {
    const int i = row0 + lane.row + Scores::row(m, group);
    const int j = key0 + lane.column + Scores::column(n, which);
    if (!Mask<Config>::visible(seq, i, j)) s = -infinity<Compute>();
  });
}

// The largest score of every row, over the columns of this warp's tile from `first` on.
template <class Scores>
__device__ inline RowValues<Scores> row_maxima(Scores& scores, int first = 0) {
  using Compute = typename Scores::Compute;
  RowValues<Scores> result;
  result.for_each([&](Compute& x, int, int) { x = -infinity<Compute>(); });
  scores.for_each([&](Compute& s, int m, int n, int group, int) {
    if (n * 8 >= first) result.value[m][group] = larger(result.value[m][group], s);
  });
  result.for_each([&](Compute& x, int, int) {
    x = combine_row_lanes(x, [](Compute a, Compute b) { return larger(a, b); });
  });
  return result;
}

// What is subtracted from a row's exponents: its reference, or zero for a row that has seen
// nothing, whose exponents are all minus infinity and stay so.
template <class Compute>
__device__ inline Compute subtrahend(Compute reference) {
  return reference == -infinity<Compute>() ? Compute(0) : reference;
}

template <class Tile>
__device__ inline RowValues<Tile> offsets_of(const RowValues<Tile>& reference) {
  RowValues<Tile> offset = reference;
  offset.for_each([](typename Tile::Compute& x, int, int) { x = subtrahend(x); });
  return offset;
}

// scores -> exponential(scores * factor - reference), and their sum over the tile's columns.
template <class Config, class Scores, class Compute = typename Scores::Compute>
__device__ inline RowValues<Scores> exponentiate(Scores& scores, RowValues<Scores>& reference,
                                                 Compute factor) {
  RowValues<Scores> offset = offsets_of(reference);
  RowValues<Scores> sums;
  sums.for_each([](Compute& x, int, int) { x = Compute(0); });
  exponentials<Config>(scores, factor,
                       [&](int m, int, int group, int) { return offset.value[m][group]; });
  scores.for_each([&](Compute& s, int m, int, int group, int) { sums.value[m][group] += s; });
  sums.for_each([&](Compute& x, int, int) {
    x = combine_row_lanes(x, [](Compute a, Compute b) { return a + b; });
  });
  return sums;
}

// Moves references up to the rows' maxima where they lie more than the slack below; `keep`
// becomes the weight of what was summed with the old reference. Says whether any lane moved one.
template <class Config, class Rows, class Compute>
__device__ inline bool move_references(Rows& reference, Rows& keep, Rows& maxima, Compute factor) {
  bool moved = false;
  reference.for_each([&](Compute& x, int m, int group) {
    const Compute candidate = rounded_product(maxima.value[m][group], factor);
    Compute& weight = keep.value[m][group];
    weight = Compute(1);
    if (candidate > x + Logits<Config>::slack()) {
      weight = Logits<Config>::exponential(x - candidate);
      x = candidate;
      moved = true;
    }
  });
  return __any_sync(0xffffffffu, moved);
}

// The weights of columns [first, first + Part::columns) of the scores, and their sums in this lane.
template <class Config, class Part, class Scores, class Compute = typename Scores::Compute>
__device__ inline void exponentiate_columns(Part& part, RowValues<Scores>& sums,
                                            const Scores& scores, const RowValues<Scores>& offset,
                                            Compute factor, int first) {
  sums.for_each([](Compute& x, int, int) { x = Compute(0); });
  part.for_each([&](Compute& x, int m, int n, int group, int which) {
    x = scores.value[m][first / 8 + n][group][which];
  });
  exponentials<Config>(part, factor,
                       [&](int m, int, int group, int) { return offset.value[m][group]; });
  part.for_each([&](Compute& x, int m, int, int group, int) { sums.value[m][group] += x; });
}

// ds = dP -> dS = P * (dP - delta), the gradient of the raw products q . k (before the scale), from
// P times the slopes of the scores.
template <class Scores>
__device__ inline void differentiate_scores(Scores& ds, const Scores& p,
                                            const RowValues<Scores>& delta) {
  const LanePosition lane;
  ds.for_each([&](typename Scores::Compute& x, int m, int n, int group, int which) {
    x = p.value[m][n][group][which] * (x - delta.value[m][group]);
    x = unchanged(x, lane.row + Scores::row(m, group));
  });
}

}  // namespace cuflash
