// Stands for cuda_src/ptx/compare_halves.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline float half_of(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const float fraction = static_cast<float>(bits & 1023);
  if (exponent == 31) return bits & 1023 ? NAN : (bits & 0x8000u ? -INFINITY : INFINITY);
  const float x = exponent == 0 ? ldexpf(fraction, -24) : ldexpf(fraction + 1024, exponent - 25);
  return bits & 0x8000u ? -x : x;
}
inline unsigned halves_less_than(unsigned a, unsigned b) {
  unsigned mask = 0;
  if (half_of(a & 0xffffu) < half_of(b & 0xffffu)) mask |= 0x0000ffffu;
  if (half_of(a >> 16) < half_of(b >> 16)) mask |= 0xffff0000u;
  return mask;
}

}  // namespace cuflash::ptx
