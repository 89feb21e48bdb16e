// Stands for cuda_src/ptx/wgmma.cuh: PTX ISA, "Asynchronous warpgroup level matrix instructions".
// Every lane computes its own elements. It reads operands and writes sums when the product is
// issued or when it is waited for; blocks and warpgroups alternate between the two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "load_matrix.cuh"
#include "tensor_copy.cuh"

namespace cuflash::ptx {

inline float float_of(__half x) { return __half2float(x); }
inline float float_of(__nv_bfloat16 x) { return __bfloat162float(x); }

// A matrix in shared memory that a descriptor describes ("Matrix descriptor" and "Strides",
// 128-byte swizzle).
struct DescribedMatrix {
  unsigned start, leading, stride;

  explicit DescribedMatrix(unsigned long long descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) emulated::fail("a descriptor without the 128-byte swizzle");
    if ((descriptor & ~0xc0003fff3fff3fffull) != 0) emulated::fail("a descriptor with other bits");
  }

  // Sixteen elements, in order of depth: row `i` of A, or column `i` of B.
  template <class T, bool transposed>
  void read(float (&to)[16], int i) const {
    if constexpr (transposed) {
      for (int depth = 0; depth < 16; ++depth)
        neighbours<T, 1>(&to[depth], start + across(i, depth));
    } else {
      const unsigned row = start + i / 8 * stride + i % 8 * 128;
      for (int half = 0; half < 16; half += 8) neighbours<T, 8>(&to[half], row + 2 * half);
    }
  }
  // The same of `i` and of `i` + 1, where `i` is even.
  template <class T, bool transposed>
  void read_both(float (&to)[2][16], int i) const {
    if constexpr (transposed) {
      for (int depth = 0; depth < 16; ++depth) {
        float x[2];
        neighbours<T, 2>(x, start + across(i, depth));
        for (int which = 0; which < 2; ++which) to[which][depth] = x[which];
      }
    } else {
      for (int which = 0; which < 2; ++which) read<T, transposed>(to[which], i + which);
    }
  }

 private:
  unsigned across(int i, int depth) const {
    return i / 64 * leading + i % 64 * 2 + depth / 8 * stride + depth % 8 * 128;
  }

  // Neighbours in memory, of 16 bytes at most.
  template <class T, int count>
  static void neighbours(float* to, unsigned unswizzled) {
    const unsigned address = swizzled(unswizzled);
    T x[count];
    std::memcpy(x, emulated::shared_at(address, sizeof x), sizeof x);
    for (int k = 0; k < count; ++k) to[k] = float_of(x[k]);
    if (emulated::are_fenced<count>(address)) return;
    // Without a fence the number is arbitrary; NaN shows if the product's result is used.
    for (int k = 0; k < count; ++k) {
      if (!emulated::is_fenced(address + 2 * k)) to[k] = std::numeric_limits<float>::quiet_NaN();
    }
  }
};

inline bool products_are_late() { return (threadIdx.x / 128 + emulated::variant()) % 2 == 0; }

// Issues work that adds to `d`. All threads of a warpgroup pass the same `what`. No other code may
// write to `d` until the work is done.
template <int fragments>
inline void multiply(float (&d)[fragments][2][2], unsigned long long what,
                     const emulated::Work& work) {
  emulated::note_product(what + fragments);
  if (!products_are_late()) return work();
  emulated::multiply_later(&d[0][0][0], 4 * fragments, work);
}

// d += a b for the two rows of a lane; left[i][k] is the element of row i at depth k.
template <class T, bool transpose_b, int fragments>
inline void add_product(float (*d)[2][2], const float (&left)[2][16], unsigned long long b) {
  const DescribedMatrix right(b);
  const int lane = emulated::lane();
  for (int n = 0; n < fragments; ++n) {
    float x[2][16], sums[2][2] = {};
    right.read_both<T, transpose_b>(x, 8 * n + lane % 4 * 2);
    for (int depth = 0; depth < 16; ++depth) {
      for (int group = 0; group < 2; ++group) {
        for (int which = 0; which < 2; ++which) {
          sums[group][which] += left[group][depth] * x[which][depth];
        }
      }
    }
    for (int group = 0; group < 2; ++group) {
      for (int which = 0; which < 2; ++which) d[n][group][which] += sums[group][which];
    }
  }
}

template <bool transpose_a, bool transpose_b, class T, int fragments>
inline void wgmma(T, float (&d)[fragments][2][2], unsigned long long a, unsigned long long b,
                  bool accumulate) {
  multiply(d, a * 31 + b * 2 + accumulate, [=, to = &d[0]] {
    const DescribedMatrix matrix(a);
    const int first = threadIdx.x / 32 % 4 * 16 + emulated::lane() / 4;
    float left[2][16];
    for (int group = 0; group < 2; ++group) {
      matrix.read<T, transpose_a>(left[group], first + 8 * group);
    }
    if (!accumulate) std::memset(to, 0, sizeof(float[fragments][2][2]));
    add_product<T, transpose_b, fragments>(to, left, b);
  });
}

// Four lanes exchange their elements of a row when the product is issued. When it is done, each
// checks that its operand has not changed.
template <bool transpose_b, class T, int fragments>
inline void wgmma(T, float (&d)[fragments][2][2], const unsigned (&a)[4], unsigned long long b) {
  struct Left {
    float x[2][16];
    unsigned given[4];
  } left;
  std::memcpy(left.given, a, sizeof left.given);
  emulated::Warp& warp = emulated::warp();
  const int lane = emulated::lane();
  std::memcpy(warp.left[lane], a, sizeof left.given);
  emulated::sync_warp();
  for (int from = 0; from < 4; ++from) {
    T x[4][2];
    std::memcpy(x, warp.left[lane / 4 * 4 + from], sizeof x);
    for (int i = 0; i < 4; ++i) {
      for (int which = 0; which < 2; ++which) {
        left.x[i % 2][i / 2 * 8 + 2 * from + which] = float_of(x[i][which]);
      }
    }
  }
  emulated::sync_warp();
  multiply(d, b, [=, to = &d[0], operand = &a[0]] {
    if (std::memcmp(operand, left.given, sizeof left.given) != 0) {
      emulated::fail("an operand that changes while a product reads it");
    }
    add_product<T, transpose_b, fragments>(to, left.x, b);
  });
}

inline void wgmma_fence() { emulated::current->ordered = true; }

// cuda_src has a fence before every group, since most operands have just been written.
inline void wgmma_commit() {
  emulated::current->ordered = false;
  emulated::close_products();
}

template <int pending>
inline void wgmma_wait() {
  emulated::wait_for_products(pending);
}

template <int fragments>
inline void wgmma_hold(float (&)[fragments][2][2]) {}
template <int fragments>
inline void wgmma_hold(unsigned (&)[fragments][4]) {}

}  // namespace cuflash::ptx
