// FlashAttention-1 backward: the shared memory of a thread block.
#pragma once

#include "../tile/backward_steps.cuh"

namespace cuflash::fa1 {

template <class Config>
struct BackwardStorage {
  using Storage = typename Config::Storage;
  SharedArray<Storage, Config::block_kv * Config::head_dim> k;    // [block_kv, head_dim]
  SharedArray<Storage, Config::block_kv * Config::head_dim_v> v;  // [block_kv, head_dim_v]
  // A ring of num_stages: [block_q, head_dim] and [block_q, head_dim_v]
  SharedArray<Storage, Config::block_q * Config::head_dim> q[Config::num_stages];
  SharedArray<Storage, Config::block_q * Config::head_dim_v> dout[Config::num_stages];
  SharedArray<Storage, Config::block_q * Config::block_kv> p;   // [block_q, block_kv]
  SharedArray<Storage, Config::block_q * Config::block_kv> ds;  // [block_q, block_kv]
};

// The context of every step of a thread block. `item.head` is the kv head.
template <class Config, class Types = BackwardTypes<Config>>
struct BackwardContext {
  const typename Config::Params& params;
  BackwardStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  const int group;  // query heads of this kv head

  __device__ typename Types::KTile k() const { return {shared.k.data}; }
  __device__ typename Types::VTile v() const { return {shared.v.data}; }
  __device__ typename Types::QTile q(int stage) const { return {shared.q[stage].data}; }
  __device__ typename Types::DoutTile dout(int stage) const { return {shared.dout[stage].data}; }
  __device__ typename Types::ScoreTile p() const { return {shared.p.data}; }
  __device__ typename Types::ScoreTile ds() const { return {shared.ds.data}; }

  __device__ typename Config::Compute* dq_accumulator(int head, int row) const {
    return static_cast<typename Config::Compute*>(params.dq_accumulator) +
           workspace_row(params.shape, seq, head, row) * Config::head_dim;
  }
};

}  // namespace cuflash::fa1
