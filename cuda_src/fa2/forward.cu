// FlashAttention-2, forward pass: Dao, "FlashAttention-2: Faster Attention with Better Parallelism
// and Work Partitioning" (2023), Algorithm 1.
//
// One thread block does one q tile of one (batch, head) after the other, or a single one if the
// grid has a block for each. Its warps part the rows; K and V tiles stream through two stages each,
// the last tile first, so that the masked ones come before the others. O is divided by the row's
// sum once, at the end, and leaves through V's stages while Q and the first K tile of the next q
// tile arrive.
//
// A step turns the scores of its tile into weights and multiplies them with V, sixteen keys after
// sixteen, so that the exponentials of some keys run beside the products of others; then it
// computes the scores of the next tile in the same registers.
//
// One barrier a step. At it
//   K of step + 1 and V of step have arrived, and
//   everyone has read K of step and V of step - 1, whose stages the next copies take.
// The last one comes after every read of Q and K, whose places the next q tile's take.
#include "forward_steps.cuh"

namespace cuflash::fa2 {

template <class Config>
__device__ inline void begin_step(const ForwardContext<Config>& c, int step) {
  wait_copies<Config::copies, 0>();
  __syncthreads();
  load_k_tile(c, step + 2);
  load_v_tile(c, step + 1);
  commit_copies<Config::copies>();
}

// Q and the first K tile of a q tile, one group of copies; nothing if there is no such tile, or if
// it sees no key.
template <class Config>
__device__ inline void load_first(const Fa2ForwardParams& params, ForwardStorage<Config>& shared,
                                  const TileTurn& turn) {
  if (exists<Config>(params, turn)) {
    const ForwardContext<Config> c = context_of<Config>(params, shared, turn);
    if (c.blocks.count > 0) {
      load_q_tile(c);
      load_k_tile(c, 0);
    }
  }
  commit_copies<Config::copies>();
}

// The q tile of `c`, whose first copies are under way; those of `next` begin at the last step.
template <class Config>
__device__ inline void forward_tile(const ForwardContext<Config>& c, const TileTurn& next) {
  ForwardState<Config> state;
  begin_rows(c, state);
  const int steps = c.blocks.count;
  if (steps > 0) {
    load_k_tile(c, 1);
    load_v_tile(c, 0);
    commit_copies<Config::copies>();
    wait_copies<Config::copies, 1>();
    __syncthreads();
    typename ForwardTypes<Config>::Scores scores;
    score_tile(c, scores, 0);
    for (int step = 0; step + 1 < steps; ++step) {
      begin_step(c, step);
      weigh_tile(c, state, scores, step);
      score_tile(c, scores, step + 1);
    }
    wait_copies<Config::copies, 0>();
    __syncthreads();
    load_first(c.params, c.shared, next);
    weigh_tile(c, state, scores, steps - 1);
  } else {
    load_first(c.params, c.shared, next);
  }
  __syncthreads();  // everyone has read V
  store_rows(c, state);
  __syncthreads();  // the output has left
}

template <class Config>
__device__ inline void forward(const Fa2ForwardParams& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ForwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  TileTurn turn{0};
  load_first(params, shared, turn);
  for (; exists<Config>(params, turn); turn = turn.next()) {
    forward_tile(context_of<Config>(params, shared, turn), turn.next());
  }
}

}  // namespace cuflash::fa2
