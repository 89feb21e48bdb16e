// FlashAttention-2 forward for few queries: what the host gives.
#pragma once

#include "../params.cuh"

namespace cuflash {

// Fa2ForwardParams, and the chunks that a block merges.
struct Fa2ForwardFewParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  RowVector lse;
  double scale;
  float factor;          // of the logits, see logit_factor in tile/softmax.cuh
  long long head_group;  // heads whose tiles run together, see tile/schedule.cuh
  Shape shape;
  long long chunk_tiles;     // tiles of a chunk; 0: the block has one chunk
  long long heads_of_block;  // query heads whose rows a block has, 1 or more
  long long parts;           // blocks that share the queries of a q tile
};

}  // namespace cuflash
