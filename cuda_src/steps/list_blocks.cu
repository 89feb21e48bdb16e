// Turns a block mask into bits of tiles, see tile/tile_bits.cuh: whether any block that a tile
// overlaps is shown, and whether all are. Blocks beyond the lengths do not count.
//
// A thread makes the bits of eight neighbouring tiles of a row of tiles. A row belongs to a q tile
// and runs over the kv tiles; with Config::rows_of_keys it belongs to a kv tile and runs over the q
// tiles.
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/tile_bits.cuh"

namespace cuflash::steps {

constexpr int kTilesOfThread = 8;

// The blocks [begin, end) that a tile of `rows` rows overlaps among `length` rows.
template <int rows, int block>
__device__ inline KvRange blocks_of_tile(int tile, int length) {
  const int last = min((tile + 1) * rows, length) - 1;
  return {tile * rows / block, last / block + 1};
}

template <class Config>
__device__ inline void list_blocks(const typename Config::Params& params) {
  constexpr bool by_keys = Config::rows_of_keys != 0;
  const Shape& shape = params.shape;
  const int q_tiles = ceil_div(shape.seqlen_q, Config::block_q);
  const int kv_tiles = ceil_div(shape.seqlen_kv, Config::block_kv);
  const int along = by_keys ? q_tiles : kv_tiles, rows = by_keys ? kv_tiles : q_tiles;
  const int words = ceil_div(along, 32);
  const long long index =
      static_cast<long long>(blockIdx.x) * (32 * Config::warps) + static_cast<int>(threadIdx.x);
  const long long place = index / 4;  // index of the word
  if (place >= params.block_words) return;
  const int part = static_cast<int>(index % 4);
  const int first = static_cast<int>(place % words) * 32 + part * kTilesOfThread;
  const int row = static_cast<int>(place / words % rows);
  const long long of_array = place / words / rows;
  const PairArray& blocks = params.block_mask;
  const auto* data = static_cast<const unsigned char*>(blocks.data) +
                     of_array / params.block_heads * blocks.batch_stride +
                     of_array % params.block_heads * blocks.head_stride;

  unsigned seen = 0, whole = 0;
  for (int i = 0; i < kTilesOfThread && first + i < along; ++i) {
    const int q_tile = by_keys ? first + i : row, kv_tile = by_keys ? row : first + i;
    const KvRange of_q =
        blocks_of_tile<Config::block_q, Config::block_queries>(q_tile, shape.seqlen_q);
    const KvRange of_kv =
        blocks_of_tile<Config::block_kv, Config::block_keys>(kv_tile, shape.seqlen_kv);
    bool any = false, every = true;
    for (int r = of_q.begin; r < of_q.end; ++r) {
      for (int c = of_kv.begin; c < of_kv.end; ++c) {
        const bool shown = data[r * blocks.row_stride + c * blocks.column_stride] != 0;
        any |= shown;
        every &= shown;
      }
    }
    seen |= static_cast<unsigned>(any) << i;
    whole |= static_cast<unsigned>(every) << i;
  }
  TileBits& bits = static_cast<TileBits*>(params.block_bits)[place];
  reinterpret_cast<unsigned char*>(&bits.seen)[part] = static_cast<unsigned char>(seen);
  reinterpret_cast<unsigned char*>(&bits.whole)[part] = static_cast<unsigned char>(whole);
}

}  // namespace cuflash::steps
