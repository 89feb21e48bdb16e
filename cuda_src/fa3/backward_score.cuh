// FlashAttention-3 backward: P and dS of a warp's 16 keys, in registers.
#pragma once

#include "../ptx/proxy_fence.cuh"
#include "../ptx/store_matrix_transposed.cuh"
#include "backward_types.cuh"

namespace cuflash::fa3 {

// Left operands of a product, each 16 keys x 16 queries: two 16x8 accumulators.
template <class Config>
struct ScoreOperand {
  unsigned value[Config::block_q / 16][4];
};

// The bits of an entry and a head, where a term hides pairs by an array of bits.
template <class Config>
__device__ __forceinline__ HiddenPairs hidden_pairs(const BackwardContext<Config>& c, int head) {
  return Config::Score::List::hidden(c.params, c.item.entry, head);
}
// The bits of a warp's keys and a q tile, which begin at `first`.
template <class Config>
__device__ __forceinline__ ShownPairs shown_pairs(const BackwardContext<Config>& c, bool every,
                                                  unsigned first) {
  ShownPairs shown{{{0xffffffffu, 0xffffffffu}}, every};
  if (!every) shown.bits = hidden_pairs<Config>(c, 0).pairs[first + threadIdx.x % 32];
  return shown;
}
// Every lane has the same note; the shuffles tell the compiler, which then keeps addresses in
// uniform registers.
template <class Config>
__device__ __forceinline__ StepNote listed_step(const BackwardContext<Config>& c, int number) {
  const StepNote& note = c.note_of(number);
  return {__shfl_sync(0xffffffffu, note.head, 0), __shfl_sync(0xffffffffu, note.tile_and_every, 0),
          __shfl_sync(0xffffffffu, note.pairs, 0), 0};
}

// The place of the step before step `number`.
template <class Config>
__device__ __forceinline__ QPlace place_before(const BackwardContext<Config>& c,
                                               const StepState& state, int number) {
  if constexpr (Config::listed) {
    const StepNote note = listed_step<Config>(c, number - 1);
    return {note.head, note.tile()};
  }
  return c.before(state.place);
}

// Turns the products K Q^T into P^T = exp(scores * factor - lse), times 2^exponent.
template <class Config, int exponent = 0, class Scores>
__device__ __forceinline__ void exponentiate(const typename Config::Params& params, Scores& scores,
                                             const QueryNumbers<Config>& lse,
                                             const RowsOfKeys& place, float factor) {
  if constexpr (Config::packed || Config::listed) {
    change_scores<Config, Applied::changing>(params, place, scores);
    if (!place.shown.every) change_scores<Config, Applied::hiding>(params, place, scores);
  } else {
    change_scores<Config>(params, place, scores);
  }
  const LanePosition lane;
#pragma unroll
  for (int n = 0; n < Scores::column_fragments; ++n) {
    const float2 offset = *reinterpret_cast<const float2*>(&lse.value[lane.column + 8 * n]);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float& s = scores.value[0][n][group][which];
        s = Logits<Config>::exponential(s, factor, (which == 0 ? offset.x : offset.y) - exponent);
      }
    }
  }
}

// Puts a pair of numbers into a tile of scores, or, rounded, into an operand.
template <class Scores>
__device__ __forceinline__ void put_pair(Scores& scores, int n, int group, float x, float y) {
  scores.value[0][n][group][0] = x;
  scores.value[0][n][group][1] = y;
}
template <class Config>
__device__ __forceinline__ void put_pair(ScoreOperand<Config>& operand, int n, int group, float x,
                                         float y) {
  operand.value[n / 2][n % 2 * 2 + group] = pack(typename Config::Storage{}, x, y);
}

