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
inline float __half2float(__half h) { return static_cast<float>(h.x); }
inline __half __float2half_rn(float value) { return __half(value); }
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
