// The part of cuda_bf16.h that the sources use.
#pragma once

#include "emulated.hpp"

struct __nv_bfloat16 {
  std::uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if (std::isnan(value)) {
      bits = 0x7fff;
    } else {
      bits = static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
  }
};
struct __nv_bfloat162 {
  __nv_bfloat16 low, high;
};
inline float __bfloat162float(__nv_bfloat16 h) {
  const std::uint32_t word = static_cast<std::uint32_t>(h.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__nv_bfloat16(low), __nv_bfloat16(high)};
}
