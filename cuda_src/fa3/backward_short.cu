// FlashAttention-3 backward for short heads: up to q_tiles tiles of 64 queries. A block computes
// whole heads, one after the other. It keeps Q, dO and dQ of all queries of a head and goes through
// kv tiles, as in backward_few.cu, and each kv tile goes through the q tiles, as in backward.cu. So
// dQ, dK and dV all stay in registers until they are finished, and the block stores them itself,
// rounded: no sums in device memory, and no kernel that converts them.
//
//   load   Q and dO of each q tile with lse and delta once; K and V of a kv tile -> rings; those of
//          the next head as soon as there is room
//   math   of every kv tile and q tile: S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse),
//          dS = P (dP - delta) -> shared memory, dV += P^T dO, dK += dS^T Q;
//          of every kv tile and pair of q tiles: dQ += dS K (of all keys of the kv tile); each
//          warpgroup has one q tile of the pair
//
// S of a q tile is issued before dV and dK of the previous q tile. dQ of a pair comes a q tile
// late, or after dK and dV are stored, because the other warpgroup has written its dS by then.
//
// Who waits for whom (see tile/pipeline.cuh):
//   q_full, dout_full   all warps of math for load, once in a head for each q tile; lse and delta
//                       arrive with them
//   q_empty             load for all warps of math: they have read Q and dO of the head's q tile
//   k_full, v_full      all warps of math for load
//   kv_empty            load for all warps of math: they have read K and V of the kv tile
//   ds_full             all warps of math for each other: dS of the pair is written
//   ds_empty            all warps of math for each other: dQ has read dS
//   barrier 1 + w       the warps of warpgroup w for each other: dead queries are cleared
#include "../ptx/register_budget.cuh"
#include "backward_short_load.cuh"
#include "backward_short_math.cuh"

namespace cuflash::fa3 {

template <class Config>
__device__ inline void backward_short(const typename Config::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ShortStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ShortStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  static_assert(Config::score_stages == ShortTypes<Config>::pairs, "each pair has a stage of dS");
  static_assert(!Config::Lengths::vary && Config::Score::is_empty && !Config::Weights::drops &&
                    !Mask<Config>::has_first,
                "no features");
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    ptx::tensor_map_prefetch(&params.q_map);
    ptx::tensor_map_prefetch(&params.k_map);
    ptx::tensor_map_prefetch(&params.v_map);
    ptx::tensor_map_prefetch(&params.dout_map);
    init_short_barriers<Config>(shared);
  }
  __syncthreads();
  if (role == 0) {
    ptx::give_registers<Config::load_registers>();
    if (threadIdx.x >= 32) return;
    for_each_head<Config>(params, shared, [](const ShortContext<Config>& c) {
      if (threadIdx.x == 0) load_head(c);
      __syncwarp();
    });
  } else {
    ptx::take_registers<Config::math_registers>();
    for_each_head<Config>(params, shared,
                          [&](const ShortContext<Config>& c) { multiply_head(c, role - 1); });
  }
}

}  // namespace cuflash::fa3
