// FlashAttention-2 forward for few queries: loads of Q, and of the keys and values of a warp's
// steps.
#pragma once

#include "forward_few_products.cuh"

namespace cuflash::fa2 {

// Word i of a block's Q: register i % 4 of lane i / 4 % 32, in a step of a fragment.
template <class Config>
__device__ inline unsigned word_of_q(const FewContext<Config>& c, int i) {
  using Storage = typename Config::Storage;
  using Types = FewTypes<Config>;
  const int part = i % 4, lane = i / 4 % 32, step = i / 128 % Types::steps;
  const int row = i / (128 * Types::steps) * 16 + lane / 4 + part % 2 * 8;
  const int column = FewProducts<Config>::depth(step, lane % 4, part / 2);
  const int query = c.rows.query(row);
  const bool there = !Config::packs_heads || row < c.rows.count;
  if (!there || query >= c.seq.seqlen_q || column >= c.params.shape.head_dim) return 0;
  const auto* const q = q_row<const Storage>(c.params.q, c.seq, c.rows.head(row), query);
  return *reinterpret_cast<const unsigned*>(q + column);
}

// All threads load Q in the order in which its products read it. The loads of a thread are on their
// way together.
template <class Config>
__device__ inline void load_few_q(const FewContext<Config>& c) {
  using Types = FewTypes<Config>;
  constexpr int threads = 32 * Config::warps;
  constexpr int count = Types::fragments * Types::steps * 128 / threads;  // of a thread
  static_assert(count * threads == Types::fragments * Types::steps * 128, "as many in each");
  unsigned words[count];
#pragma unroll
  for (int n = 0; n < count; ++n) {
    words[n] = word_of_q(c, n * threads + static_cast<int>(threadIdx.x));
  }
#pragma unroll
  for (int n = 0; n < count; ++n) c.shared.q.data[n * threads + threadIdx.x] = words[n];
}

// Where the keys of a warp's next tile lie. Without pages one row follows the other.
template <class Config, bool = Config::Keys::paged>
struct KeyPlaces {
  __device__ void find(const FewContext<Config>&, int) {}
};
// With pages every lane knows one row of the tile. It reads the number of a row's page a tile
// before it uses it, so that no instruction waits for the table.
template <class Config>
struct KeyPlaces<Config, true> {
  using Keys = typename Config::Keys;
  typename Keys::Place now = {};
  typename Keys::Place next = {};

  // Looks up the rows of a tile, which become `next`; `now` gets those of the tile before it.
  __device__ void find(const FewContext<Config>& c, int tile) {
    static_assert(32 % Config::block_kv == 0, "a lane for every row");
    now = {Keys::existing(c.params.cached_keys, next.page), next.row};
    if (tile >= c.range.end) return;
    const int row = static_cast<int>(threadIdx.x) % Config::block_kv;
    next = Keys::look_up(c.params.cached_keys, c.seq, tile * Config::block_kv + row);
  }
};

// The rows of one tile in a tensor.
template <class Config, class Cell, bool = Config::Keys::paged>
struct TileRows {
  const Cell* first;
  long long stride;
  __device__ TileRows(const FewContext<Config>& c, const KeyPlaces<Config>&, const Tensor& tensor,
                      int key0)
      : first(kv_row<const Cell>(tensor, c.seq, c.kv_head, key0)), stride(tensor.row_stride) {}
  __device__ const Cell* at(int row) const { return first + row * stride; }
  // The row that lies `further` rows after another one.
  __device__ const Cell* after(const Cell* row, int further, int) const {
    return ptx::opaque(row + further * stride);
  }
};
template <class Config, class Cell>
struct TileRows<Config, Cell, true> {
  const Cell* own;
  __device__ TileRows(const FewContext<Config>& c, const KeyPlaces<Config>& places,
                      const Tensor& tensor, int)
      : own(tensor_row<const Cell>(tensor, places.now.page, c.kv_head, places.now.row)) {}
  __device__ const Cell* at(int row) const {
    const auto address = reinterpret_cast<unsigned long long>(own);
    return reinterpret_cast<const Cell*>(__shfl_sync(0xffffffffu, address, row));
  }
  __device__ const Cell* after(const Cell*, int, int row) const { return at(row); }
};

// A warp's loads: K and V of its tiles by turns, one slot of the ring after the other.
template <class Config>
struct FewLoads {
  using Types = FewTypes<Config>;
  using Cell = typename Types::Cell;
  const FewContext<Config>& c;
  FewRing<Config>& ring;
  int tile;      // the next one
  int slot = 0;  // of the next matrix
  KeyPlaces<Config> places = {};

  __device__ FewLoads(const FewContext<Config>& c, FewRing<Config>& ring, int first)
      : c(c), ring(ring), tile(first) {
    places.find(c, first);
  }
  __device__ void keys() {
    places.find(c, tile + Config::warps);
    copy(typename Types::KTile{ring.slots[slot].data}, c.params.k, c.params.shape.head_dim);
  }
  // The tile's values; the next tile follows.
  __device__ void values() {
    copy(typename Types::VTile{ring.slots[slot].data}, c.params.v, c.params.shape.head_dim_v);
    tile += Config::warps;
  }

 private:
  // Copies the tile's rows as one group; after the last tile the group is empty. Rows beyond the
  // keys and columns beyond the head become zeros.
  template <class Tile>
  __device__ void copy(const Tile& to, const Tensor& tensor, int columns) {
    static_assert(Tile::rows * Tile::chunks % 32 == 0, "every lane copies as many chunks");
    if (tile < c.range.end) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int key0 = tile * Config::block_kv;
      const TileRows<Config, Cell> rows(c, places, tensor, key0);
      const Cell* next = nullptr;
#pragma unroll
      for (int i = 0; i < Tile::rows * Tile::chunks; i += 32) {
        const int row = (i + lane) / Tile::chunks, chunk = (i + lane) % Tile::chunks;
        const bool steady = i > 0 && 32 % Tile::chunks == 0;  // the same advance in all lanes
        next = steady ? rows.after(next, 32 / Tile::chunks, row) : rows.at(row);
        const Cell* const from = next + chunk * Tile::chunk;
        const bool valid = key0 + row < c.seq.seqlen_kv && chunk * Tile::chunk < columns;
        copy_chunk<Config::copies>(to.chunk_at(row, chunk),
                                   valid ? from : static_cast<const Cell*>(tensor.data), valid);
      }
    }
    commit_copies<Config::copies>();
    slot = slot + 1 == Config::num_slots ? 0 : slot + 1;
  }
};

}  // namespace cuflash::fa2
