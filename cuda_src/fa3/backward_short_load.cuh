// FlashAttention-3 backward for short heads: the load role.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "backward_short_types.cuh"

namespace cuflash::fa3 {

// One thread loads Q or dO of a q tile, with a number for each of its rows.
template <class Config, class Matrix>
__device__ inline void load_queries(const ShortContext<Config>& c, Matrix& matrix,
                                    const TensorMap* map, QueryNumbers<Config>& numbers,
                                    const void* all_numbers, Barrier& full, int q_tile) {
  constexpr unsigned bytes = sizeof(numbers.value);
  const unsigned barrier = ptx::shared_address(&full);
  const int row = q_tile * Config::block_q;
  arrive_expecting<Config>(full, Matrix::bytes + bytes);
  load_panels(matrix, map, barrier, row, c.head, c.seq.batch, ptx::kEvictFirst);
  ptx::bulk_load(ptx::shared_address(numbers.value),
                 static_cast<const float*>(all_numbers) + c.head_row() + row, bytes, barrier);
}

// One thread loads K or V of a kv tile.
template <class Config, class Matrix>
__device__ inline void load_keys(const ShortContext<Config>& c, Matrix& matrix,
                                 const TensorMap* map, Barrier& full, int tile) {
  arrive_expecting<Config>(full, Matrix::bytes);
  load_panels(matrix, map, ptx::shared_address(&full), tile * Config::block_kv, c.head, c.seq.batch,
              ptx::kEvictFirst);
}

// One thread loads what the first step needs, then the other q tiles, then the other kv tiles. It
// loads a q tile once all warps have read the tile of the previous head.
template <class Config>
__device__ inline void load_head(const ShortContext<Config>& c) {
  auto& shared = c.shared;
  const auto load_q = [&](int i) {
    wait_empty<Config>(shared.q_empty[i], c.phase());
    load_queries(c, shared.q[i], &c.params.q_map, shared.lse[i], c.params.row_lse, shared.q_full[i],
                 i);
  };
  const auto load_dout = [&](int i) {
    load_queries(c, shared.dout[i], &c.params.dout_map, shared.delta[i], c.params.delta,
                 shared.dout_full[i], i);
  };
#pragma unroll 1
  for (int tile = 0; tile < c.seen_tiles(); ++tile) {
    const RingPlace<Config::kv_stages> place(c.step_of(tile));
    wait_empty<Config>(shared.kv_empty[place.stage], place.phase);
    load_keys(c, shared.k[place.stage], &c.params.k_map, shared.k_full[place.stage], tile);
    if (tile == 0) load_q(0);
    load_keys(c, shared.v[place.stage], &c.params.v_map, shared.v_full[place.stage], tile);
    if (tile == 0) load_dout(0);
#pragma unroll 1
    for (int i = 1; tile == 0 && i < c.q_tiles(); ++i) {
      load_q(i);
      load_dout(i);
    }
  }
}

}  // namespace cuflash::fa3