// exponentiate() for scores that have slopes: makes P^T, rounded, and P^T times the slopes, from
// which dS is made. The latter replaces the scores or goes to an operand.
template <class Config, int exponent = 0, class Scores, class Sloped>
__device__ __forceinline__ void exponentiate(const typename Config::Params& params,
                                             const Scores& scores, ScoreOperand<Config>& weights,
                                             Sloped& sloped, const QueryNumbers<Config>& lse,
                                             const RowsOfKeys& place, float factor) {
  const ScoreChange<Config, Scores, RowsOfKeys> change(params, place);
  const LanePosition lane;
#pragma unroll
  for (int n = 0; n < Scores::column_fragments; ++n) {
    const float2 offset = *reinterpret_cast<const float2*>(&lse.value[lane.column + 8 * n]);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      float p[2], slope[2];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const Graded<float> score =
            change.graded(scores.value[0][n][group][which], 0, n, group, which);
        p[which] = Logits<Config>::exponential(score.value, factor,
                                               (which == 0 ? offset.x : offset.y) - exponent);
        slope[which] = score.slope;
      }
      put_pair(weights, n, group, p[0], p[1]);
      put_pair(sloped, n, group, times_slope<Config>(p[0], slope[0]),
               times_slope<Config>(p[1], slope[1]));
    }
  }
}

// Whether a q tile holds a dead query, or reaches beyond the length. All warps get the same answer.
template <class Config>
__device__ __forceinline__ bool has_dead_queries(const QueryNumbers<Config>& lse) {
  bool dead = false;
#pragma unroll
  for (int query = 0; query < Config::block_q; query += 32) {
    dead |= lse.value[query + ptx::opaque_lane()] == infinity<float>();
  }
  return __any_sync(0xffffffffu, dead);
}

// Whether Q and dO of a q tile that holds dead queries must be cleared. If all of them are beyond
// the length, the copy engine has filled their rows with zeros. All warps get the same answer.
template <class Config>
__device__ __forceinline__ bool must_clear(const QueryNumbers<Config>& lse, const Sequence& seq,
                                           int query0) {
  if constexpr (Config::Lengths::vary) return true;  // behind a sequence there may be another one
  bool dead = false;
#pragma unroll
  for (int first = 0; first < Config::block_q; first += 32) {
    const int query = first + ptx::opaque_lane();
    dead |= query0 + query < seq.seqlen_q && lse.value[query] == infinity<float>();
  }
  return __any_sync(0xffffffffu, dead);
}

// Clears one pair of a tile of scores, or of a rounded one.
template <class Scores>
__device__ __forceinline__ void clear_pair(Scores& scores, int n, int group, int which) {
  scores.value[0][n][group][which] = 0;
}
template <class Config>
__device__ __forceinline__ void clear_pair(ScoreOperand<Config>& operand, int n, int group,
                                           int which) {
  operand.value[n / 2][n % 2 * 2 + group] &= which == 0 ? 0xffff0000u : 0x0000ffffu;
}

// Clears the pairs of P and dP that are hidden or have a dead query, whatever numbers they hold.
// They hold the first `rows` queries of the q tile.
template <class Config, int rows = Config::block_q, class... All>
__device__ inline void apply_mask(const QueryNumbers<Config>& lse, const Sequence& seq,
                                  const RowsOfKeys& place, All&... scores) {
  using Scores = WarpTile<float, 16, 16, rows>;
  const LanePosition lane;
#pragma unroll
  for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int column = lane.column + Scores::column(n, which);
      const bool dead = lse.value[column] == infinity<float>();
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const int key = place.key0 + lane.row + Scores::row(0, group);
        if (dead || !Mask<Config>::visible(seq, place.query0 + column, key)) {
          (clear_pair(scores, n, group, which), ...);
        }
      }
    }
  }
}

// The same for a q tile without dead queries: clears, for each key, the queries before the first
// that sees it and after the last.
template <class Config, int rows = Config::block_q, class... All>
__device__ __forceinline__ void apply_mask_to_live_queries(const Sequence& seq,
                                                           const RowsOfKeys& place,
                                                           All&... scores) {
  using Scores = WarpTile<float, 16, 16, rows>;
  const LanePosition lane;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int key = place.key0 + lane.row + 8 * group;
    int hidden = Mask<Config>::has_last ? key - seq.q_last - place.query0 - lane.column : 0;
    if (key >= seq.seqlen_kv) hidden = Config::block_q;
    int end = Config::block_q;  // one past the last query that sees the key
    if (Mask<Config>::has_first) end = key - seq.q_first - place.query0 - lane.column + 1;
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int column = Scores::column(n, which);
        if (column < hidden || (Mask<Config>::has_first && column >= end)) {
          (clear_pair(scores, n, group, which), ...);
        }
      }
    }
  }
}

