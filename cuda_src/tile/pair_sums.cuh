// The gradient of a term of the scores that has one number for each head: Config::Score::summed.
#pragma once

#include "score.cuh"

namespace cuflash {

// The sums over the pairs of a kv tile and a query head for the gradient of a term: one for every
// thread of the block, [batch, heads_q, kv tile, thread]. steps/slope_gradient.cu adds them up.
// Each thread reads and writes only its own sums.
template <class Config>
struct PairSums {
  using Compute = typename Config::Compute;
  Compute* of_head_0;  // this thread's sum for head 0 of the batch entry
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

// Clears the sums of the query heads of a block's kv tile before its first step.
template <class Config>
__device__ inline void clear_pair_sums(const typename Config::Params& params, int batch,
                                       int first_head, int heads, int kv_begin) {
  if constexpr (Config::Score::summed) {
    const PairSums<Config> sums(params, batch, kv_begin);
    for (int head = first_head; head < first_head + heads; ++head) sums.of(head) = 0;
  }
}

// The sum over a tile of scores: P (dP - delta) of every pair times the derivative of the score by
// the term. A hidden pair has P = 0 and adds nothing, whatever dP is.
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

// Adds the pairs of a tile to the sums, from P and from dS = P (dP - delta) before its slopes.
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
