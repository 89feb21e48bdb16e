// FlashAttention-3 backward for few queries: the storage and the context of a thread block.
#pragma once

#include "backward_score.cuh"

namespace cuflash::fa3 {

// The tiles in registers are those of BackwardTypes: scores are keys x queries, each of the two
// warpgroups has 64 keys of a kv tile and 64 rows of dQ.
template <class Config, class Types = BackwardTypes<Config>>
struct FewStorage {
  typename Types::QPanels q;                    // [block_q, head_dim]
  typename Types::DoutPanels dout;              // [block_q, head_dim_v]
  typename Types::KPanels k[Config::k_stages];  // [block_kv, head_dim]
  typename Types::VPanels v[Config::v_stages];  // [block_kv, head_dim_v]
  typename Types::ScorePanels ds;               // [block_q, block_kv]
  StagedRows staging[Types::math_warps];        // 64 columns of a warp's dK or dV
  QueryNumbers<Config> lse;                     // arrive with Q
  QueryNumbers<Config> delta;                   // arrive with dO
  Barrier q_full;
  Barrier dout_full;
  Barrier k_full[Config::k_stages];
  Barrier k_empty[Config::k_stages];
  Barrier v_full[Config::v_stages];
  Barrier v_empty[Config::v_stages];
  Barrier ds_full;
  Barrier ds_empty;
};

// A block has all queries of a head, and every kv tile from `first_tile` up to `end_tile`.
template <class Config>
struct FewContext {
  const typename Config::Params& params;
  FewStorage<Config>& shared;
  Sequence seq;
  int head;  // the query head, and its kv head: they have the same number
  int first_tile;
  int end_tile;

  // Whether no query sees a key of the tile.
  __device__ bool is_hidden(int tile) const {
    return Mask<Config>::template hides_all<Config::block_q, Config::block_kv>(
        seq, 0, tile * Config::block_kv);
  }
  __device__ long long head_row() const {
    return padded_row(params.shape, seq, head, params.padded_rows);
  }
};

template <class Config>
__device__ inline FewContext<Config> few_context(const typename Config::Params& params,
                                                 FewStorage<Config>& shared) {
  const auto heads = static_cast<unsigned>(params.shape.heads_q);
  const auto splits = static_cast<unsigned>(params.kv_splits);
  const unsigned split = blockIdx.x % splits;
  const unsigned all_heads = blockIdx.x / splits;
  const Sequence seq = sequence<Config>(params, static_cast<int>(all_heads / heads));
  const auto tiles = static_cast<unsigned long long>(ceil_div(seq.rows_kv, Config::block_kv));
  return {params,
          shared,
          seq,
          static_cast<int>(all_heads % heads),
          static_cast<int>(tiles * split / splits),
          static_cast<int>(tiles * (split + 1) / splits)};
}

// One thread initialises every barrier with the number of arrivals of a phase.
template <class Config, class Types = BackwardTypes<Config>>
__device__ inline void init_few_barriers(FewStorage<Config>& shared) {
  const auto init = [](Barrier& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  init(shared.q_full, 1);
  init(shared.dout_full, 1);
  for (int stage = 0; stage < Config::k_stages; ++stage) {
    init(shared.k_full[stage], 1);
    init(shared.k_empty[stage], Types::math_warps);
  }
  for (int stage = 0; stage < Config::v_stages; ++stage) {
    init(shared.v_full[stage], 1);
    init(shared.v_empty[stage], Types::math_warps);
  }
  init(shared.ds_full, Types::math_warps);
  init(shared.ds_empty, Types::math_warps);
  ptx::mbarrier_init_fence();
}

}  // namespace cuflash::fa3