// dS^T = P^T * (dP^T - delta), rounded, as an operand; also rounds P^T itself into `weights`, if
// given.
template <class Config, class Scores, class... Weights>
__device__ __forceinline__ void differentiate(ScoreOperand<Config>& gradients, const Scores& p,
                                              const Scores& dp, const QueryNumbers<Config>& delta,
                                              Weights&... weights) {
  using Storage = typename Config::Storage;
  const LanePosition lane;
#pragma unroll
  for (int n = 0; n < Scores::column_fragments; ++n) {
    const float2 offset = *reinterpret_cast<const float2*>(&delta.value[lane.column + 8 * n]);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      float ds[2];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        ds[which] = p.value[0][n][group][which] *
                    (dp.value[0][n][group][which] - (which == 0 ? offset.x : offset.y));
      }
      const int part = n % 2 * 2 + group;
      gradients.value[n / 2][part] = pack(Storage{}, ds[0], ds[1]);
      (put_pair(weights, n, group, p.value[0][n][group][0], p.value[0][n][group][1]), ...);
    }
  }
}

// Where the registers have no room for P, P rounded to the storage type replaces it. P would be at
// most 1 if the log-sum-exp were exact. Because it is rounded, P may be larger, but it is less than
// 4 for logits below some 10^7; beyond these no digit of P is right. float16 has few numbers near
// 0, so P is multiplied by 2^14; by 2^4 where P times a caller's slope is rounded too, so that
// slopes below 2^12 do not overflow.
__device__ constexpr int exponent_of(__half, bool any_slope) { return any_slope ? 4 : 14; }
__device__ constexpr int exponent_of(__nv_bfloat16, bool) { return 0; }
template <class Config>
constexpr int rounding_exponent = exponent_of(typename Config::Storage{}, Config::Score::any_slope);
template <class Config>
constexpr float rounding_factor = static_cast<float>(1 << rounding_exponent<Config>);
__device__ inline float2 unpack(__half, unsigned both) {
  return __half22float2(*reinterpret_cast<const __half2*>(&both));
}
// A bfloat16 is the upper half of a float32.
__device__ inline float2 unpack(__nv_bfloat16, unsigned both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

// factor * P^T, rounded, as an operand.
template <class Config, class Scores>
__device__ __forceinline__ void round_weights(ScoreOperand<Config>& weights, const Scores& p,
                                              float factor) {
  using Storage = typename Config::Storage;
#pragma unroll
  for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const auto& pair = p.value[0][n][group];
      weights.value[n / 2][n % 2 * 2 + group] = pack(Storage{}, pair[0] * factor, pair[1] * factor);
    }
  }
}

// Turns dP of 16 queries into dS^T = P^T * (dP^T - delta), rounded, as an operand. `weights` holds
// rounding_factor * P times the slopes of the scores.
template <class Config, class Scores>
__device__ __forceinline__ void differentiate_rounded(unsigned (&gradients)[4], int i,
                                                      const ScoreOperand<Config>& weights,
                                                      const Scores& dp,
                                                      const QueryNumbers<Config>& delta) {
  using Storage = typename Config::Storage;
  constexpr float inverse = 1 / rounding_factor<Config>;
  const LanePosition lane;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int n = 2 * i + part / 2;
    const int group = part % 2;
    const float2 offset = *reinterpret_cast<const float2*>(&delta.value[lane.column + 8 * n]);
    const float2 p = unpack(Storage{}, weights.value[i][part]);
    // `inverse` is a power of two, so the result is exactly the difference times `inverse`.
    float ds[2] = {p.x * fma(dp.value[0][n][group][0], inverse, -offset.x * inverse),
                   p.y * fma(dp.value[0][n][group][1], inverse, -offset.y * inverse)};
#pragma unroll
    for (int which = 0; which < 2; ++which) ds[which] = unchanged(ds[which], lane.row);
    gradients[part] = pack(Storage{}, ds[0], ds[1]);
  }
}

