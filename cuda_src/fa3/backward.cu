// FlashAttention-3, backward pass, for Hopper: Shah et al., "FlashAttention-3: Fast and Accurate
// Attention with Asynchrony and Low-precision" (2024), section 3.3 and Algorithm 3; the gradients
// are those of Dao et al. 2022, Algorithm 4.
//
// A block has one kv tile and goes through the q tiles that see it. One thread loads, and two
// warpgroups of 64 keys each do the arithmetic:
//
//   load   K and V once; Q and dO of a step with lse and delta of their rows -> rings
//   math   S^T = K Q^T, dP^T = V dO^T, P = exp(S - lse), dS = P (dP - delta), then together
//          dQ of the step before (of all keys, through dS in shared memory), dV += P^T dO,
//          dK += dS^T Q. dQ leaves the registers for device memory while dV and dK are computed.
//
// Because dQ comes a step late, the warpgroups can run apart: the other one has written its dS long
// before it is needed, and one warpgroup's exponentials run beside the other's products. A
// warpgroup is never more than a step ahead: dS has two buffers, and both warpgroups must read one
// before it is written again.
//
// Wide heads have their own math roles: see backward_wide.cuh, backward_across.cuh and, where only
// K is wide, backward_serial.cuh. Most blocks clear sums of dQ for a later block, see
// backward_clear.cuh. Where Config::kv_tiles_per_convert_block is not 0, blocks of rows run between
// the blocks of tiles and round the sums, see backward_rows.cuh; otherwise a kernel does so
// afterwards. Where Config::parted, several blocks share a tile, and their dK and dV are summed,
// see backward_parts.cuh. Where Config::stays, a block goes through several kv tiles, see
// backward_stay.cuh. Where Config::half_last, the second half of the last q tile of a head lies
// beyond the length, and the step of that tile leaves it out; dQ of the step still multiplies what
// dS held before, but does not add it.
//
// Who waits for whom (see tile/pipeline.cuh):
//   k_tail.raw              load's warp for K of a block with a tail, see backward_load.cuh
//   k_full, v_full          all warps of math for load, once; in wide heads only the key role waits
//                           for V
//   q_full, dout_full       all warps of math for load; lse and delta arrive with them
//   operand_full            all warps of math for load, where a term of the scores reads an array
//   operand_empty           load for all warps of math
//   ds_full                 every warp of math for all that make dS: dS of a step is written
//   ds_empty                every warp of math for all of them: their dQ has read dS
//   barrier 1 + w           the warps of warpgroup w for each other, where queries are dead; where
//                           score tiles are serial, also before dK reads their dS
//   barrier 3 + s           load for all warps of math: they have read Q and dO of stage s
//   barrier 5 + s, 7 + s    in wide heads: the key role for P of a step, the value role for the
//                           buffer of P
//   barrier 9 + w           warpgroup w for the other one's P, where score tiles are serial
//   cleared                 all warps of math for a thread beside load: sums of dQ are zeros, see
//                           backward_clear.cuh
//   added                   one thread beside math for all warps of math: their last dQ is under
//                           way (in ordered sums: dQ of a step, see backward_turns.cuh)
#include "../ptx/register_budget.cuh"
#include "backward_across.cuh"
#include "backward_clear.cuh"
#include "backward_load.cuh"
#include "backward_rows.cuh"
#include "backward_serial.cuh"
#include "backward_stay.cuh"
#include "backward_turns.cuh"
#include "backward_wide.cuh"

