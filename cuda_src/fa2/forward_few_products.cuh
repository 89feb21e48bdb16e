// FlashAttention-2 forward for few queries: the two products of a step of a warp. Float8 numbers
// become 16-bit numbers on their way from shared memory to the operands.
#pragma once

#include "forward_few_types.cuh"

namespace cuflash::fa2 {

// c += left right: 16 rows of the left operand, which a lane holds in four registers.
template <class Storage>
__device__ void multiply_fragment(float (&c)[2][2], const uint4& left, unsigned right0,
                                  unsigned right1) {
  const unsigned four[4] = {left.x, left.y, left.z, left.w};
  ptx::mma_m16n8k16(Storage{}, c[0][0], c[0][1], c[1][0], c[1][1], four, right0, right1);
}

template <class Config, bool = Config::Stored::converts>
struct FewProducts {
  using Types = FewTypes<Config>;
  using Storage = typename Config::Storage;

  // The first of two neighbouring columns of Q that a lane's register holds in a step. `column` is
  // the lane's number among the four of a row.
  __device__ static int depth(int step, int column, int pair) {
    return 16 * step + 2 * column + 8 * pair;
  }
  // The column of an element of the output.
  __device__ static int column(int n, int which, int column) { return 8 * n + 2 * column + which; }

  // scores += Q K^T.
  __device__ static void score(typename Types::Scores& scores, const uint4* q,
                               const typename Types::KTile& k) {
    const int lane = ptx::opaque_lane();
    const LaneChunks<typename Types::KTile, true> chunks{k, lane % 8 + lane / 16 * 8, lane / 8 % 2};
#pragma unroll
    for (int step = 0; step < Types::steps; ++step) {
      uint4 left[Types::fragments];
#pragma unroll
      for (int m = 0; m < Types::fragments; ++m) left[m] = q[(m * Types::steps + step) * 32 + lane];
#pragma unroll
      for (int n = 0; n < Config::block_kv / 8; n += 2) {
        unsigned right[4];
        ptx::load_matrix_x4(right, chunks.at(8 * n, 2 * step));
#pragma unroll
        for (int m = 0; m < Types::fragments; ++m) {
          multiply_fragment<Storage>(scores.value[m][n], left[m], right[0], right[1]);
          multiply_fragment<Storage>(scores.value[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // output += P V.
  __device__ static void add(typename Types::Output& output, const typename Types::Scores& weights,
                             const typename Types::VTile& v) {
    Products<Config>::multiply_weights(output, weights, depth_by_rows(v, Zero{}), nullptr, 0, 0);
  }
};

// The columns of Q and K may be summed in any order, and the output's columns may have any order in
// registers. So a lane takes 16 neighbouring bytes of a row of K as operands of four steps, and
// neighbouring columns of V belong to two fragments.
template <class Config>
struct FewProducts<Config, true> {
  using Types = FewTypes<Config>;
  using Storage = typename Config::Storage;
  static_assert(Config::head_dim % 64 == 0 && Config::head_dim_v % 32 == 0, "whole chunks");

  __device__ static int depth(int step, int column, int pair) {
    return step / 4 * 64 + 16 * column + step % 4 * 4 + 2 * pair;
  }
  __device__ static int column(int n, int which, int column) {
    return n / 2 * 16 + 4 * column + 2 * which + n % 2;
  }

  __device__ static void score(typename Types::Scores& scores, const uint4* q,
                               const typename Types::KTile& k) {
    const int lane = ptx::opaque_lane();
#pragma unroll
    for (int first = 0; first < Types::steps; first += 4) {
      uint4 left[Types::fragments][4];
#pragma unroll
      for (int m = 0; m < Types::fragments; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[m][i] = q[(m * Types::steps + first + i) * 32 + lane];
      }
#pragma unroll
      for (int n = 0; n < Config::block_kv / 8; ++n) {
        const auto* const at = k.chunk_at(8 * n + lane / 4, first + lane % 4);
        const uint4 bytes = *reinterpret_cast<const uint4*>(at);
        const unsigned four[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned right[2];
          Config::Stored::template convert<Storage>(four[i], right[0], right[1]);
#pragma unroll
          for (int m = 0; m < Types::fragments; ++m) {
            multiply_fragment<Storage>(scores.value[m][n], left[m][i], right[0], right[1]);
          }
        }
      }
    }
  }

  __device__ static void add(typename Types::Output& output, const typename Types::Scores& weights,
                             const typename Types::VTile& v) {
    const int lane = ptx::opaque_lane();
#pragma unroll
    for (int k = 0; k < Config::block_kv; k += 16) {
      uint4 left[Types::fragments];
#pragma unroll
      for (int m = 0; m < Types::fragments; ++m) {
        const auto& near = weights.value[m][k / 8];
        const auto& far = weights.value[m][k / 8 + 1];
        left[m] = {pack(Storage{}, near[0][0], near[0][1]), pack(Storage{}, near[1][0], near[1][1]),
                   pack(Storage{}, far[0][0], far[0][1]), pack(Storage{}, far[1][0], far[1][1])};
      }
#pragma unroll
      for (int chunk = 0; chunk < Types::VTile::chunks; chunk += 2) {
        // Matrices 0 and 1 are keys 0-7 and 8-15 of a chunk, 2 and 3 of the next chunk. A register
        // has two neighbouring columns of two neighbouring keys.
        unsigned right[4];
        ptx::load_matrix_x4_transposed(
            right, ptx::shared_address(v.chunk_at(k + lane % 16, chunk + lane / 16)));
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          unsigned low[2], high[2];  // keys 0-7 and 8-15, of the even and of the odd columns
          Config::Stored::template convert<Storage>(keys_together(right[i]), low[0], low[1]);
          Config::Stored::template convert<Storage>(keys_together(right[i + 1]), high[0], high[1]);
#pragma unroll
          for (int m = 0; m < Types::fragments; ++m) {
            multiply_fragment<Storage>(output.value[m][2 * chunk + i], left[m], low[0], high[0]);
            multiply_fragment<Storage>(output.value[m][2 * chunk + i + 1], left[m], low[1],
                                       high[1]);
          }
        }
      }
    }
  }

 private:
  // From bytes of (key, column), (key, column + 1), (key + 1, column), (key + 1, column + 1) to
  // both keys of the first column and both keys of the second.
  __device__ static unsigned keys_together(unsigned bytes) { return __byte_perm(bytes, 0, 0x3120); }
};

}  // namespace cuflash::fa2
