// Packed groups: where a call has one query, the query heads that share a head of keys are the rows
// of one tile, so that their keys are read once. Row r is query head `head * group + r`.
#pragma once

#include "../tile/sequence.cuh"

namespace cuflash {

struct PackedGroupParams {
  long long group;  // query heads of a head of keys
};

// All rows have the position of the one query.
template <class Before>
struct OnePosition : Before {
  static constexpr bool one_position = true;
};

}  // namespace cuflash
