// FlashAttention-3 backward with dropped weights: the draws of a step.
#pragma once

#include "backward_score.cuh"

namespace cuflash::fa3 {

// The masks of a warp's tile, as tile/weights.cuh describes them.
template <class Config>
struct StepDraws {
  const typename Config::Weights weights;
  const typename Config::Weights::template Draws<RowsOfKeys> draws;
  __device__ __forceinline__ StepDraws(const typename Config::Params& params,
                                       const RowsOfKeys& place)
      : weights(params), draws(params, weights, place) {}
  // The masks of the 16 queries that begin at 16 i.
  __device__ __forceinline__ void of_block(unsigned (&masks)[4], int i) const {
    draws.of_block(masks, 0, 16 * i);
  }
};

// Whether a step's draws are made during the step before. A listed step does not know the next q
// tile, and a step that is hidden whole makes no draws.
template <class Config>
constexpr bool draws_ahead = Config::Weights::drops && !Config::listed && !Mask<Config>::has_first;

// The draws of a step, two bits for each register of rounded scores, so that few registers hold
// them while products run. Block i is the 16 queries that begin at 16 i. The bits of its register
// `part` are bit 4 (i % 4) + part of the lower and of the upper half of word i / 4; each is set if
// the weight in the same half of the register is kept. Empty where all weights are kept.
template <class Config, bool drops = Config::Weights::drops>
struct StepBits {
  __device__ StepBits(const typename Config::Params&, const RowsOfKeys&) {}
  __device__ StepBits(const typename Config::Params&, const StepState&, const RowsOfKeys&) {}
};
template <class Config>
struct StepBits<Config, true> {
  static constexpr int blocks = Config::block_q / 16;
  static constexpr int words = ceil_div(blocks, 4);
  unsigned word[words] = {};

  // Makes the draws.
  __device__ __forceinline__ StepBits(const typename Config::Params& params,
                                      const RowsOfKeys& place) {
    const StepDraws<Config> draws(params, place);
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
      unsigned masks[4];
      draws.of_block(masks, i);
#pragma unroll
      for (int part = 0; part < 4; ++part) word[i / 4] |= masks[part] & bits_of(i, part);
    }
#pragma unroll
    for (unsigned& x : word) x = ptx::opaque(x);
  }
  // Reads the draws of the step before, or makes them if that step made none.
  __device__ __forceinline__ StepBits(const typename Config::Params& params, const StepState& state,
                                      const RowsOfKeys& place) {
    if constexpr (draws_ahead<Config>) {
#pragma unroll
      for (int i = 0; i < words; ++i) word[i] = state.drawn[i];
    } else {
      *this = StepBits(params, place);
    }
  }
  // Masks of block i that have two bits each; see clear_dropped().
  __device__ __forceinline__ void of_block(unsigned (&masks)[4], int i) const {
#pragma unroll
    for (int part = 0; part < 4; ++part) masks[part] = word[i / 4] & bits_of(i, part);
  }
  // Keeps the draws for the next step.
  __device__ __forceinline__ void keep(StepState& state) const {
    static_assert(sizeof(word) <= sizeof(state.drawn), "a step has room for its draws");
#pragma unroll
    for (int i = 0; i < words; ++i) state.drawn[i] = word[i];
  }

 private:
  __device__ static constexpr unsigned bits_of(int i, int part) {
    return 0x00010001u << (4 * (i % 4) + part);
  }
};

// Makes and keeps the draws of the next step, which is at `place`, where draws are made a step
// ahead.
template <class Config>
__device__ __forceinline__ void draw_ahead(const typename Config::Params& params, StepState& state,
                                           const RowsOfKeys& place) {
  if constexpr (draws_ahead<Config>) StepBits<Config>(params, place).keep(state);
}

// Clears each of two weights whose half of the mask is 0.
__device__ __forceinline__ void clear_dropped(unsigned& weights, unsigned mask) {
  if ((mask & 0x0000ffffu) == 0) weights &= 0xffff0000u;
  if ((mask & 0xffff0000u) == 0) weights &= 0x0000ffffu;
}

}  // namespace cuflash::fa3
