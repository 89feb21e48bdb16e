// Stands for cuda_src/ptx/mma.cuh: PTX ISA, "Warp-level matrix instructions: mma", fragments of
// m16n8k16 and m16n8k8 for 16-bit operands, m16n8k8 for tf32, m8n8k4 and the former for float64.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::ptx {

inline float wide(__half x) { return __half2float(x); }
inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// Two packed elements of a register.
template <class T>
inline void unpack(double* to, unsigned word) {
  T both[2];
  std::memcpy(both, &word, sizeof both);
  to[0] = wide(both[0]);
  to[1] = wide(both[1]);
}

// Lane row % 8 * 4 + k % 8 / 2 holds element a[row][k] in register row / 8 + k / 8 * 2; lane
// column * 4 + k % 8 / 2 holds b[k][column] in register k / 8.
template <int depth>
inline float dot(const emulated::Warp& warp, float c, int row, int column) {
  double sum = c;
  for (int k = 0; k < depth; ++k) {
    const double a = warp.left[row % 8 * 4 + k % 8 / 2][(row / 8 + k / 8 * 2) * 2 + k % 2];
    const double b = warp.right[column * 4 + k % 8 / 2][k / 8 * 2 + k % 2];
    sum += a * b;
  }
  return static_cast<float>(sum);
}

template <int depth>
inline void multiply(float& c0, float& c1, float& c2, float& c3) {
  const emulated::Warp& warp = emulated::warp();
  const int row = emulated::lane() / 4, column = emulated::lane() % 4 * 2;
  emulated::sync_warp();
  c0 = dot<depth>(warp, c0, row, column);
  c1 = dot<depth>(warp, c1, row, column + 1);
  c2 = dot<depth>(warp, c2, row + 8, column);
  c3 = dot<depth>(warp, c3, row + 8, column + 1);
  emulated::sync_warp();
}

template <class T>
inline void mma_m16n8k8(T, float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1,
                        unsigned b0) {
  emulated::Warp& warp = emulated::warp();
  unpack<T>(&warp.left[emulated::lane()][0], a0);
  unpack<T>(&warp.left[emulated::lane()][2], a1);
  unpack<T>(&warp.right[emulated::lane()][0], b0);
  multiply<8>(c0, c1, c2, c3);
}

template <class T>
inline void mma_m16n8k16(T, float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[4],
                         unsigned b0, unsigned b1) {
  emulated::Warp& warp = emulated::warp();
  for (int i = 0; i < 4; ++i) unpack<T>(&warp.left[emulated::lane()][i * 2], a[i]);
  unpack<T>(&warp.right[emulated::lane()][0], b0);
  unpack<T>(&warp.right[emulated::lane()][2], b1);
  multiply<16>(c0, c1, c2, c3);
}

// The value as which the tensor cores read a tf32 operand.
inline float cut_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
inline double as_operand(float x) { return cut_to_tf32(x); }
inline double as_operand(double x) { return x; }

// Adds a sum of products, computed in double, and truncates the result as the tensor cores do.
inline void add_sum(float& c, double sum) {
  const double exact = c + sum;
  float nearest = static_cast<float>(exact);
  if (std::abs(nearest) > std::abs(exact)) nearest = std::nextafter(nearest, 0.0f);
  c = nearest;
}
inline void add_sum(double& c, double sum) { c += sum; }

// Operands of four and eight bytes: lane row % 8 * 4 + k % 4 holds a[row][k], in register row / 8 +
// k / 4 * 2 if there are 16 rows; lane column * 4 + k % 4 holds b[k][column] in register k / 4.
template <int rows, int depth, class T, int left, int right>
inline void multiply_wide(T (&c)[rows / 8][2], const T (&a)[left], const T (&b)[right]) {
  emulated::Warp& warp = emulated::warp();
  const int lane = emulated::lane();
  for (int i = 0; i < left; ++i) warp.left[lane][i] = as_operand(a[i]);
  for (int i = 0; i < right; ++i) warp.right[lane][i] = as_operand(b[i]);
  emulated::sync_warp();
  for (int group = 0; group < rows / 8; ++group) {
    for (int which = 0; which < 2; ++which) {
      double sum = 0;
      for (int k = 0; k < depth; ++k) {
        sum += warp.left[lane / 4 * 4 + k % 4][group + k / 4 * (rows / 8)] *
               warp.right[(lane % 4 * 2 + which) * 4 + k % 4][k / 4];
      }
      add_sum(c[group][which], sum);
    }
  }
  emulated::sync_warp();
}

inline void mma_m16n8k8(float (&c)[2][2], const float (&a)[4], const float (&b)[2]) {
  multiply_wide<16, 8>(c, a, b);
}
inline void mma_m8n8k4(double (&c)[1][2], double a, double b) {
  const double left[1] = {a}, right[1] = {b};
  multiply_wide<8, 4>(c, left, right);
}
inline void mma_m16n8k8(double (&c)[2][2], const double (&a)[4], const double (&b)[2]) {
  multiply_wide<16, 8>(c, a, b);
}
inline void mma_m16n8k16(double (&c)[2][2], const double (&a)[8], const double (&b)[4]) {
  multiply_wide<16, 16>(c, a, b);
}

}  // namespace cuflash::ptx
