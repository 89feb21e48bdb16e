// FlashAttention-2, backward pass: Dao, "FlashAttention-2: Faster Attention with Better Parallelism
// and Work Partitioning" (2023), Algorithm 2.
//
// One thread block does one kv tile of one (batch, kv head). K and V stay in shared memory and dK
// and dV in registers while the block visits the q tiles that see the kv tile, for every query head
// of the group; so grouped heads are summed without a race. dQ is summed in device memory, in any
// order or, for the same bits every time, kv tile after kv tile.
//
// Where shared memory has room, P and dS of the next step and the gradients of this step share the
// interval between two barriers: half of the warps compute P and dS first and the others the
// gradients first, so that the matrix units have work during the exponentials. At the one barrier
// of a step i
//   P and dS of step i are complete, Q and dO of step i + 1 have arrived, and
//   every warp has read Q and dO of step i - 1, whose stage step i + 2 takes.
// Otherwise a step has a barrier before its scores (Q and dO have arrived, P and dS of the step
// before have been read) and one after them. With a single stage it has two more: one after dV,
// which has read dO, and one after dK, which has read Q, so that dO and Q of the next step arrive
// during dK and dQ.
//
// Narrow heads have registers to spare. Their warps divide the keys: P and dS are then operands in
// registers, and only dS passes through shared memory (backward_transposed.cuh).
//
// Dead rows (see steps/statistics.cu) add to no gradient and have gradient zero, whatever they or
// the keys hold. They are rare: a step that has one clears their Q, dO, P and dS between additional
// barriers.
#include "backward_transposed.cuh"

