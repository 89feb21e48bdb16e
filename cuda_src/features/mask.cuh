// Boolean mask: hides the pairs where it is false.
#pragma once

#include "../tile/numeric.cuh"
#include "pairs.cuh"

namespace cuflash {

struct MaskParams {
  const void* mask;  // one byte an element, 0 is false
  // In elements; 0 along an axis that the mask broadcasts.
  long long mask_batch_stride;
  long long mask_head_stride;
  long long mask_row_stride;
  long long mask_column_stride;
  int entries;      // neighbouring batch entries that share one entry of the mask
  int own_entries;  // entries of the mask
};

// `of_rows`, `of_keys`: whether the mask differs from query to query, and from key to key.
template <class Storage, bool of_rows, bool of_keys>
struct MaskTerm : AddedTerm {
  using Compute = decltype(to_compute(Storage()));
  LanePairs<unsigned char, of_rows, of_keys> pairs;

  template <class Params>
  __device__ MaskTerm(const Params& params, const Lane& lane, double)
      : pairs(params.mask, params.mask.mask, params.mask.mask_batch_stride,
              params.mask.mask_head_stride, params.mask.mask_row_stride,
              params.mask.mask_column_stride, params.shape, lane) {}

  __device__ Compute operator()(Compute score, int di, int dj) const {
    return pairs.at(di, dj) != 0 ? score : -infinity<Compute>();
  }
};

}  // namespace cuflash
