// FlashAttention-3, forward pass: Shah et al., "FlashAttention-3: Fast and Accurate Attention with
// Asynchrony and Low-precision" (2024), Algorithms 1 and 2, for Hopper.
//
// Blocks stay on their multiprocessor and draw tiles. In a block one thread loads, and warpgroups
// of 64 query rows each do the arithmetic:
//
//   load   Q of a tile, K and V of its blocks of keys, last block first -> rings in shared memory
//   math   scores, softmax, output. The scores of a block are issued together with weights times V
//          of the block before. One warpgroup's softmax runs beside another's products
//
// The barriers, and which role waits there for which (see tile/pipeline.cuh):
//   q_full[stage][w]    warpgroup w for load
//   q_empty[stage][w]   load for the four warps of warpgroup w
//   k_full, v_full      all warps of math for load
//   k_empty, v_empty    load for every warp of math
//   operand_full        all warps of math for load, where a term of the scores reads an array
//   operand_empty       load for every warp of math
//   tail.raw            a warp beside load for a block of V with a tail, see forward_tail.cuh
//   tail.cleared        load for that warp
//   stored.full         the warps beside load for load, where K and V are stored in bytes: these
//                       warps then arrive at k_full and v_full, see forward_stored.cuh
//   stored.empty        load for the warps beside load
//   queue               all warps of math for the next tile from load, and load for them
//   barrier 1 + w       warpgroup w for warpgroup w - 1: its turn to issue products
#include "../ptx/register_budget.cuh"
#include "forward_listed.cuh"
#include "forward_load.cuh"

namespace cuflash::fa3 {

// Between two tiles a warpgroup has no product under way; the products of the other warpgroups fill
// the gap (bench/NOTES.md says what was tried instead).
template <class Config>
__device__ inline void math_role(const ForwardContext<Config>& c, int warpgroup) {
  ForwardMath<Config> math(c, warpgroup);
  ForwardState<Config> state;
  PipelineState<2> queue_place;
  math.open_turns();
#pragma unroll 1
  while (true) {
    const auto queued = next_item<Config>(c.shared.queue, queue_place);
    if (!is_item(queued.item)) break;
    const auto& slot = c.shared.queue.item[queue_place.stage];
    if constexpr (Config::listed) {
      listed_tile(math, c.tile(queued), slot, state);
    } else {
      math.one_tile(c.tile(queued), slot, state);
    }
    if constexpr (Config::Lengths::vary) release_item<Config>(c.shared.queue, queue_place);
  }
}

template <class Config>
__device__ inline void forward(const typename Config::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ForwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  static_assert(
      Config::load_registers + ForwardTypes<Config>::warpgroups * Config::math_registers <=
          65536 / kWarpgroup / Config::blocks_per_sm,
      "the warpgroups take more registers than the block has");
  const ForwardContext<Config> context{params, shared};
  // Every lane has the same role. The shuffle makes it a uniform value for the compiler, which then
  // keeps descriptors in uniform registers.
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    ptx::tensor_map_prefetch(&params.q_map);
    ptx::tensor_map_prefetch(&params.k_map);
    ptx::tensor_map_prefetch(&params.v_map);
    init_barriers<Config>(shared);
  }
  __syncthreads();
  if (role == 0) {
    ptx::give_registers<Config::load_registers>();
    if (threadIdx.x == 0) {
      if constexpr (Config::listed) {
        load_listed_role(context);
      } else {
        load_role(context);
      }
    }
    if constexpr (Config::Stored::converts) {
      if (threadIdx.x / 32 > 0) convert_role(context);
    } else if constexpr (Config::Lengths::vary) {
      if (threadIdx.x / 32 == 1) tail_role(context);
    }
  } else {
    ptx::take_registers<Config::math_registers>();
    math_role(context, role - 1);
  }
}

}  // namespace cuflash::fa3
