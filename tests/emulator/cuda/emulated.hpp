// The part of CUDA C++ that the sources use, on the fibers of fibers.hpp. Stores of 16 bytes report
// to proxies.hpp.
#pragma once

#include "proxies.hpp"

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
  uint4& operator=(const uint4& from) {
    std::memcpy(this, &from, sizeof from);
    emulated::wrote_if_shared(this, sizeof from);
    return *this;
  }
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::block_index)
#define gridDim (emulated::grid_size)
#define blockDim (emulated::block_size)

inline void __syncthreads() { emulated::wait(emulated::block->barrier, emulated::block->threads); }
inline int __syncthreads_or(int value) {
  emulated::Barrier& barrier = emulated::block->barrier;
  int& any = barrier.any[barrier.generation % 2];  // keeps its value until the next barrier opens
  any |= value;
  emulated::wait(barrier, emulated::block->threads);
  return any;
}
inline void __syncwarp() { emulated::sync_warp(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::exchange(value, emulated::lane() ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emulated::exchange(value, from);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int from = emulated::lane() - distance;
  return emulated::exchange(value, from < 0 ? emulated::lane() : from);
}
inline int atomicAdd(int* to, int x) {
  *to += x;
  return *to - x;
}
inline void __nanosleep(unsigned) { emulated::pause(); }
inline int __any_sync(unsigned mask, int value);
inline int __all_sync(unsigned mask, int value) { return !__any_sync(mask, !value); }
inline int __any_sync(unsigned, int value) {
  emulated::Warp& warp = emulated::warp();
  warp.word[emulated::lane()] = value != 0;
  emulated::sync_warp();
  int any = 0;
  for (const std::uint64_t word : warp.word) any |= static_cast<int>(word);
  emulated::sync_warp();
  return any;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
