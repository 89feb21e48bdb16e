// The gradient of a term of the scores that has a number for each head: Config::Score::summed.
#pragma once

#include "score.cuh"

namespace cuflash {

// What the pairs of a kv tile and a query head give to the gradient of a term: a sum of every
// thread of the block, [batch, heads_q, kv tile, thread], that steps/slope_gradient.cu adds up.
// Each thread reads and writes its own numbers alone.
template <class Config>
struct PairSums {
  using Compute = typename Config::Compute;
  Compute* of_head_0;  // of the thread and the batch entry
  long long head_stride;

  __device__ PairSums(const typename Config::Params& params, int batch, int kv_begin) {
    const int kv_tiles = ceil_div(params.shape.seqlen_kv, Config::block_kv);
    head_stride = static_cast<long long>(kv_tiles) * blockDim.x;
    of_head_0 = static_cast<Compute*>(Config::Score::List::pair_sums(params)) +
                static_cast<long long>(batch) * params.shape.heads_q * head_stride +
                kv_begin / Config::block_kv * static_cast<long long>(blockDim.x) + threadIdx.x;
  }
  __device__ Compute& of(int head) const { return of_head_0[head * head_stride]; }
};

// Before a block's first step: zeros for the query heads of its kv tile.
template <class Config>
__device__ inline void clear_pair_sums(const typename Config::Params& params, int batch,
                                       int first_head, int heads, int kv_begin) {
  if constexpr (Config::Score::summed) {
    const PairSums<Config> sums(params, batch, kv_begin);
    for (int head = first_head; head < first_head + heads; ++head) sums.of(head) = 0;
  }
}

// What a tile of scores adds to them: P (dP - delta) of every pair times the score's derivative. A
// pair that is hidden has a P of 0 and gives nothing, whatever dP is.
template <class Config, class Scores, class Place>
struct PairSum {
  using Compute = typename Scores::Compute;
  const typename Config::Score::List terms;
  Compute sum = 0;
  __device__ PairSum(const typename Config::Params& params, const Place& place)
      : terms(Config::Score::terms(params, place.lane())) {}
  __device__ void add(Compute p, Compute gradient, int m, int n, int group, int which) {
    const Compute partial = terms.partial(Place::template query_step<Scores>(m, n, group, which),
                                          Place::template key_step<Scores>(m, n, group, which));
    if (p != Compute(0)) sum = fma(gradient, partial, sum);
  }
  __device__ void store(const typename Config::Params& params, const Place& place,
                        int kv_begin) const {
    PairSums<Config>(params, place.batch, kv_begin).of(place.head) += sum;
  }
};

// P and dS = P (dP - delta) of a tile, before its slopes -> the sums.
template <class Config, class Place, class Scores>
__device__ inline void sum_pairs(const typename Config::Params& params, const Place& place,
                                 int kv_begin, Scores& p, const Scores& ds) {
  if constexpr (Config::Score::summed) {
    PairSum<Config, Scores, Place> sum(params, place);
    p.for_each([&](typename Scores::Compute& x, int m, int n, int group, int which) {
      sum.add(x, ds.value[m][n][group][which], m, n, group, which);
    });
    sum.store(params, place, kv_begin);
  }
}

}  // namespace cuflash