// The same for a whole q tile.
template <class Config, class Scores>
__device__ __forceinline__ void differentiate_rounded(ScoreOperand<Config>& gradients,
                                                      const ScoreOperand<Config>& weights,
                                                      const Scores& dp,
                                                      const QueryNumbers<Config>& delta) {
#pragma unroll
  for (int i = 0; i < Config::block_q / 16; ++i) {
    differentiate_rounded(gradients.value[i], i, weights, dp, delta);
  }
}

// P of one element, from a tile or from a rounded tile that is multiplied by 2^exponent.
template <class Config, int, class Scores>
__device__ __forceinline__ float weight_of(const Scores& p, int n, int group, int which) {
  return p.value[0][n][group][which];
}
template <class Config, int exponent>
__device__ __forceinline__ float weight_of(const ScoreOperand<Config>& p, int n, int group,
                                           int which) {
  const float2 both = unpack(typename Config::Storage{}, p.value[n / 2][n % 2 * 2 + group]);
  return (which == 0 ? both.x : both.y) * (1.0f / static_cast<float>(1 << exponent));
}

// Adds P and dP of a step to the sums for the gradient of a term, if one is needed.
template <class Config, int exponent, class Weights, class Scores>
__device__ __forceinline__ void sum_pairs(const BackwardContext<Config>& c, const RowsOfKeys& place,
                                          const Weights& p, const Scores& dp,
                                          const QueryNumbers<Config>& delta) {
  if constexpr (Config::Score::summed) {
    PairSum<Config, Scores, RowsOfKeys> sum(c.params, place);
    const LanePosition lane;
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
      const float2 offset = *reinterpret_cast<const float2*>(&delta.value[lane.column + 8 * n]);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const float weight = weight_of<Config, exponent>(p, n, group, which);
          const float difference =
              dp.value[0][n][group][which] - (which == 0 ? offset.x : offset.y);
          sum.add(weight, weight * difference, 0, n, group, which);
        }
      }
    }
    sum.store(c.params, place, c.item.kv_begin);
  }
}

// Where the warp stores dS^T of its keys: its columns of dS in shared memory.
template <class Panels>
struct GradientsPlace {
  unsigned to;
  __device__ __forceinline__ GradientsPlace(Panels& ds, unsigned stage, int part) {
    const int lane = ptx::opaque_lane();
    const int row = lane / 16 * 8 + lane % 8;
    const int chunk = static_cast<int>(threadIdx.x) / 32 % 4 * 2 + lane / 8 % 2;
    to = ptx::shared_address(ds.data) + stage * static_cast<unsigned>(sizeof(Panels)) +
         part * Panels::panel_bytes + row * 128 + (chunk ^ lane % 8) * 16;
  }
  // Stores dS of 16 queries.
  __device__ __forceinline__ void store(int i, const unsigned (&gradients)[4]) const {
    ptx::store_matrix_x4_transposed(to + i * 16 * 128, gradients);
  }
};

template <class Config, int rows = Config::block_q, class Panels>
__device__ __forceinline__ void store_gradients(const ScoreOperand<Config>& gradients, Panels& ds,
                                                unsigned stage, int part) {
  const GradientsPlace<Panels> place(ds, stage, part);
#pragma unroll
  for (int i = 0; i < rows / 16; ++i) place.store(i, gradients.value[i]);
}

// The threads of a warpgroup clear the rows of dead queries.
template <class Config, class Panels>
__device__ inline void clear_dead_queries(Panels& matrix, const QueryNumbers<Config>& lse) {
  for (int row = threadIdx.x % kWarpgroup; row < Panels::rows; row += kWarpgroup) {
    if (lse.value[row] != infinity<float>()) continue;
    for (int panel = 0; panel < Panels::count; ++panel) {
      auto* to = reinterpret_cast<uint4*>(matrix.data) + (panel * Panels::rows + row) * 8;
      for (int chunk = 0; chunk < 8; ++chunk) to[chunk] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace cuflash::fa3
