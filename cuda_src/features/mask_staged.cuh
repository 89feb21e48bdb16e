// Boolean mask whose tiles the copy engine brings to shared memory.
#pragma once

#include "../tile/numeric.cuh"
#include "pairs.cuh"
#include "staged.cuh"

namespace cuflash {

struct StagedMaskParams {
  TensorMap mask_map;  // [batch, head, query, key], axes that it broadcasts of one element
  int entries;         // neighbouring ones of the batch that share one of the mask
  int own_entries;     // of the mask
  int own_heads;
  const void* tile_bits;  // see MaskParams
};

// What a lane reads of a panel: elements (row + di, column + dj), as PairReader has them. Where
// rows of the panel are queries a lane reads two neighbouring keys at once.
template <bool of_rows>
struct ByteReader {
  const unsigned char* data;
  unsigned first;  // of the lane
  bool transposed;

  __device__ ByteReader(const StagedLane& lane)
      : data(static_cast<const unsigned char*>(lane.panels)), transposed(lane.transposed) {
    const int row = of_rows ? lane.row : 0;
    first = row * 128 + (lane.column ^ row % 8 * 16);
  }
  __device__ bool at(int di, int dj) const {
    if (transposed) return data[(first ^ di % 2 * 16 ^ dj) + di * 128] != 0;
    const unsigned place = (first ^ dj / 8 * 8) + di * 128;
    const unsigned both = *reinterpret_cast<const unsigned short*>(data + place);
    return (both & (dj % 2 == 0 ? 0xffu : 0xff00u)) != 0;
  }
};

// `of_rows`: whether it differs from query to query; if not, one row of a tile has it.
template <class Storage, bool of_rows>
struct StagedMaskTerm : AddedTerm {
  static constexpr bool staged = true;
  static constexpr bool hides = true;
  using Compute = decltype(to_compute(Storage()));
  ByteReader<of_rows> reader;

  template <class Params>
  __device__ StagedMaskTerm(const Params&, const Lane& lane, double) : reader(lane.staged) {}

  template <class Params>
  __device__ static StagedPlace staged_place(const Params& params, int batch, int head) {
    return staged_place_of(params.mask, params.mask.mask_map, batch, head);
  }

  template <class Params>
  __device__ static const TileBits* tile_bits(const Params& params, int batch, int head, int row,
                                              int rows, int words) {
    return tile_bits_of(params.mask, batch, head, row, rows, words);
  }

  __device__ Compute operator()(Compute score, int di, int dj) const {
    return reader.at(of_rows ? di : 0, dj) ? score : -infinity<Compute>();
  }
};

}  // namespace cuflash
