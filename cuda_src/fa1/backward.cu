// FlashAttention-1, backward pass: Algorithm 4 of Dao et al. 2022.
//
// One thread block does one (batch, kv head). K and V tiles are the outer loop; their gradients
// stay in registers while the block visits the Q tiles that see them, for every query head of the
// group, so grouped heads are summed without a race. P is recomputed from the saved log-sum-exp. dQ
// is in device memory in the compute type. Only this block reads and writes it, at every step and
// in a fixed order: the pass is deterministic.
//
// A dead row (it sees no key) adds to no gradient and has gradient zero, whatever it or the keys
// hold. Such rows are rare. The first barrier of a step returns whether any thread found one. All
// threads then clear the Q, dO, P, dS and dQ of such rows: a zero P alone would not suffice where a
// value is not finite.
//
// Barriers of a step, and what holds after each:
//   A  Q_i and dO_i have arrived; no warp still reads P and dS of the step before; the barrier has
//      returned whether there is a dead row
//   B  P and dS are complete
//   C  (with one stage) no warp still reads Q_i and dO_i, so the next may replace them
#include "backward_steps.cuh"

namespace cuflash::fa1 {

// One pair of a head's q tile and a kv tile; `dk` and `dv` are this warp's parts of the sums.
template <class Config, class KGradient, class VGradient>
__device__ inline void backward_step(const BackwardContext<Config>& c, const QStep& step,
                                     int kv_tile, bool dead, KGradient& dk, VGradient& dv) {
  const KvRange seen = shown_range<Config>(c.params, c.seq, step.head, step.q_tile);
  const bool first = kv_tile == seen.begin;
  const bool last = kv_tile == seen.end - 1;

  score_tiles<Config>(c, step, kv_tile * Config::block_kv, c.p(), c.ds(),
                      StepStatistics<Config>{c, step});
  if (dead) {
    __syncthreads();
    clear_dead_rows(c, step, c.p());
    clear_dead_rows(c, step, c.ds());
  }
  __syncthreads();  // B

  accumulate_v<Config>(c, step, c.p(), dv);
  accumulate_k<Config>(c, step, c.ds(), dk);
  accumulate_q(c, step, first, last);
  if (dead && last) {
    __syncthreads();
    store_dead_rows(c, step);
  }
}

// One kv tile: all steps of its inner loop, then its gradients.
template <class Config>
__device__ inline void backward_kv_tile(const BackwardContext<Config>& c, int kv_tile) {
  using Types = BackwardTypes<Config>;
  const int kv_begin = kv_tile * Config::block_kv;
  const QSteps<Config> steps(c.params, c.seq, kv_begin, c.item.head * c.group, c.group);
  typename Types::KGradient dk;
  typename Types::VGradient dv;
  dk.fill(0);
  dv.fill(0);
  bool dead = false;  // whether this thread saw a dead row of the q tile that was loaded last
  clear_pair_sums<Config>(c.params, c.item.entry, c.item.head * c.group, c.group, kv_begin);
  QStep step = steps.first();
  if (steps.count > 0) {
    __syncthreads();  // the last step of the kv tile before has read K and V
    load_kv_tile<Config>(c, kv_begin);
    dead = load_q_step(c, step);
  }
  for (int i = 0; i < steps.count; ++i) {
    constexpr bool ring = Config::num_stages > 1;
    const QStep next = steps.after(step);
    wait_copies<Config::copies, 0>();
    const bool any_dead = __syncthreads_or(dead);  // A
    if (any_dead) {
      clear_dead_rows(c, step, c.q(step.stage));
      clear_dead_rows(c, step, c.dout(step.stage));
      __syncthreads();
    }
    if (ring && i + 1 < steps.count) dead = load_q_step(c, next);
    backward_step(c, step, kv_tile, any_dead, dk, dv);
    if (!ring && i + 1 < steps.count) {
      __syncthreads();  // C
      dead = load_q_step(c, next);
    }
    step = next;
  }
  store_kv<Config>(c, c.params.dk, c.params.shape.head_dim, kv_begin, c.params.scale, dk);
  store_kv<Config>(c, c.params.dv, c.params.shape.head_dim_v, kv_begin,
                   value_factor<Config>(c.params), dv);
}

template <class Config>
__device__ inline void backward(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(BackwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const WorkItem item = head_work_item(params.shape, params.shape.heads_kv);
  const BackwardContext<Config> c{params, shared, item, sequence<Config>(params, item.entry),
                                  params.shape.heads_q / params.shape.heads_kv};

  const int q_tiles = ceil_div(c.seq.rows_q, Config::block_q);
  for (int head = item.head * c.group; head < (item.head + 1) * c.group; ++head) {
    for (int i = 0; i < q_tiles; ++i) {
      if (is_dead_tile<Config>(params, c.seq, head, i)) {
        store_dead_tile(c, head, i);
      } else if (!Mask<Config>::has_first && !Config::Score::skips && !Config::Lengths::vary) {
        break;  // later queries see more
      }
    }
  }
  const int kv_tiles = ceil_div(c.seq.rows_kv, Config::block_kv);
  for (int j = 0; j < kv_tiles; ++j) backward_kv_tile(c, j);
}

}  // namespace cuflash::fa1
