// Stands for cuda_src/ptx/mma.cuh: PTX ISA, "Warp-level matrix instructions: mma", fragments of
// m16n8k16 and m16n8k8 for 16-bit operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::ptx {

inline float wide(__half x) { return __half2float(x); }
inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// Two packed elements of a register.
template <class T>
inline void unpack(float* to, unsigned word) {
  T both[2];
  std::memcpy(both, &word, sizeof both);
  to[0] = wide(both[0]);
  to[1] = wide(both[1]);
}

// Elements a[row][k] lie with lane row % 8 * 4 + k % 8 / 2, in register row / 8 + k / 8 * 2;
// b[k][column] with lane column * 4 + k % 8 / 2, in register k / 8.
template <int depth>
inline float dot(const emulated::Warp& warp, float c, int row, int column) {
  double sum = c;
  for (int k = 0; k < depth; ++k) {
    const float a = warp.left[row % 8 * 4 + k % 8 / 2][(row / 8 + k / 8 * 2) * 2 + k % 2];
    const float b = warp.right[column * 4 + k % 8 / 2][k / 8 * 2 + k % 2];
    sum += static_cast<double>(a) * b;
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

}  // namespace cuflash::ptx
