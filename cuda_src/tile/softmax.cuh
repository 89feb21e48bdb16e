// Online softmax over the rows of a score tile. Every exponent of a row is the difference from one
// rounded number, the row's reference, so the rounding of that number cancels however far the
// logits are from zero. No finite number stands in for minus infinity.
#pragma once

#include "exponential.cuh"
#include "numeric.cuh"
#include "score.cuh"
#include "warp_tile.cuh"
#include "weights.cuh"

namespace cuflash {

// Whether logits are in natural units: always so for float32 and float64.
template <class Config>
constexpr bool natural_logits = sizeof(typename Config::Storage) > 2;

// A positive factor of the logits in the compute type. It is never 0 or infinite, because either
// would turn a hidden score into NaN.
template <class Compute>
__device__ inline Compute factor_of(double factor) {
  if constexpr (sizeof(Compute) == 4) factor = min(max(factor, 0x1p-126), 0x1.fffffep127);
  return static_cast<Compute>(factor);
}

// Units and exponentials of logits. With 16-bit storage logits are in log2 units, so that the scale
// and the exponential take one fused multiply-add and one instruction of the special function unit.
template <class Config, bool natural = natural_logits<Config>>
struct Logits {
  __device__ static float factor(double scale) { return factor_of<float>(scale * kLog2E); }
  // 2^(raw * factor - offset); the second form takes a difference in these units.
  __device__ static float exponential(float raw, float factor, float offset) {
    return ptx::exp2_approximate(fma(raw, factor, -offset));
  }
  __device__ static float exponential(float difference) {
    return ptx::exp2_approximate(difference);
  }
  // How far a row's maximum may rise above its reference before the reference follows. Weights stay
  // below 2^8, which every storage type holds with the same relative rounding. Sums of bfloat16
  // values lose that much of the range of float32.
  __device__ static constexpr float slack() { return 8.0f; }
  // Without a current maximum, weights may be larger as long as a lane's partial sum stays below
  // this: sixteen times the largest weight within the slack.
  __device__ static constexpr float most_weight() { return 0x1p12f; }
  __device__ static float to_natural(float logit) { return logit * static_cast<float>(kLn2); }
  __device__ static float from_natural(float logit) { return logit * static_cast<float>(kLog2E); }
  // A row's sum of products, times the factor of its output, over the sum of its weights. It is
  // zero for a row that has seen no key, even where a weight of zero was multiplied by a value that
  // is not finite.
  __device__ static float normalise(float x, float, float, float inverse) {
    return inverse == 0.0f ? 0.0f : x * inverse;
  }
};

// float32 and float64: natural units and plain operations, each rounded separately.
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

// The log-sum-exp of a row in natural units; minus infinity for a row that has summed nothing.
template <class Config, class Compute>
__device__ inline Compute log_sum_exp(Compute reference, Compute sum) {
  return sum == Compute(0) ? -infinity<Compute>()
                           : Logits<Config>::to_natural(reference) + log_of(sum);
}

// The same for a row of a sequence; also minus infinity for a row that does not count.
template <class Config, class Compute>
__device__ inline Compute lse_of_row(const Sequence& seq, int row, Compute reference, Compute sum) {
  if (is_surplus<Config>(seq, row)) return -infinity<Compute>();
  return log_sum_exp<Config>(reference, sum);
}

// One block walks all keys of a q tile: Config::Chunks of a plain kernel.
struct WholeRows {
  static constexpr bool split = false;  // whether results are partial, for another kernel to merge

  template <class Config>
  __device__ static const Tensor& out(const typename Config::Params& params, int) {
    return params.out;
  }
  // Whether the kernel stores the end of a row, and where it goes.
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

// The factor of the scores, for a kernel whose parameters bring it. The host rounds it as
// Logits<Config>::factor does; it then lies in constant memory and takes no register. Doubles use
// the unit of the scores itself.
template <class Config, class Params>
__device__ inline typename Config::Compute logit_factor(const Params& params) {
  if constexpr (sizeof(typename Config::Compute) == 8) {
    return Config::Score::unit(params);
  } else {
    return params.factor;
  }
}

// Replaces every x of a tile by exponential(x * factor - offset(m, n, group, which)).
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

// Changes the raw products of a tile, which begins at query row0 and key key0, to scores. On an
// edge tile hidden pairs become minus infinity. The backward pass passes `slopes`.
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

// The largest score of every row, over this warp's columns that begin at `first`.
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

// The number subtracted from a row's exponents: its reference, or zero for a row that has seen
// nothing; the exponents of such a row are all minus infinity and stay so.
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

// Exponentiates scores to exponential(scores * factor - reference), and sums them over the tile's
// columns.
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

// Raises references to the rows' maxima where the maxima exceed them by more than the slack. `keep`
// becomes the factor that rescales the old sums. Returns whether any lane raised one.
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

// Exponentiates columns [first, first + Part::columns) of the scores, and sums them in this lane.
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

// Turns dP in `ds` into dS = P * (dP - delta), the gradient of the raw products q . k (before the
// scale). `p` holds P times the slopes of the scores.
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
