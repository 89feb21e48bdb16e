// Stands for cuda_src/ptx/tanh.cuh. Errs by up to as much as the instruction may; the bits of the
// number decide about size and sign of the error.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline float tanh_approximate(float x) {
  const float y = tanhf(x);
  if (y != y) return y;
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  const float off = 0x1p-11f * (static_cast<int>(bits / 4096 % 256) - 128) / 128;
  return fminf(fmaxf(y + y * off, -1.0f), 1.0f);
}

}  // namespace cuflash::ptx
