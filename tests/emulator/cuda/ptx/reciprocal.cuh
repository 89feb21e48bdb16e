// Stands for cuda_src/ptx/reciprocal.cuh. Errs by up to one unit in the last place; the bits of the
// number decide about size and sign of the error.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline float reciprocal_approximate(float x) {
  const float least = 0x1p-126f;
  if (fabsf(x) < least) x = copysignf(0.0f, x);
  const float y = 1.0f / x;
  if (y != y || fabsf(y) < least) return y != y ? y : copysignf(0.0f, y);
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  const float off = 0x1p-23f * (static_cast<int>(bits / 4096 % 3) - 1);
  return y + y * off;
}

}  // namespace cuflash::ptx
