// A boolean mask as bits in the workspace, one for each pair; steps/summarise_mask.cu writes them.
#pragma once

#include "../tile/numeric.cuh"
#include "pairs.cuh"

namespace cuflash {

struct PackedMaskParams {
  const void* tile_bits;  // see tile/tile_bits.cuh; [entry, head, row of tiles, words]
  const void* pair_bits;  // see tile/pair_bits.cuh; [entry, head, 16 lines, tile, lane]
  int entries;            // neighbouring batch entries that share one entry of the mask
  int own_entries;        // entries of the mask
  int own_heads;
};

template <class Storage>
struct PackedMaskTerm : AddedTerm {
  static constexpr bool hides = true;
  using Compute = decltype(to_compute(Storage()));
  const ShownPairs shown;
  const bool transposed;  // lines are keys

  template <class Params>
  __device__ PackedMaskTerm(const Params&, const Lane& lane, double)
      : shown(lane.shown), transposed(lane.staged.transposed) {}

  template <class Params>
  __device__ static HiddenPairs hidden(const Params& params, int batch, int head) {
    const PackedMaskParams& mask = params.mask;
    const int entry = own_entry(mask, batch);
    return {static_cast<const TileBits*>(mask.tile_bits),
            static_cast<const PairBits*>(mask.pair_bits),
            entry * mask.own_heads + (mask.own_heads == 1 ? 0 : head)};
  }

  __device__ Compute operator()(Compute score, int di, int dj) const {
    return shown.at(transposed ? dj : di, transposed ? di : dj) ? score : -infinity<Compute>();
  }
};

}  // namespace cuflash
