// Conversions between storage and compute types, and the few functions that attention needs, for
// both compute types (float, and double where the storage is double).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../ptx/exp2.cuh"

namespace cuflash {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

__device__ inline float to_compute(__half x) { return __half2float(x); }
__device__ inline float to_compute(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_compute(float x) { return x; }
__device__ inline double to_compute(double x) { return x; }

// from_compute<T>(x): round to nearest even.
template <class T, class Compute>
__device__ inline T from_compute(Compute x) {
  return static_cast<T>(x);
}
template <>
__device__ inline __half from_compute<__half, float>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_compute<__nv_bfloat16, float>(float x) {
  return __float2bfloat16_rn(x);
}

// Two neighbouring elements as they lie in memory.
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T x;
  T y;
};

// Two values rounded to a 16-bit type and packed into a register, the first in the low half.
__device__ inline unsigned pack(__half, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&both);
}
__device__ inline unsigned pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&both);
}

template <class Compute>
__device__ inline Compute infinity();
template <>
__device__ inline float infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <>
__device__ inline double infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000LL);
}

// The smallest positive number that is not flushed to zero.
template <class Compute>
__device__ inline Compute least();
template <>
__device__ inline float least<float>() {
  return __int_as_float(0x00800000);
}
template <>
__device__ inline double least<double>() {
  return __longlong_as_double(0x0010000000000000LL);
}

__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return exp(x); }
__device__ inline float log_of(float x) { return logf(x); }
__device__ inline double log_of(double x) { return log(x); }

// A product that no later addition is fused with.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The number itself. A pass over numbers that reads the lane's position and changes nothing makes
// ptxas allocate registers better: see "Code that does nothing" in bench/NOTES.md.
template <class Compute>
__device__ inline Compute unchanged(Compute x, int) {
  return x;
}

// The larger of two numbers, or the other one if one is NaN: a row's reference stays a number, and
// the NaN reaches the result through the exponential.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

}  // namespace cuflash
