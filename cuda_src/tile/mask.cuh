// Which keys a query sees, element by element and tile by tile. This is the only statement of the
// masks on the device: loops, masking and the dead-row rule all derive from it.
#pragma once

#include "sequence.cuh"

namespace cuflash {

enum class MaskKind {
  full,    // every key
  causal,  // key j for query i iff j <= i + q_offset
};

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class Config>
struct Mask {
  static constexpr bool causal = Config::mask == MaskKind::causal;

  __device__ static bool visible(const Sequence& seq, int i, int j) {
    return j < seq.seqlen_kv && (!causal || j <= i + seq.q_offset);
  }

  // Queries from here on see some key at or after key `kv_begin`.
  __device__ static int first_query_seeing(const Sequence& seq, int kv_begin) {
    return causal ? max(0, kv_begin - seq.q_offset) : 0;
  }

  // One past the last key that query i sees; 0 if it sees none.
  __device__ static int visible_end(const Sequence& seq, int i) {
    return causal ? max(0, min(seq.seqlen_kv, i + seq.q_offset + 1)) : seq.seqlen_kv;
  }

  // Whether a tile of block_q queries from q_begin and block_kv keys from kv_begin holds a pair
  // that must be masked. Queries beyond the length do not count: their rows are never written.
  __device__ static bool is_edge(const Sequence& seq, int q_begin, int kv_begin) {
    const int kv_last = kv_begin + Config::block_kv - 1;
    return kv_last >= seq.seqlen_kv || (causal && kv_last > q_begin + seq.q_offset);
  }
};

}  // namespace cuflash
