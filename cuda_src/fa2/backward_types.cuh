// FlashAttention-2 backward: the shared memory of a thread block.
#pragma once

#include "../tile/backward_steps.cuh"
#include "../tile/gradient_accumulator.cuh"

namespace cuflash::fa2 {

// lse and delta of a q tile's rows, see steps/statistics.cu.
template <class Config>
struct RowStatistics {
  SharedArray<typename Config::Compute, Config::block_q> lse;
  SharedArray<typename Config::Compute, Config::block_q> delta;
};

template <class Config>
struct BackwardStorage {
  using Storage = typename Config::Storage;
  SharedArray<Storage, Config::block_kv * Config::head_dim> k;    // [block_kv, head_dim]
  SharedArray<Storage, Config::block_kv * Config::head_dim_v> v;  // [block_kv, head_dim_v]
  // Rings of num_stages stages: [block_q, head_dim], [block_q, head_dim_v] and [block_q]
  SharedArray<Storage, Config::block_q * Config::head_dim> q[Config::num_stages];
  SharedArray<Storage, Config::block_q * Config::head_dim_v> dout[Config::num_stages];
  RowStatistics<Config> rows[Config::num_stages];
  // Rings of score_stages stages: [block_q, block_kv]; if transposed only dS, [block_kv, block_q]
  SharedArray<Storage, Config::transposed ? 0 : Config::block_q * Config::block_kv>
      p[Config::score_stages];
  SharedArray<Storage, Config::block_q * Config::block_kv> ds[Config::score_stages];
};

// The context of every step of a thread block. `item.head` is the kv head.
template <class Config, class Types = BackwardTypes<Config>>
struct BackwardContext {
  using Compute = typename Config::Compute;
  const typename Config::Params& params;
  BackwardStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  const int group;  // query heads of this kv head

  __device__ typename Types::KTile k() const { return {shared.k.data}; }
  __device__ typename Types::VTile v() const { return {shared.v.data}; }
  __device__ typename Types::QTile q(int stage) const { return {shared.q[stage].data}; }
  __device__ typename Types::DoutTile dout(int stage) const { return {shared.dout[stage].data}; }
  __device__ typename Types::ScoreTile p(int step) const {
    return {shared.p[step % Config::score_stages].data};
  }
  __device__ typename Types::ScoreTile ds(int step) const {
    return {shared.ds[step % Config::score_stages].data};
  }
  // dS with keys as rows.
  __device__ auto ds_transposed(int step) const {
    return SharedTile<typename Config::Storage, Config::block_kv, Config::block_q>{
        shared.ds[step % Config::score_stages].data};
  }
  __device__ const Compute* lse(int stage) const { return shared.rows[stage].lse.data; }
  __device__ const Compute* delta(int stage) const { return shared.rows[stage].delta.data; }

  // Row of the workspace where a head's rows begin.
  __device__ long long head_row(int head) const {
    return padded_row(params.shape, seq, head, params.padded_rows);
  }
};

}  // namespace cuflash::fa2
