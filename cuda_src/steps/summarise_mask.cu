// Which tiles of a boolean mask have a pair that it shows, and which show all of theirs: bits for
// the kernels that pass over tiles, see tile/tile_bits.cuh.
//
// A block makes one word of a row of tiles: of 32 tiles, which its warps share out. A row is that
// of a q tile, over the kv tiles; with Config::rows_of_keys that of a kv tile, over the q tiles.
// Pairs beyond the lengths do not count.
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/tile_bits.cuh"

namespace cuflash::steps {

// What is known of the pairs of a tile.
struct Shown {
  bool some;
  bool every;

  __device__ void add(unsigned char byte) {
    some |= byte != 0;
    every &= byte != 0;
  }
  __device__ void add_word(unsigned bytes) {
    some |= bytes != 0;
    every &= ((bytes - 0x01010101u) & ~bytes & 0x80808080u) == 0;  // no byte is 0
  }
  __device__ void add(const uint4& bytes) {
    add_word(bytes.x);
    add_word(bytes.y);
    add_word(bytes.z);
    add_word(bytes.w);
  }
};

// A mask of an entry and a head.
struct MaskOfHead {
  const unsigned char* data;
  long long row_stride;
  long long column_stride;
  bool in_chunks;  // sixteen keys can be read at once

  // By a warp, all of whose lanes know it: of these queries and keys.
  template <int keys>
  __device__ Shown shown(int row0, int rows, int key0, int valid_keys) const {
    constexpr int chunk = 16, chunks = keys / chunk;
    static_assert(keys % chunk == 0, "whole chunks");
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Shown found{false, true};
    for (int first = 0; first < rows * chunks; first += 32) {
      const int row = (first + lane) / chunks, column = (first + lane) % chunks * chunk;
      const int left = min(chunk, valid_keys - column);
      if (row < rows && left > 0) {
        const unsigned char* from =
            data + (row0 + row) * row_stride + (key0 + column) * column_stride;
        if (in_chunks && left == chunk) {
          found.add(*reinterpret_cast<const uint4*>(from));
        } else {
          for (int i = 0; i < left; ++i) found.add(from[i * column_stride]);
        }
      }
      if (__any_sync(0xffffffffu, found.some) && __any_sync(0xffffffffu, !found.every)) break;
    }
    return {__any_sync(0xffffffffu, found.some) != 0, __all_sync(0xffffffffu, found.every) != 0};
  }
};

template <class Config>
__device__ inline void summarise_mask(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto* const of_warps = reinterpret_cast<TileBits*>(shared_bytes);
  static_assert(Config::warps * sizeof(TileBits) <= Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const Shape& shape = params.shape;
  const int q_tiles = Config::one_row ? 1 : ceil_div(shape.seqlen_q, Config::block_q);
  const int kv_tiles = ceil_div(shape.seqlen_kv, Config::block_kv);
  const int along = Config::rows_of_keys ? ceil_div(shape.seqlen_q, Config::block_q) : kv_tiles;
  const int rows = Config::rows_of_keys ? kv_tiles : q_tiles;
  const int words = ceil_div(along, 32);
  const int word = static_cast<int>(blockIdx.x) % words;
  const int row = static_cast<int>(blockIdx.x) / words % rows;
  const int of_array = static_cast<int>(blockIdx.x) / words / rows;
  const int heads = static_cast<int>(params.mask_heads);
  const PairArray& mask = params.mask;
  const auto* data = static_cast<const unsigned char*>(mask.data) +
                     of_array / heads * mask.batch_stride + of_array % heads * mask.head_stride;
  const bool in_chunks = mask.column_stride == 1 && mask.row_stride % 16 == 0 &&
                         reinterpret_cast<unsigned long long>(data) % 16 == 0;
  const MaskOfHead of_head{data, mask.row_stride, mask.column_stride, in_chunks};

  const int warp = static_cast<int>(threadIdx.x) / 32;
  TileBits bits{0, 0};
  for (int bit = warp; bit < 32; bit += Config::warps) {
    const int other = 32 * word + bit;
    if (other >= along) break;
    const int q_tile = Config::rows_of_keys ? other : row;
    const int key0 = (Config::rows_of_keys ? row : other) * Config::block_kv;
    const int row0 = Config::one_row ? 0 : q_tile * Config::block_q;
    const int queries = Config::one_row ? 1 : min(Config::block_q, shape.seqlen_q - row0);
    const Shown shown =
        of_head.template shown<Config::block_kv>(row0, queries, key0, shape.seqlen_kv - key0);
    bits.seen |= static_cast<unsigned>(shown.some) << bit;
    bits.whole |= static_cast<unsigned>(shown.every) << bit;
  }
  if (threadIdx.x % 32 == 0) of_warps[warp] = bits;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < Config::warps; ++other) {
    bits.seen |= of_warps[other].seen;
    bits.whole |= of_warps[other].whole;
  }
  static_cast<TileBits*>(params.tile_bits)[blockIdx.x] = bits;
}

}  // namespace cuflash::steps
