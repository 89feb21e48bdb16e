// The names that the text of a score function may use: its types, its arrays, and functions of dual
// numbers. The translation unit defines cuflash_text::Storage before it includes this file.
#pragma once

#include "../ptx/exp2.cuh"
#include "../ptx/tanh.cuh"
#include "../tile/dual.cuh"

namespace cuflash_text {

using Real = decltype(cuflash::to_compute(Storage()));
// A 16-bit type cannot hold the digits that a fast instruction loses.
constexpr bool kExact = sizeof(Storage) > 2;
using Value = cuflash::Dual<Real, kExact>;

// As accurate as the storage type needs: one instruction for bfloat16.
__device__ inline float hyperbolic(__nv_bfloat16, float x) {
  return cuflash::ptx::tanh_approximate(x);
}
__device__ inline float hyperbolic(__half, float x) { return ::tanhf(x); }
__device__ inline float hyperbolic(float, float x) { return ::tanhf(x); }
__device__ inline double hyperbolic(double, double x) { return ::tanh(x); }

__device__ inline Real exp2(Real x) {
  if constexpr (kExact) return ::exp2(x);
  return cuflash::ptx::exp2_approximate(x);
}
__device__ inline Real exp(Real x) {
  if constexpr (kExact) return ::exp(x);
  return exp2(x * static_cast<Real>(cuflash::kLog2E));
}
__device__ inline Real log(Real x) { return ::log(x); }
__device__ inline Real log2(Real x) { return ::log2(x); }
__device__ inline Real tanh(Real x) { return hyperbolic(Storage(), x); }
__device__ inline Real sqrt(Real x) { return static_cast<Real>(::sqrt(x)); }
__device__ inline Real rsqrt(Real x) { return cuflash::quotient<kExact>(Real(1), sqrt(x)); }
__device__ inline Real sin(Real x) { return ::sin(x); }
__device__ inline Real cos(Real x) { return ::cos(x); }
__device__ inline Real pow(Real x, Real y) { return ::pow(x, y); }
__device__ inline Real fabs(Real x) { return ::fabs(x); }
__device__ inline Real abs(Real x) { return ::fabs(x); }
__device__ inline int abs(int x) { return x < 0 ? -x : x; }
__device__ inline int min(int x, int y) { return x < y ? x : y; }
__device__ inline int max(int x, int y) { return x < y ? y : x; }
__device__ inline Real min(Real x, Real y) { return x < y ? x : y; }
__device__ inline Real max(Real x, Real y) { return x < y ? y : x; }
__device__ inline Real min(Real x, int y) { return min(x, static_cast<Real>(y)); }
__device__ inline Real max(Real x, int y) { return max(x, static_cast<Real>(y)); }
__device__ inline Real min(int x, Real y) { return min(static_cast<Real>(x), y); }
__device__ inline Real max(int x, Real y) { return max(static_cast<Real>(x), y); }

__device__ inline Value exp(Value x) {
  const Real y = exp(x.value());
  return cuflash::chained(x, y, y);
}
__device__ inline Value exp2(Value x) {
  const Real y = exp2(x.value());
  return cuflash::chained(x, y, static_cast<Real>(cuflash::kLn2) * y);
}
__device__ inline Value log(Value x) {
  return cuflash::chained(x, log(x.value()), cuflash::quotient<kExact>(Real(1), x.value()));
}
__device__ inline Value log2(Value x) {
  return cuflash::chained(x, log2(x.value()),
                          cuflash::quotient<kExact>(static_cast<Real>(cuflash::kLog2E), x.value()));
}
// The derivative is 1 - y^2; its form 4 e / (1 + e)^2, with e = exp(-2 |x|), avoids cancellation.
__device__ inline Value tanh(Value x) {
  const Real y = tanh(x.value());
  if constexpr (!kExact) {
    return cuflash::chained(x, y, ::fma(-y, y, Real(1)));
  } else {
    const Real e = exp(Real(-2) * fabs(x.value()));
    return cuflash::chained(x, y, Real(4) * e / ((Real(1) + e) * (Real(1) + e)));
  }
}
__device__ inline Value sqrt(Value x) {
  const Real y = sqrt(x.value());
  return cuflash::chained(x, y, cuflash::quotient<kExact>(Real(0.5), y));
}
__device__ inline Value rsqrt(Value x) {
  const Real y = rsqrt(x.value());
  return cuflash::chained(x, y, cuflash::quotient<kExact>(Real(-0.5) * y, x.value()));
}
__device__ inline Value sin(Value x) { return cuflash::chained(x, sin(x.value()), cos(x.value())); }
__device__ inline Value cos(Value x) {
  return cuflash::chained(x, cos(x.value()), -sin(x.value()));
}
__device__ inline Value pow(Value x, Real y) {
  return cuflash::chained(x, pow(x.value(), y), y * pow(x.value(), y - Real(1)));
}
__device__ inline Value pow(Real x, Value y) {
  const Real z = pow(x, y.value());
  return cuflash::chained(y, z, log(x) * z);
}
__device__ inline Value pow(Value x, Value y) {
  const Real z = pow(x.value(), y.value());
  const Real by_x = y.value() * pow(x.value(), y.value() - Real(1));
  return {z, ::fma(by_x, x.slope(), log(x.value()) * z * y.slope())};
}
// The derivative follows the branch that is taken; at 0 the derivative of |x| is 1.
__device__ inline Value fabs(Value x) { return x.value() < 0 ? -x : x; }
__device__ inline Value abs(Value x) { return fabs(x); }
__device__ inline Value min(Value x, Value y) { return y.value() < x.value() ? y : x; }
__device__ inline Value max(Value x, Value y) { return x.value() < y.value() ? y : x; }

__device__ inline Value where(bool condition, Value x, Value y) { return condition ? x : y; }
__device__ inline Real where(bool condition, Real x, Real y) { return condition ? x : y; }
__device__ inline int where(bool condition, int x, int y) { return condition ? x : y; }
__device__ inline Real where(bool condition, Real x, int y) {
  return condition ? x : static_cast<Real>(y);
}
__device__ inline Real where(bool condition, int x, Real y) {
  return condition ? static_cast<Real>(x) : y;
}

// An array element as the text sees it: numbers have the type in which scores are computed.
__device__ inline Real element(__half x) { return __half2float(x); }
__device__ inline Real element(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline Real element(float x) { return x; }
__device__ inline Real element(double x) { return static_cast<Real>(x); }
__device__ inline int element(int x) { return x; }
__device__ inline long long element(long long x) { return x; }
__device__ inline unsigned element(unsigned x) { return x; }
__device__ inline bool element(bool x) { return x; }

// The index itself, or that of the axis' nearest element.
__device__ inline int inside(int index, int size) { return max(min(index, size - 1), 0); }
__device__ inline int inside(unsigned index, int size) {
  return index < static_cast<unsigned>(size) ? static_cast<int>(index) : size - 1;
}
__device__ inline int inside(long long index, int size) {
  return index < 0 ? 0 : index < size ? static_cast<int>(index) : size - 1;
}
__device__ int inside(Real index, int size) = delete;  // an index is an integer

// A C-contiguous array of the caller; `Index` is an integer type that can count its elements. An
// index outside its axis reads the nearest element.
template <class T, int axes, class Index>
struct Array {
  const T* data;
  int size[axes];

  template <class... Indices>
  __device__ auto operator()(Indices... indices) const {
    static_assert(sizeof...(Indices) == axes, "an array takes one index for each of its axes");
    Index place = 0;
    int axis = 0;
    ((place = place * size[axis] + inside(indices, size[axis]), ++axis), ...);
    return element(data[place]);
  }
};

}  // namespace cuflash_text
