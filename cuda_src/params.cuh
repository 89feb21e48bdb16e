// The structures a launch passes by value. cuflash/cuda/parameters.py mirrors them; the generated
// translation unit asserts every size and offset, so the two sides agree or nothing compiles.
#pragma once

namespace cuflash {

// A tensor of one call, [batch, row, head, column]. The column stride is one element; the others
// count elements, may be zero (broadcast) or negative, and are 64-bit so that no offset overflows.
struct Tensor {
  void* data;
  long long batch_stride;
  long long row_stride;
  long long head_stride;
};

// One number for each query row, [batch, head, row]; `data` is null when the caller has none.
struct RowVector {
  void* data;
  long long batch_stride;
  long long head_stride;
  long long row_stride;
};

// An array that broadcasts against all pairs, [batch, head, query, key]; strides in elements, 0
// along an axis that it broadcasts.
struct PairArray {
  void* data;
  long long batch_stride;
  long long head_stride;
  long long row_stride;
  long long column_stride;
};

// Numbers that differ between calls and are not compiled in.
struct Shape {
  int batch;
  int heads_q;
  int heads_kv;
  int seqlen_q;
  int seqlen_kv;
  int head_dim;    // of q and k; the compiled bucket may be wider
  int head_dim_v;  // of v and out
  int q_offset;    // the last key that query 0 sees, under a mask that has one
};

// FlashAttention-1 forward. The three accumulators are in the workspace, contiguous over
// [batch, heads_q, seqlen_q]: out with head_dim_v (the bucket) columns, row_max in the units of
// tile/softmax.cuh.
struct Fa1ForwardParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  RowVector lse;
  void* out_accumulator;
  void* row_max;
  void* row_sum;
  double scale;
  float factor;  // of the logits, see logit_factor in tile/softmax.cuh
  Shape shape;
};

// FlashAttention-1 backward. `delta` and `dq_accumulator` are workspace, contiguous over
// [batch, heads_q, seqlen_q], the latter with head_dim (the bucket) columns.
struct Fa1BackwardParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  Tensor dq;
  Tensor dk;
  Tensor dv;
  RowVector lse;
  void* delta;
  void* dq_accumulator;
  double scale;
  float factor;  // of the logits, see logit_factor in tile/softmax.cuh
  Shape shape;
};

// FlashAttention-2 forward. It has no arrays in the workspace.
struct Fa2ForwardParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  RowVector lse;
  double scale;
  float factor;          // of the logits, see logit_factor in tile/softmax.cuh
  long long head_group;  // heads whose tiles run together, see tile/schedule.cuh
  Shape shape;
};

// delta = rowsum(dout * out) - dlse, contiguous over [batch, heads_q, seqlen_q].
struct DeltaParams {
  Tensor out;
  Tensor dout;
  RowVector dlse;
  void* delta;
  Shape shape;
};

// FlashAttention-2 backward, the main kernel. Workspace: `row_lse` and `delta` of StatisticsParams,
// `dq_accumulator` as tile/gradient_accumulator.cuh lays it out, and, for an ordered sum, `turns`,
// a counter for every warp's part of every q tile of a head.
struct Fa2BackwardParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  Tensor dk;
  Tensor dv;
  void* row_lse;
  void* delta;
  void* dq_accumulator;
  void* turns;
  double scale;
  float factor;           // of the logits, see logit_factor in tile/softmax.cuh
  long long head_group;   // heads whose tiles run together, see tile/schedule.cuh
  long long padded_rows;  // rows of a head in the workspace
  Shape shape;
};

// See steps/merge.cu. The features kv_chunks and packed_group describe the parts.
struct MergeParams {
  Tensor out;
  RowVector lse;
  Shape shape;
};

// See steps/statistics.cu.
struct StatisticsParams {
  Tensor out;
  Tensor dout;
  RowVector lse;
  RowVector dlse;
  void* row_lse;
  void* delta;
  void* dq_accumulator;
  void* turns;
  long long padded_rows;
  long long cleared;  // number of first heads, over the batch, whose dQ is cleared
  Shape shape;
};

// See steps/sink_gradient.cu. The sinks themselves are in the parameters of their feature.
struct SinkGradientParams {
  RowVector lse;
  RowVector dlse;
  void* delta;
  void* dsinks;           // [heads_q], contiguous, of the type of the sinks
  long long padded_rows;  // rows of a head in `delta`
  Shape shape;
};

// See steps/slope_gradient.cu.
struct SlopeGradientParams {
  void* pair_sums;      // [batch, heads_q, sums_of_head]
  void* dalibi_slopes;  // [batch or none, heads_q], contiguous
  long long sums_of_head;
  long long entries;  // batch entries that share a slope
  Shape shape;
};

// See steps/bias_gradient.cu. The bias itself is in the parameters of its feature.
struct BiasGradientParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  RowVector lse;
  PairArray dbias;
  void* delta;
  void* bias_parts;  // [batch, heads_q, seqlen_q or seqlen_kv], partial sums of the gradient
  double scale;
  float factor;           // of the logits, see logit_factor in tile/softmax.cuh
  long long padded_rows;  // rows of a head in `delta`
  long long bias_batch;   // batch entries of the gradient; each covers equally many of the batch
  long long bias_heads;
  Shape shape;
};

// See steps/reduce_bias.cu.
struct ReduceBiasParams {
  PairArray dbias;
  void* bias_parts;
  long long length;  // numbers of a part
  long long bias_batch;
  long long bias_heads;
  Shape shape;
};

// See steps/summarise_mask.cu.
struct SummariseMaskParams {
  PairArray mask;   // of bytes, 0 is false
  void* tile_bits;  // [entry, head, row of tiles, words]; null if not wanted
  void* pair_bits;  // [entry, head, 16 lines, tile, lane]
  long long mask_heads;
  Shape shape;
};

// See steps/list_blocks.cu.
struct ListBlocksParams {
  PairArray block_mask;  // of bytes, 0 is false
  void* block_bits;      // [entry, head, row of tiles, words]
  long long block_heads;
  long long block_words;  // words of all entries and heads
  Shape shape;
};

// See steps/list_items.cu.
struct ListItemsParams {
  void* cu_seqlens_q;  // [entries + 1] of int
  void* cu_seqlens_kv;
  void* q_begins;  // [entries + 2] of int
  void* kv_begins;
  void* q_items;  // see features/packed_lengths.cuh; the kernel writes at most one of the two
  void* kv_items;
  long long entries;
  Shape shape;
  // Packed queries on caches have these in place of the first two and of `kv_begins`.
  void* query_offsets;  // [entries + 1] of int
  void* seqused_kv;     // [entries] of int
};

// See steps/convert_dq.cu.
struct ConvertParams {
  Tensor dq;
  void* dq_accumulator;
  double scale;
  long long padded_rows;
  Shape shape;
};

}  // namespace cuflash