namespace cuflash::fa3 {

// The work of a block without steps: no query sees its keys, or it has no part of a cut tile.
template <class Config>
__device__ inline void unseen_keys(const BackwardContext<Config>& c, unsigned tile) {
  constexpr int threads = BackwardTypes<Config>::threads;
  bool whole = !Config::parted;
  if constexpr (Config::cut_last) whole = c.has_whole_tile();
  if constexpr (Config::parted) {
    if (!whole) {
      const long long row = part_row(c);
      clear_part<Config::head_dim, Config::block_kv, threads>(
          static_cast<float*>(c.params.dk_parts), row);
      clear_part<Config::head_dim_v, Config::block_kv, threads>(
          static_cast<float*>(c.params.dv_parts), row);
    }
  }
  if constexpr (!Config::parted || Config::cut_last) {
    if (whole) {
      store_zeros(c, c.params.dk, c.params.shape.head_dim, 0, threads);
      store_zeros(c, c.params.dv, c.params.shape.head_dim_v, 0, threads);
    }
  }
  if (threadIdx.x >= 32) return;
  clear_role(c, tile);
  if (Config::kv_tiles_per_convert_block > 0 && threadIdx.x == 0) {
    await_cleared(c, tile);  // otherwise rows could be finished before their sums are cleared
    pass_sums(c);
  }
}

// The three warps beside load's. The first waits for cleared sums; it then tells math, and reports
// sums that are finished. In ordered sums the first two keep the order instead of telling math. The
// last one clears.
template <class Config>
__device__ inline void roles_beside_load(const BackwardContext<Config>& c, unsigned tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool first = threadIdx.x % 32 == 0;
  if (warp == 1 && first) {
    await_cleared(c, tile);
    if constexpr (Config::ordered) {
      watch_role(c);
    } else {
      arrive<Config>(c.shared.cleared);
      sums_role(c);
    }
  }
  if constexpr (Config::ordered) {
    if (warp == 2 && first) pass_role(c);
  }
  if (warp == 3) clear_role(c, tile);
}

// A warpgroup takes its 64 keys of a kv tile through all steps.
template <class Config>
__device__ inline void math_role(const BackwardContext<Config>& c, int warpgroup) {
  using Types = BackwardTypes<Config>;
  const BackwardMath<Config> math(c, warpgroup);
  typename Types::KGradient dk;
  typename Types::VGradient dv;
  dk.fill(0);
  dv.fill(0);
  StepState state(c.first(), Config::stays);
  const int steps = c.steps_before + c.steps();
  if constexpr (Config::stays) {
    await_keys(c);
  } else {
    wait<Config>(c.shared.k_full, 0);
    wait<Config>(c.shared.v_full, 0);
  }
  // With only a causal mask, or with 128 queries a step, skipping hidden steps slows the other
  // steps down by more than it saves.
  constexpr bool skips_hidden =
      Mask<Config>::has_first && !Types::q_parted_by_rows && !Config::listed;
  int step = c.steps_before;
  draw_ahead<Config>(c.params, state, math.score_place(state));
#pragma unroll 1
  do {
    if (skips_hidden && math.is_hidden(state.place)) {
      math.hidden_step(state, step);
    } else if (Config::half_last && math.is_last(state.place)) {
      if constexpr (Config::half_last) math.template step<Config::block_q / 2>(state, dk, dv, step);
    } else {
      math.step(state, dk, dv, step);
    }
  } while (is_step<Config>(++step, steps));
  typename Types::QGradient dq;
  math.issue_q(dq, steps - 1, true);
  ptx::wgmma_wait<0>();
  ptx::wgmma_hold(dq.value[0]);
  if constexpr (Config::stays) pass_keys(c, steps - 1);
  math.add_q(place_before(c, state, steps), state.dead_before, dq, steps - 1);
  math.end_sums();
  math.store_v(dv, 1.0f / static_cast<float>(1 << BackwardMath<Config>::exponent));
  math.store_k(dk);
}

// One thread prefetches the tensor maps and initialises the barriers before any role begins.
template <class Config>
__device__ __forceinline__ void begin_block(const typename Config::Params& params,
                                            BackwardStorage<Config>& shared) {
  ptx::tensor_map_prefetch(&params.q_map);
  ptx::tensor_map_prefetch(&params.k_map);
  ptx::tensor_map_prefetch(&params.v_map);
  ptx::tensor_map_prefetch(&params.dout_map);
  init_barriers<Config>(shared);
}

// The kernel where blocks stay: every role goes through the tiles of its block.
template <class Config>
__device__ inline void stay(const typename Config::Params& params,
                            BackwardStorage<Config>& shared) {
  static_assert(!Config::Lengths::vary && !Config::ordered && !Config::parted && !Config::listed &&
                    Config::operand_stages == 0 && Config::kv_tiles_per_convert_block == 0 &&
                    !BackwardTypes<Config>::keys_shared && !BackwardTypes<Config>::serial,
                "blocks that stay do not support these options");
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    begin_block<Config>(params, shared);
  }
  __syncthreads();
  if (role == 0) {
    ptx::give_registers<Config::load_registers>();
    if (threadIdx.x < 32) staying_load_role<Config>(params, shared);
  } else {
    ptx::take_registers<Config::math_registers>();
    for_each_tile<Config>(params, shared, [&](const BackwardContext<Config>& c, unsigned) {
      if (c.steps() > 0) {
        math_role(c, role - 1);
      } else {
        staying_zeros(c);
      }
    });
  }
}

template <class Config>
__device__ inline void backward(const typename Config::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(BackwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  static_assert(
      Config::load_registers + BackwardTypes<Config>::warpgroups * Config::math_registers <=
          65536 / BackwardTypes<Config>::threads / 8 * 8 * (BackwardTypes<Config>::warpgroups + 1),
      "the warpgroups take more registers than the block has");
  if constexpr (Config::stays) {
    stay<Config>(params, shared);
    return;
  }
  unsigned block = blockIdx.x;
  if constexpr (Config::kv_tiles_per_convert_block > 0) {
    static_assert(sizeof(RowStorage<Config>) <= Config::shared_bytes, "there is room");
    const BlockPlace<Config> place(params);
    if (!place.has_tile) {
      row_block(params, place, reinterpret_cast<RowStorage<Config>&>(shared_bytes));
      return;
    }
    block = place.tile;
  }
  if constexpr (Config::Lengths::packed) {
    static_assert(Config::kv_tiles_per_convert_block == 0 && !Config::parted,
                  "no blocks that convert, no parts");
  }
  const PlacedTile<Config> placed(params, block);
  const unsigned tile = placed.tile;
  const auto c = context_of<Config>(params, shared, placed);
  if constexpr (Config::Lengths::packed) {
    if (is_behind_the_list(c.item)) {
      if (threadIdx.x < 32) clear_role(c, tile);
      return;
    }
  }
  clear_pair_sums<Config>(params, c.item.entry, c.item.head * c.group, c.group, c.item.kv_begin);
  if (c.steps() == 0) {
    unseen_keys(c, tile);
    return;
  }
  // Every lane has the same role; the shuffle tells the compiler, which then keeps descriptors in
  // uniform registers.
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    begin_block<Config>(params, shared);
    load_first(c);
  }
  __syncthreads();
  if (role == 0) {
    ptx::give_registers<Config::load_registers>();
    if (threadIdx.x < 32) {
      load_role(c);
    } else {
      roles_beside_load(c, tile);
    }
  } else {
    ptx::take_registers<Config::math_registers>();
    if constexpr (BackwardTypes<Config>::serial) {
      serial_role(c, role - 1);
    } else if constexpr (!BackwardTypes<Config>::keys_shared) {
      math_role(c, role - 1);
    } else if constexpr (BackwardTypes<Config>::across) {
      role == 1 ? across_value_role(c) : across_key_role(c);
    } else if (role == 1) {
      value_role(c);
    } else {
      key_role(c);
    }
  }
}

}  // namespace cuflash::fa3
