// FlashAttention-2 forward for few queries: loads of Q, and of the keys and values of a warp's
// steps.
#pragma once

#include "forward_few_products.cuh"

namespace cuflash::fa2 {

// All threads load Q into the registers' order of its products.
template <class Config>
__device__ inline void load_few_q(const FewContext<Config>& c) {
  using Storage = typename Config::Storage;
  using Types = FewTypes<Config>;
  const int begin = c.first_query();
  const auto* const q = q_row<const Storage>(c.params.q, c.seq, c.item.head, begin);
  for (int i = threadIdx.x; i < Types::steps * 32 * 4; i += 32 * Config::warps) {
    const int part = i % 4, lane = i / 4 % 32, step = i / 128;
    const int row = lane / 4 + part % 2 * 8;
    const int column = FewProducts<Config>::depth(step, lane % 4, part / 2);
    const bool valid = begin + row < c.seq.seqlen_q && column < c.params.shape.head_dim;
    c.shared.q.data[i] =
        valid ? *reinterpret_cast<const unsigned*>(q + row * c.params.q.row_stride + column) : 0;
  }
}

// Where a lane's key of a tile lies: its page or entry, and its row there.
struct KeyPlace {
  int page;
  int row;
};

// A warp's loads. A tile's places are found one tile ahead, since the table of pages is in device
// memory.
template <class Config>
struct FewLoads {
  using Types = FewTypes<Config>;
  using Cell = typename Types::Cell;
  const FewContext<Config>& c;
  KeyPlace now = {};
  KeyPlace next = {};

  // Finds the places of a tile's keys; `now` becomes the tile found before.
  __device__ void find(int tile) {
    if constexpr (Config::Keys::paged) {
      now = next;
      if (tile >= c.range.end) return;
      const int key = tile * Config::block_kv + static_cast<int>(threadIdx.x) % Config::block_kv;
      const auto place =
          Config::Keys::place(c.params.cached_keys, c.seq, min(key, max(0, c.seq.seqlen_kv - 1)));
      next = {place.page, place.row};
    }
  }
  __device__ void keys(FewStage<Config>& stage, int tile) const {
    copy(typename Types::KTile{stage.k.data}, c.params.k, c.params.shape.head_dim, tile);
  }
  __device__ void values(FewStage<Config>& stage, int tile) const {
    copy(typename Types::VTile{stage.v.data}, c.params.v, c.params.shape.head_dim_v, tile);
  }

 private:
  // Copies a tile as one group; an empty group if there is no such tile. Rows and columns that do
  // not count become zeros.
  template <class Tile>
  __device__ void copy(const Tile& tile, const Tensor& tensor, int columns, int number) const {
    static_assert(Tile::rows * Tile::chunks % 32 == 0, "every lane copies as many chunks");
    if (number < c.range.end) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int key0 = number * Config::block_kv;
      const Cell* next = row_of(tensor, key0 + lane / Tile::chunks, lane / Tile::chunks);
#pragma unroll
      for (int i = 0; i < Tile::rows * Tile::chunks; i += 32) {
        const int row = (i + lane) / Tile::chunks, chunk = (i + lane) % Tile::chunks;
        if (i > 0) next = after<Tile::chunks>(next, tensor, key0 + row, row);
        const Cell* const from = next + chunk * Tile::chunk;
        const bool valid = key0 + row < c.seq.seqlen_kv && chunk * Tile::chunk < columns;
        copy_chunk<Config::copies>(tile.chunk_at(row, chunk),
                                   valid ? from : static_cast<const Cell*>(tensor.data), valid);
      }
    }
    commit_copies<Config::copies>();
  }
  // The address of a row, from that of the row 32 chunks before it if keys lie one after the other.
  template <int chunks>
  __device__ const Cell* after(const Cell* before, const Tensor& tensor, int key, int row) const {
    if constexpr (Config::Keys::paged || 32 % chunks != 0) return row_of(tensor, key, row);
    return ptx::opaque(before + 32 / chunks * tensor.row_stride);
  }
  __device__ const Cell* row_of(const Tensor& tensor, int key, int row) const {
    if constexpr (Config::Keys::paged) {
      const int page = __shfl_sync(0xffffffffu, now.page, row);
      return tensor_row<const Cell>(tensor, page, c.kv_head,
                                    __shfl_sync(0xffffffffu, now.row, row));
    } else {
      return kv_row<const Cell>(tensor, c.seq, c.kv_head, key);
    }
  }
};

}  // namespace cuflash::fa2
