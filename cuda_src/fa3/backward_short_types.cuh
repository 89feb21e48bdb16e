// FlashAttention-3 backward for short heads: the storage and the context of a thread block.
#pragma once

#include "backward_score.cuh"

namespace cuflash::fa3 {

// Scores are keys x queries, as in BackwardTypes: each of the two warpgroups has 64 keys of a kv
// tile. Two q tiles are a pair. Each warpgroup computes dQ of one tile of a pair, so dS of a pair
// passes through shared memory.
template <class Config>
struct ShortTypes : BackwardTypes<Config> {
  using Storage = typename Config::Storage;
  static constexpr int tiles_of_pair = BackwardTypes<Config>::warpgroups;
  static constexpr int pairs = Config::q_tiles / tiles_of_pair;
  static_assert(Config::q_tiles % tiles_of_pair == 0 && Config::block_q == kRowsOfProduct,
                "each warpgroup has a q tile of a pair");
  static constexpr int all_queries = Config::q_tiles * Config::block_q;

  using QGradient = WarpTile<float, 16, 16, Config::head_dim>;
  using KPanels = Panels<Storage, Config::block_kv, Config::head_dim>;
  using PairScores = Panels<Storage, tiles_of_pair * Config::block_q, Config::block_kv>;
};

template <class Config, class Types = ShortTypes<Config>>
struct ShortStorage {
  typename Types::QPanels q[Config::q_tiles];        // [block_q, head_dim]
  typename Types::DoutPanels dout[Config::q_tiles];  // [block_q, head_dim_v]
  typename Types::KPanels k[Config::kv_stages];      // [block_kv, head_dim]
  typename Types::VPanels v[Config::kv_stages];      // [block_kv, head_dim_v]
  typename Types::PairScores ds[Config::score_stages];
  StagedRows staging[Types::math_warps];        // 64 columns of a warp's dQ, dK or dV
  QueryNumbers<Config> lse[Config::q_tiles];    // arrive with Q
  QueryNumbers<Config> delta[Config::q_tiles];  // arrive with dO
  Barrier q_full[Config::q_tiles];
  Barrier dout_full[Config::q_tiles];
  Barrier q_empty[Config::q_tiles];
  Barrier k_full[Config::kv_stages];
  Barrier v_full[Config::kv_stages];
  Barrier kv_empty[Config::kv_stages];
  Barrier ds_full[Config::score_stages];
  Barrier ds_empty[Config::score_stages];
};

// A block computes several heads, one after the other: all queries and all keys of each. All heads
// have the same numbers of tiles. `round` counts the heads of the block; steps count the kv tiles
// that some query sees, through all of its heads.
template <class Config>
struct ShortContext {
  const typename Config::Params& params;
  ShortStorage<Config>& shared;
  const Sequence seq;
  const int head;  // the query head, and its kv head: they have the same number
  const int round;

  // The phase of the barriers of Q and dO.
  __device__ unsigned phase() const { return ptx::opaque(static_cast<unsigned>(round)) % 2; }
  // Kv tiles that some query sees: the first ones. Computed at every call, as registers are full.
  __device__ int seen_tiles() const {
    int keys = static_cast<int>(ptx::opaque(static_cast<unsigned>(seq.rows_kv)));
    if (Mask<Config>::has_last) keys = min(keys, seq.rows_q + seq.q_last);
    return ceil_div(max(keys, 0), Config::block_kv);
  }
  // The number of a kv tile among the seen ones of all heads of the block.
  __device__ int step_of(int tile) const { return round * seen_tiles() + tile; }
  __device__ int kv_tiles() const { return ceil_div(seq.rows_kv, Config::block_kv); }
  __device__ int q_tiles() const { return ceil_div(seq.rows_q, Config::block_q); }
  // Whether no query of `count` q tiles from `q_tile` on sees a key of the kv tile; the tiles may
  // have no queries.
  template <int count>
  __device__ bool is_hidden(unsigned q_tile, int tile) const {
    const int query0 = static_cast<int>(q_tile) * Config::block_q;
    return query0 >= seq.rows_q ||
           Mask<Config>::template hides_all<count * Config::block_q, Config::block_kv>(
               seq, query0, tile * Config::block_kv);
  }
  __device__ long long head_row() const {
    return padded_row(params.shape, seq, head, params.padded_rows);
  }
};

// A number that every lane of a warp has. The shuffle tells the compiler, which then keeps
// descriptors in uniform registers.
__device__ __forceinline__ int uniform(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// The head that the block computes in round `round`, counted through all batch entries.
__device__ __forceinline__ unsigned number_of_head(int round) {
  return blockIdx.x + static_cast<unsigned>(round) * gridDim.x;
}

// The context of the head that the block computes in round `round`.
template <class Config>
__device__ __forceinline__ ShortContext<Config> short_context(const typename Config::Params& params,
                                                              ShortStorage<Config>& shared,
                                                              int round) {
  const auto heads = static_cast<unsigned>(params.shape.heads_q);
  const unsigned i = number_of_head(round);
  return {params, shared, sequence<Config>(params, static_cast<int>(i / heads)),
          static_cast<int>(i % heads), round};
}

// Calls `work(context)` for every head of the block.
template <class Config, class Work>
__device__ __forceinline__ void for_each_head(const typename Config::Params& params,
                                              ShortStorage<Config>& shared, const Work& work) {
  const unsigned heads =
      static_cast<unsigned>(params.shape.heads_q) * static_cast<unsigned>(params.shape.batch);
#pragma unroll 1
  for (int round = 0; number_of_head(round) < heads; round = uniform(round + 1)) {
    work(short_context<Config>(params, shared, round));
  }
}

// One thread initialises every barrier with the number of arrivals of a phase.
template <class Config, class Types = ShortTypes<Config>>
__device__ inline void init_short_barriers(ShortStorage<Config>& shared) {
  const auto init = [](Barrier& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int tile = 0; tile < Config::q_tiles; ++tile) {
    init(shared.q_full[tile], 1);
    init(shared.dout_full[tile], 1);
    init(shared.q_empty[tile], Types::math_warps);
  }
  for (int stage = 0; stage < Config::kv_stages; ++stage) {
    init(shared.k_full[stage], 1);
    init(shared.v_full[stage], 1);
    init(shared.kv_empty[stage], Types::math_warps);
  }
  for (int stage = 0; stage < Config::score_stages; ++stage) {
    init(shared.ds_full[stage], Types::math_warps);
    init(shared.ds_empty[stage], Types::math_warps);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace cuflash::fa3
