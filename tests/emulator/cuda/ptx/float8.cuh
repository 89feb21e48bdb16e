// Stands for cuda_src/ptx/float8.cuh: by the definition of e4m3.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline std::uint16_t half_of_float8(unsigned byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
  const unsigned sign = byte << 8 & 0x8000;
  if ((byte & 0x7f) == 0x7f) return static_cast<std::uint16_t>(sign | 0x7fff);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  const auto half = static_cast<_Float16>(size);
  std::uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return static_cast<std::uint16_t>(sign | bits);
}

inline void halves_of_float8(unsigned (&halves)[2], unsigned four) {
  for (int i = 0; i < 2; ++i) {
    const unsigned pair = four >> 16 * i;
    const unsigned last = half_of_float8(pair >> 8 & 0xff);
    halves[i] = half_of_float8(pair & 0xff) | last << 16;
  }
}

}  // namespace cuflash::ptx
