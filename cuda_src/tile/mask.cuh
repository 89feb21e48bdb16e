// The keys that a query sees: one interval for each query, cut at the length. The tiles that are
// visited, and those that need a mask, derive from here. Kernels hide pairs of an edge tile by the
// same two bounds, seq.q_first and seq.q_last.
#pragma once

#include "sequence.cuh"

namespace cuflash {

// Query i sees key j iff i + q_first <= j <= i + q_last; each kind has some of these bounds.
enum class MaskKind {
  full,    // no bound
  causal,  // a last key
  left,    // a first key
  band,    // both
};

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class Config>
struct Mask {
  static constexpr MaskKind kind = Config::mask;
  static constexpr bool has_last = kind == MaskKind::causal || kind == MaskKind::band;
  static constexpr bool has_first = kind == MaskKind::left || kind == MaskKind::band;

  // Rows of a packed group are heads of one query, so all have the position of row 0.
  static constexpr bool one_position = Config::Lengths::one_position;

  __device__ static bool visible(const Sequence& seq, int i, int j) {
    if constexpr (one_position) i = 0;
    return j < seq.seqlen_kv && (!has_last || j <= i + seq.q_last) &&
           (!has_first || j >= i + seq.q_first);
  }

  // The first key that query i sees, and one past the last; the range may be empty.
  __device__ static int visible_begin(const Sequence& seq, int i) {
    if constexpr (one_position) i = 0;
    return has_first ? max(0, i + seq.q_first) : 0;
  }
  __device__ static int visible_end(const Sequence& seq, int i) {
    if constexpr (one_position) i = 0;
    return has_last ? max(0, min(seq.seqlen_kv, i + seq.q_last + 1)) : seq.seqlen_kv;
  }

  __device__ static bool sees_nothing(const Sequence& seq, int i) {
    return visible_begin(seq, i) >= visible_end(seq, i);
  }

  // The first query that sees some key at or after key `kv_begin`, and one past the last query that
  // sees some key at or before key `kv_last`.
  __device__ static int first_query_seeing(const Sequence& seq, int kv_begin) {
    return has_last ? max(0, kv_begin - seq.q_last) : 0;
  }
  __device__ static int end_of_queries_seeing(const Sequence& seq, int kv_last) {
    return has_first ? max(0, min(seq.seqlen_q, kv_last - seq.q_first + 1)) : seq.seqlen_q;
  }

  // Whether queries [q_begin, q_begin + queries) and keys [kv_begin, kv_begin + keys) contain a
  // hidden pair. Queries beyond the length do not count.
  template <int queries, int keys>
  __device__ static bool is_edge(const Sequence& seq, int q_begin, int kv_begin) {
    const int kv_last = kv_begin + keys - 1;
    if constexpr (one_position) {
      return kv_last >= seq.seqlen_kv || (has_last && kv_last > seq.q_last) ||
             (has_first && kv_begin < seq.q_first);
    }
    bool edge = kv_last >= seq.seqlen_kv || (has_last && kv_last > q_begin + seq.q_last);
    if constexpr (has_first) {
      const int q_end = min(q_begin + queries, seq.seqlen_q);
      edge = edge || kv_begin < q_end - 1 + seq.q_first;
    }
    return edge;
  }

  // Whether every pair of these queries and keys is hidden.
  template <int queries, int keys>
  __device__ static bool hides_all(const Sequence& seq, int q_begin, int kv_begin) {
    const int q_last = min(q_begin + queries, seq.seqlen_q) - 1;
    const int kv_last = min(kv_begin + keys, seq.seqlen_kv) - 1;
    return kv_begin > kv_last || (has_last && kv_begin > q_last + seq.q_last) ||
           (has_first && kv_last < q_begin + seq.q_first);
  }
};

}  // namespace cuflash
