// FlashAttention-3 forward where keys and values are stored in bytes: warps convert them between
// the copy engine and the rings of K and V.
//
// The load role loads the bytes into a ring of their own, K and V in the order in which they are
// used. The warps beside it convert each matrix into the next stage of K or V once that is free,
// and arrive at `k_full` or `v_full` in place of the copy engine. They write zeros for keys beyond
// the length, so there is no tail to clear.
#pragma once

#include "../ptx/proxy_fence.cuh"
#include "forward_types.cuh"

namespace cuflash::fa3 {

// The loading thread's side of the ring.
template <class Config, bool = Config::Stored::converts>
struct StoredLoads {
  PipelineState<Config::stored_stages> place;

  // Writes the kind and the number of valid rows of the next matrix once its stage is free. The
  // caller then announces the matrix's bytes, which releases these writes.
  __device__ unsigned begin(StoredRing<Config>& ring, StoredKind kind, int count) {
    wait_empty<Config>(ring.empty[place.stage], place.phase);
    ring.kind[place.stage] = kind;
    ring.count[place.stage] = count;
    const unsigned stage = place.stage;
    place.advance();
    return stage;
  }
  // Tells the converting warps that there are no more matrices.
  __device__ void end(StoredRing<Config>& ring) {
    arrive<Config>(ring.full[begin(ring, StoredKind::none, 0)]);
  }
};
template <class Config>
struct StoredLoads<Config, false> {};

// A warp converts eight rows of 64 columns at a time. These are the places of a lane's 16 bytes,
// which become two chunks of 16-bit numbers.
//
// Four lanes have a row's 64 bytes. Eight neighbouring lanes have rows r and r ^ 5, whose swizzled
// chunks lie in different banks of shared memory. This holds for the read of the bytes and for both
// writes of numbers: first the even chunks, then the odd ones.
template <class Bytes, class Matrix>
struct StoredParts {
  static constexpr int count = Matrix::rows / 8 * Matrix::count;
  static constexpr bool swizzled = Bytes::row_bytes == 128;
  unsigned row;   // of eight
  unsigned from;  // offset of the lane's bytes in eight rows of 64 columns
  unsigned to;    // offset of the first chunk; the second is 16 bytes before or after it

  __device__ StoredParts() {
    const unsigned lane = threadIdx.x % 32, column = lane % 4;
    row = lane % 8 < 4 ? lane / 8 : lane / 8 ^ 5;
    from = row * Bytes::row_bytes + (swizzled ? column ^ row : column) * 16;
    to = row * 128 + ((2 * column) ^ row) * 16;
  }

  __device__ static unsigned panel(unsigned number) { return number % Matrix::count; }
  __device__ static unsigned row0(unsigned number) { return number / Matrix::count * 8; }

  __device__ uint4 read(const unsigned char* bytes, unsigned number) const {
    const unsigned columns = panel(number) * 64;
    unsigned place = row0(number) * Bytes::row_bytes;
    place += columns / Bytes::row_bytes * Bytes::panel_bytes;
    place += from ^ columns % Bytes::row_bytes;
    return *reinterpret_cast<const uint4*>(bytes + place);
  }
  template <class Config>
  __device__ void write(Matrix& matrix, unsigned number, const uint4& bytes) const {
    using Storage = typename Config::Storage;
    uint4 first, second;
    Config::Stored::template convert<Storage>(bytes.x, first.x, first.y);
    Config::Stored::template convert<Storage>(bytes.y, first.z, first.w);
    Config::Stored::template convert<Storage>(bytes.z, second.x, second.y);
    Config::Stored::template convert<Storage>(bytes.w, second.z, second.w);
    auto* const chunks = reinterpret_cast<unsigned char*>(matrix.data) +
                         panel(number) * Matrix::panel_bytes + row0(number) * 128;
    *reinterpret_cast<uint4*>(chunks + to) = first;
    *reinterpret_cast<uint4*>(chunks + (to ^ 16)) = second;
  }
};

// Every converting warp converts its pieces of a matrix, and writes zeros to the rows from `count`
// on. Products may read them after an arrival of this warp.
template <class Config, class Bytes, class Matrix>
__device__ __forceinline__ void convert_matrix(const unsigned char* bytes, Matrix& matrix,
                                               unsigned count) {
  using Parts = StoredParts<Bytes, Matrix>;
  const Parts parts;
  constexpr int ahead = 3;  // pieces that are read before the first of them is converted
#pragma unroll 1
  for (unsigned first = threadIdx.x / 32 - 1; first < Parts::count;
       first += ahead * kConvertingWarps) {
    uint4 read[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const unsigned number = first + i * kConvertingWarps;
      read[i] = make_uint4(0, 0, 0, 0);
      if (number < Parts::count && Parts::row0(number) + parts.row < count) {
        read[i] = parts.read(bytes, number);
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const unsigned number = first + i * kConvertingWarps;
      if (number < Parts::count) parts.template write<Config>(matrix, number, read[i]);
    }
  }
  ptx::fence_async_shared();
  __syncwarp();
}

template <class Config, class Types = ForwardTypes<Config>>
__device__ inline void convert_role(const ForwardContext<Config>& c) {
  StoredRing<Config>& ring = c.shared.stored;
  PipelineState<Config::stored_stages> place;
  PipelineState<Config::num_stages> k_place;
  PipelineState<Config::num_stages> v_place;
#pragma unroll 1
  while (true) {
    wait<Config>(ring.full[place.stage], place.phase);
    const StoredKind kind = ring.kind[place.stage];
    if (kind == StoredKind::none) break;
    const unsigned char* const bytes = c.shared.stored_bytes[place.stage].data;
    const int count = ring.count[place.stage];
    if (kind == StoredKind::keys) {
      wait_empty<Config>(c.shared.k_empty[k_place.stage], k_place.phase);
      convert_matrix<Config, StoredK<Config>>(bytes, c.shared.k[k_place.stage], count);
      arrive_warp<Config>(c.shared.k_full[k_place.stage]);
      k_place.advance();
    } else {
      wait_empty<Config>(c.shared.v_empty[v_place.stage], v_place.phase);
      convert_matrix<Config, StoredV<Config>>(bytes, c.shared.v[v_place.stage], count);
      arrive_warp<Config>(c.shared.v_full[v_place.stage]);
      v_place.advance();
    }
    arrive_warp<Config>(ring.empty[place.stage]);
    place.advance();
  }
}

}  // namespace cuflash::fa3