namespace cuflash::fa2 {

template <class Config>
__device__ inline void clear_scores(const BackwardContext<Config>& c, const QStep& step, int i) {
  __syncthreads();
  clear_dead_rows(c, step, c.p(i));
  clear_dead_rows(c, step, c.ds(i));
}

template <class Config, class KGradient, class VGradient>
__device__ inline void gradient_step(const BackwardContext<Config>& c, const QStep& step, int i,
                                     bool dead, KGradient& dk, VGradient& dv,
                                     OpenTurn<Config::ordered>& open) {
  accumulate_v<Config>(c, step, c.p(i), dv);
  accumulate_k<Config>(c, step, c.ds(i), dk);
  accumulate_q(c, step, i, dead, open);
}

// The same with one stage: Q and dO of the next step load as soon as this step has read its own. So
// do the numbers of the rows, unless some rows are dead: then dQ needs the numbers once more.
template <class Config, class KGradient, class VGradient>
__device__ inline void gradient_step_of_one_stage(const BackwardContext<Config>& c,
                                                  const QStep& step, QLoads<Config>& loads, int i,
                                                  bool dead, KGradient& dk, VGradient& dv,
                                                  OpenTurn<Config::ordered>& open) {
  accumulate_v<Config>(c, step, c.p(i), dv);
  __syncthreads();
  loads.load_dout(c);
  accumulate_k<Config>(c, step, c.ds(i), dk);
  __syncthreads();
  loads.load_q(c);
  if (!dead) loads.load_numbers(c);
  accumulate_q(c, step, i, dead, open);
  if (dead) {
    __syncthreads();
    loads.load_numbers(c);
  }
  commit_copies<Config::workspace_copies>();
}

// All steps; the scores of the next step run beside the gradients of this one.
template <class Config, class KGradient, class VGradient>
__device__ inline void steps_ahead(const BackwardContext<Config>& c, const QSteps<Config>& steps,
                                   KGradient& dk, VGradient& dv) {
  static_assert(Config::num_stages == 3 && Config::score_stages == 2, "three steps are under way");
  QStep step = steps.first();
  QLoads<Config> loads(c, steps);
  load_step(c, steps, loads);
  load_step(c, steps, loads);
  wait_copies<Config::workspace_copies, 1>();
  __syncthreads();
  OpenTurn<Config::ordered> open;
  bool dead = clear_inputs(c, step, sees_dead_row(c, step));
  score_step(c, step, 0);
  if (dead) clear_scores(c, step, 0);
  const bool scores_first = static_cast<int>(threadIdx.x) / 32 < Config::warps / 2;
  for (int i = 0; i + 1 < steps.count; ++i) {
    arrive_step<Config>();
    const QStep next = steps.after(step);
    const bool seen = sees_dead_row(c, next);  // its latency is hidden behind the copies
    load_step(c, steps, loads);
    const bool next_dead = clear_inputs(c, next, seen);
    if (scores_first) score_step(c, next, i + 1);
    gradient_step(c, step, i, dead, dk, dv, open);
    if (!scores_first) score_step(c, next, i + 1);
    if (next_dead) clear_scores(c, next, i + 1);
    dead = next_dead;
    step = next;
  }
  arrive_step<Config>();
  gradient_step(c, step, steps.count - 1, dead, dk, dv, open);
  open.pass();
}

// All steps, one after the other.
template <class Config, class KGradient, class VGradient>
__device__ inline void steps_in_turn(const BackwardContext<Config>& c, const QSteps<Config>& steps,
                                     KGradient& dk, VGradient& dv) {
  QStep step = steps.first();
  QLoads<Config> loads(c, steps);
  OpenTurn<Config::ordered> open;
  load_step(c, steps, loads);
  for (int i = 0; i < steps.count; ++i) {
    arrive_step<Config>();
    const bool dead = clear_inputs(c, step, sees_dead_row(c, step));
    if (Config::num_stages > 1) load_step(c, steps, loads);
    score_step(c, step, i);
    if (dead) clear_scores(c, step, i);
    __syncthreads();
    if constexpr (Config::num_stages > 1) {
      gradient_step(c, step, i, dead, dk, dv, open);
    } else {
      gradient_step_of_one_stage(c, step, loads, i, dead, dk, dv, open);
      loads.advance(c, steps);
    }
    step = steps.after(step);
  }
  open.pass();
}

// The work of block number `block` of the grid.
template <class Config>
__device__ inline BackwardContext<Config> context_of(const typename Config::Params& params,
                                                     BackwardStorage<Config>& shared,
                                                     unsigned block) {
  const Shape& shape = params.shape;
  const TileOrder<> order{static_cast<unsigned>(kv_tiles_of_head<Config>(params)),
                          static_cast<unsigned>(shape.heads_kv),
                          static_cast<unsigned>(params.head_group)};
  const auto [item, seq] = kv_item_of<Config>(params, order, block, last_tile_first<Config>);
  return {params, shared, item, seq, shape.heads_q / shape.heads_kv};
}

template <class Config>
__device__ inline void backward(const typename Config::Params& params) {
  using Types = BackwardTypes<Config>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(BackwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const auto c = context_of<Config>(params, shared, blockIdx.x);
  if constexpr (Config::Lengths::packed) {
    if (is_behind_the_list(c.item)) return;
  }
  const QSteps<Config> steps(params, c.seq, c.item.kv_begin, c.item.head * c.group, c.group);
  typename Types::KGradient dk;
  typename Types::VGradient dv;
  dk.fill(0);
  dv.fill(0);
  clear_pair_sums<Config>(params, c.item.entry, c.item.head * c.group, c.group, c.item.kv_begin);
  if (steps.count > 0) {
    load_kv_tile<Config>(c, c.item.kv_begin);
    if constexpr (Config::transposed) {
      steps_transposed(c, steps, dk, dv);
    } else if constexpr (Config::score_stages > 1) {
      steps_ahead(c, steps, dk, dv);
    } else {
      steps_in_turn(c, steps, dk, dv);
    }
  }
  if constexpr (Config::transposed) {
    // Recomputed, so that it takes no register during the steps, which need them all.
    store_gradients(context_of<Config>(params, shared, ptx::opaque(blockIdx.x)), dk, dv);
  } else {
    store_gradients(c, dk, dv);
  }
}

}  // namespace cuflash::fa2
