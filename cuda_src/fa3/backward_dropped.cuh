// FlashAttention-3 backward with dropped weights: a warp's kept P, and its dS, in registers.
#pragma once

#include "backward_draws.cuh"

namespace cuflash::fa3 {

// The sum over pairs for the gradient of a term, if one is needed, taken while dS is made.
template <class Config, class Scores, bool summed = Config::Score::summed>
struct StepSum {
  PairSum<Config, Scores, RowsOfKeys> sum;
  __device__ __forceinline__ StepSum(const typename Config::Params& params, const RowsOfKeys& place)
      : sum(params, place) {}
  __device__ __forceinline__ void add(float p, float gradient, int n, int group, int which) {
    sum.add(p, gradient, 0, n, group, which);
  }
  __device__ __forceinline__ void store(const BackwardContext<Config>& c,
                                        const RowsOfKeys& place) const {
    sum.store(c.params, place, c.item.kv_begin);
  }
};
template <class Config, class Scores>
struct StepSum<Config, Scores, false> {
  __device__ StepSum(const typename Config::Params&, const RowsOfKeys&) {}
  __device__ void add(float, float, int, int, int) {}
  __device__ void store(const BackwardContext<Config>&, const RowsOfKeys&) const {}
};

// Two neighbouring elements of a rounded tile of scores.
template <class Config>
__device__ __forceinline__ float2 pair_of(const ScoreOperand<Config>& scores, int n, int group) {
  return unpack(typename Config::Storage{}, scores.value[n / 2][n % 2 * 2 + group]);
}

// Turns the products K Q^T into P^T times 2^exponent, and also into P^T times the slopes of the
// scores where there are any. Rounds both at once: the registers cannot hold P, dP and the draws
// together.
template <class Config, int exponent, class Scores>
__device__ __forceinline__ void exponentiate_early(const typename Config::Params& params, Scores& p,
                                                   ScoreOperand<Config>& weights,
                                                   ScoreOperand<Config>& sloped,
                                                   const QueryNumbers<Config>& lse,
                                                   const RowsOfKeys& place, float factor) {
  if constexpr (Config::Score::has_slope) {
    exponentiate<Config, exponent>(params, p, weights, sloped, lse, place, factor);
    ptx::wgmma_hold(sloped.value);
  } else {
    exponentiate<Config, exponent>(params, p, lse, place, factor);
    round_weights(weights, p, 1);
  }
  ptx::wgmma_hold(weights.value);
}

// dS^T = P^T * (M * dP^T - delta) of a step. M is 0 for a dropped weight. For a kept weight it is 1
// over the fraction of weights that are kept.
template <class Config, int exponent>
struct DroppedGradients {
  using Storage = typename Config::Storage;
  using Scores = typename BackwardTypes<Config>::Scores;
  static constexpr float scale = 1.0f / static_cast<float>(1 << exponent);
  const BackwardContext<Config>& c;
  const RowsOfKeys place;
  const QueryNumbers<Config>& delta;
  StepSum<Config, Scores> sum;
  const float kept;  // M of a kept weight, times `scale`

  __device__ __forceinline__ DroppedGradients(const BackwardContext<Config>& c,
                                              const RowsOfKeys& place,
                                              const QueryNumbers<Config>& delta)
      : c(c),
        place(place),
        delta(delta),
        sum(c.params, place),
        kept(Config::Weights::template inverse_keep<float>(c.params) * scale) {}

  // dS of the 16 queries that begin at 16 i, rounded, as an operand. A weight is dropped if its
  // half of a mask is 0. P, and P times the slopes of its scores, are multiplied by 2^exponent.
  __device__ __forceinline__ void of_block(unsigned (&gradients)[4], const unsigned (&masks)[4],
                                           int i, const ScoreOperand<Config>& p,
                                           const ScoreOperand<Config>& sloped, const Scores& dp) {
    const LanePosition lane;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int n = 2 * i + part / 2;
      const int group = part % 2;
      const float2 offset = *reinterpret_cast<const float2*>(&delta.value[lane.column + 8 * n]);
      const float2 weight = pair_of(p, n, group);
      const float2 factor = pair_of(sloped, n, group);
      const float (&both)[2] = dp.value[0][n][group];
      const float x = difference(both[0], masks[part] & 0x0000ffffu, offset.x);
      const float y = difference(both[1], masks[part] & 0xffff0000u, offset.y);
      sum.add(weight.x, weight.x * x, n, group, 0);
      sum.add(weight.y, weight.y * y, n, group, 1);
      gradients[part] = pack(Storage{}, factor.x * x, factor.y * y);
    }
  }
  __device__ __forceinline__ void store() const { sum.store(c, place); }

 private:
  // (M dP - delta) * scale; `scale` is a power of two and changes no digit.
  __device__ __forceinline__ float difference(float dp, unsigned mask, float delta) const {
    return fma(mask != 0 ? dp : 0.0f, kept, -delta * scale);
  }
};

// dS of a whole step, and the kept P^T, rounded.
template <class Config, int exponent, class Scores>
__device__ __forceinline__ void differentiate_dropped(
    const BackwardContext<Config>& c, const RowsOfKeys& place, ScoreOperand<Config>& gradients,
    ScoreOperand<Config>& weights, const ScoreOperand<Config>& sloped, const Scores& dp,
    const QueryNumbers<Config>& delta, const StepBits<Config>& bits) {
  DroppedGradients<Config, exponent> dropped(c, place, delta);
#pragma unroll
  for (int i = 0; i < Config::block_q / 16; ++i) {
    unsigned masks[4];
    bits.of_block(masks, i);
    dropped.of_block(gradients.value[i], masks, i, weights, sloped, dp);
#pragma unroll
    for (int part = 0; part < 4; ++part) clear_dropped(weights.value[i][part], masks[part]);
  }
  dropped.store();
}

}  // namespace cuflash::fa3
