// FlashAttention-3 backward, blocks that stay: every multiprocessor has one block, and block i of n
// computes the kv tiles i, i + n, i + 2 n and so on. A block with a single tile begins with loads
// and ends with stores, and nothing runs beside either. A block that stays loads K and V of its
// next tile while it multiplies, and Q and dO of that tile as soon as there is room. This pays
// where a tile has few steps; bench/NOTES.md has the figures.
//
// Steps are counted through all tiles of a block, so that the rings of Q, dO and dS go on. The
// kernel before clears all sums of dQ, so no block waits for another one.
//
// K and V have two stages. Who waits for whom, besides the waits listed in backward.cu:
//   k_full, v_full   all warps of math for load; they replace the barriers of a single tile
//   kv_empty         load for all warps of math: their last dQ of a tile has read K
#pragma once

#include "backward_load.cuh"

namespace cuflash::fa3 {

// Clears the gradients of keys that no query sees, by `threads` threads from the block's
// `first_thread` on.
template <class Config>
__device__ inline void store_zeros(const BackwardContext<Config>& c, const Tensor& tensor,
                                   int columns, int first_thread, int threads) {
  using Storage = typename Config::Storage;
  const int rows = min(Config::block_kv, c.seq.rows_kv - c.item.kv_begin);
  Storage* const to = kv_row<Storage>(tensor, c.seq, c.item.head, c.item.kv_begin);
  for (int i = static_cast<int>(threadIdx.x) - first_thread; i < rows * columns; i += threads) {
    to[i / columns * tensor.row_stride + i % columns] = from_compute<Storage>(0.0f);
  }
}

// Whole warps call `work(context, tile)` for every tile of the block.
template <class Config, class Work>
__device__ __forceinline__ void for_each_tile(const typename Config::Params& params,
                                              BackwardStorage<Config>& shared, const Work& work) {
  int steps = 0;
#pragma unroll 1
  for (unsigned i = 0, tile = blockIdx.x; tile < kv_tiles_of_all<Config>(params);
       ++i, tile += gridDim.x) {
    // Every lane has the same number; the shuffle tells the compiler, which then keeps descriptors
    // in uniform registers.
    steps = __shfl_sync(0xffffffffu, steps, 0);
    const auto c = context_of<Config>(params, shared, {params, tile}, {steps, i});
    work(c, tile);
    steps += c.steps();
  }
}

// A warp of math waits for K and V of the tile.
template <class Config>
__device__ __forceinline__ void await_keys(const BackwardContext<Config>& c) {
  wait<Config>(c.shared.stay.k_full[c.kv_place()], c.kv_phase());
  wait<Config>(c.shared.stay.v_full[c.kv_place()], c.kv_phase());
}

// A warp of math says that its last dQ of the tile, that of step `last`, has read dS and K.
template <class Config>
__device__ __forceinline__ void pass_keys(const BackwardContext<Config>& c, int last) {
  arrive_warp<Config>(c.shared.ds_empty[RingPlace<Config::score_stages>(last).stage]);
  arrive_warp<Config>(c.shared.stay.kv_empty[c.kv_place()]);
}

// All warps of math finish a tile that no query sees. Its K and V are not loaded, but the barriers
// pass through their phases.
template <class Config>
__device__ inline void staying_zeros(const BackwardContext<Config>& c) {
  constexpr int threads = kWarpgroup * BackwardTypes<Config>::warpgroups;
  store_zeros(c, c.params.dk, c.params.shape.head_dim, kWarpgroup, threads);
  store_zeros(c, c.params.dv, c.params.shape.head_dim_v, kWarpgroup, threads);
  await_keys(c);
  __syncwarp();  // no lane may still wait for the phase that the arrival ends
  arrive_warp<Config>(c.shared.stay.kv_empty[c.kv_place()]);
}

// One thread loads K and V of a tile once there is room. For a tile without steps it only arrives
// at the barriers.
template <class Config>
__device__ inline void load_keys(const BackwardContext<Config>& c) {
  const unsigned place = c.kv_place();
  auto& barriers = c.shared.stay;
  wait_empty<Config>(barriers.kv_empty[place], c.kv_phase());
  if (c.steps() == 0) {
    arrive<Config>(barriers.k_full[place]);
    arrive<Config>(barriers.v_full[place]);
    return;
  }
  const BackwardLoader<Config> loader{c};
  loader.load_kv(c.shared.k[place], &c.params.k_map, barriers.k_full[place]);
  loader.load_kv(c.shared.v[place], &c.params.v_map, barriers.v_full[place]);
}

// A whole warp waits for room for Q and dO of every step, and one of its threads loads them. It
// loads as many steps of a tile as the ring has stages, then K and V of the next tile, and then the
// other steps.
template <class Config>
__device__ inline void staying_load_role(const typename Config::Params& params,
                                         BackwardStorage<Config>& shared) {
  constexpr int stages = Config::num_stages;
  const bool loads = threadIdx.x % 32 == 0;
  if (loads) load_keys(context_of<Config>(params, shared, {params, blockIdx.x}, {0, 0}));
  int step = 0;
  for_each_tile<Config>(params, shared, [&](const BackwardContext<Config>& c, unsigned tile) {
    const BackwardLoader<Config> loader{c};
    StepWalk<BackwardContext<Config>, Config::listed> walk(c);
    const unsigned next = tile + gridDim.x;
    const int steps = c.steps_before + c.steps();
    const int first = min(steps, c.steps_before + stages);
    const auto load_steps = [&](int end) {
#pragma unroll 1
      for (; step < end; ++step) {
        if (step >= stages) await_step<Config>(step % stages);
        if (loads) {
          loader.load_q(walk.place, walk.note, step);
          loader.load_dout(walk.place, step);
        }
        __syncwarp();
        walk.advance();
      }
    };
    load_steps(first);
    if (loads && next < kv_tiles_of_all<Config>(params)) {
      load_keys(context_of<Config>(params, shared, {params, next}, {0, c.tiles_before + 1}));
    }
    __syncwarp();
    load_steps(steps);
  });
  for (int i = max(0, step - stages); i < step; ++i) await_step<Config>(i % stages);
}

}  // namespace cuflash::fa3
