// The part of cuda_fp16.h that the sources use, by the compiler's own half type.
#pragma once

#include "emulated.hpp"

struct __half {
  _Float16 x;
  __half() = default;
  explicit __half(float value) : x(static_cast<_Float16>(value)) {}
};
struct __half2 {
  __half low, high;
};
// Looks the number up in a table: the compiler's own conversion is a function call.
inline float __half2float(__half h) {
  std::uint16_t bits;
  std::memcpy(&bits, &h, sizeof bits);
  return emulated::floats_of_halves[bits];
}
inline __half __float2half_rn(float value) { return __half(value); }
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.low), __half2float(x.high)}; }
