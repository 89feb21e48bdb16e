// FlashAttention-2, forward pass: Dao, "FlashAttention-2: Faster Attention with Better Parallelism
// and Work Partitioning" (2023), Algorithm 1.
//
// One thread block does one q tile of one (batch, head). Its warps, or pairs of warps
// (forward_paired.cuh), divide the rows. K and V tiles stream through one or two stages each, the
// last tile first, so that the masked tiles come before the others. O is divided by the row's sum
// once, at the end.
//
// A step exponentiates the scores of its tile and multiplies the weights with V, a few keys at a
// time, so that the exponentials of some keys run beside the products of others. Then it computes
// the scores of the next tile in the same registers.
//
// With two stages a step has one barrier. At this barrier
//   K of step + 1 and V of step have arrived, and
//   every warp has read K of step and V of step - 1, whose stages the next copies take.
// With one stage, for blocks that share a multiprocessor with another one, a step has two:
//   at its beginning V of step has arrived, and every warp has read K of step;
//   before the next scores K of step + 1 has arrived, and every warp has read V of step.
#include "forward_store.cuh"

namespace cuflash::fa2 {

template <class Config>
__device__ inline void begin_step(ForwardContext<Config>& c, int step) {
  wait_copies<Config::copies, 0>();
  __syncthreads();
  load_k_tile(c, step + Config::num_stages);
  if constexpr (Config::num_stages > 1) load_v_tile(c, step + 1);
  commit_copies<Config::copies>();
}

// The waits and loads between a step's products with V and the scores of the next step.
template <class Config>
__device__ inline void turn_to_scores(ForwardContext<Config>& c, int step) {
  if constexpr (Config::num_stages == 1) {
    wait_copies<Config::copies, 0>();
    __syncthreads();
    load_v_tile(c, step + 1);
    commit_copies<Config::copies>();
  }
}

// The scores of a step.
template <class Config, class Scores>
__device__ inline void score(const ForwardContext<Config>& c, Scores& scores, int step) {
  score_tile(c, scores, step);
  if constexpr (Config::paired) {
    auto maxima = row_maxima(scores);
    post_numbers(c, maxima);
  }
}

// Exponentiates the scores of a step and adds their products with V to the output.
template <class Config, class Scores>
__device__ inline void exponentiate(const ForwardContext<Config>& c, ForwardState<Config>& state,
                                    Scores& scores, int step) {
  if constexpr (Config::paired) {
    exponentiate_paired_tile(c, state, scores, step);
  } else {
    exponentiate_tile(c, state, scores, step);
  }
}

template <class Config>
__device__ inline void forward_tile(ForwardContext<Config>& c) {
  ForwardState<Config> state;
  begin_rows(c, state);
  const int steps = c.blocks.count();
  if (steps > 0) {
    load_q_tile(c);
    load_k_tile<true>(c, 0);
    commit_copies<Config::copies>();
    if constexpr (Config::num_stages > 1) load_k_tile(c, 1);
    load_v_tile<true>(c, 0);
    commit_copies<Config::copies>();
    wait_copies<Config::copies, 1>();
    __syncthreads();
    typename ForwardTypes<Config>::Scores scores;
    score(c, scores, 0);
    for (int step = 0;; ++step) {
      begin_step(c, step);
      exponentiate(c, state, scores, step);
      if (step + 1 == steps) break;
      turn_to_scores(c, step);
      score(c, scores, step + 1);
    }
  }
  store_rows(c, state);
}

template <class Config>
__device__ inline void forward(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ForwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const Shape& shape = params.shape;
  const TileOrder<Config::entries_inside> order{q_tiles_of_head<Config>(params),
                                                static_cast<unsigned>(shape.heads_q),
                                                static_cast<unsigned>(params.head_group)};
  if (Config::Lengths::packed && blockIdx.x >= order.tiles * order.heads) return;
  const auto [item, seq] = q_item_of<Config>(params, order, blockIdx.x);
  using Storage = typename Config::Storage;
  const int rows = ForwardTypes<Config>::rows_per_warp;
  const int sharing = ForwardTypes<Config>::sharing;
  const int kv_head = item.head / (shape.heads_q / shape.heads_kv);
  const StepBlocks<Config> blocks(params, seq, item);
  if constexpr (Config::Chunks::split) {
    if (blocks.count() == 0) return;
  }
  const int last = (blocks.range.end - 1) * Config::block_kv;
  ForwardContext<Config> c{
      params,
      shared,
      item,
      seq,
      blocks,
      static_cast<int>(threadIdx.x) / 32 / sharing * rows,
      {kv_row<const Storage>(params.k, seq, kv_head, last), params.k.row_stride, shape.head_dim},
      {kv_row<const Storage>(params.v, seq, kv_head, last), params.v.row_stride, shape.head_dim_v}};
  forward_tile(c);
}

}  // namespace cuflash::fa2
