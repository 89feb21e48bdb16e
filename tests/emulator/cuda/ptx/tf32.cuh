// Stands for cuda_src/ptx/tf32.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

// Rounds to nearest, ties to even; numbers that are not finite do not change.
inline float round_to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  const unsigned bits = __float_as_uint(x);
  return __uint_as_float((bits + 0xfffu + (bits >> 13 & 1)) & 0xffffe000u);
}

inline float round_to_tf32_by_integers(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}

}  // namespace cuflash::ptx
