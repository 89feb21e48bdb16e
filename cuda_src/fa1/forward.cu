// FlashAttention-1, forward pass: Algorithms 1 and 2 of Dao, Fu, Ermon, Rudra, Re, "FlashAttention:
// Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022).
//
// One thread block does one (batch, head). K and V tiles are the outer loop and stay in shared
// memory while the block visits the Q tiles that see them. O, l and m are in device memory; every
// step reads and writes them, and normalises O. The last step of a Q tile writes the rounded output
// and the log-sum-exp instead of the workspace.
//
// Barriers of a step, each of one row group, and what holds after each:
//   A  Q_i has arrived, and no warp still reads the shared memory of the step before
//   B  no warp still reads Q_i, so Q_{i+1} may replace it; the row maxima are published
//   C  O_i has arrived; partial outputs and row sums are published
// Barriers of the whole block are only around a change of K and V.
#include "forward_steps.cuh"

namespace cuflash::fa1 {

// One (q tile, kv tile) pair. Q_i is being copied; the copy of the next one starts here.
template <class Config>
__device__ inline void forward_step(const ForwardContext<Config>& c, const Block& block,
                                    int next_q_tile, int kv_tile) {
  using Types = ForwardTypes<Config>;
  using Compute = typename Config::Compute;
  const int kv_begin = kv_tile * Config::block_kv;
  const Compute factor = logit_factor<Config>(c.params);
  const KvRange seen = shown_range<Config>(c.params, c.seq, c.item.head, block.index);
  const bool first = kv_tile == seen.begin;
  const bool last = kv_tile == seen.end - 1;

  wait_copies<Config::copies, 0>();
  c.warp.sync_row();  // A
  if (!first) load_o_tile(c, block.index);
  typename Types::Rows old_max, old_sum;
  load_statistics<Config>(c, block.index, first, old_max, old_sum);

  typename Types::Scores scores;
  score_tile(c, scores, block.index, kv_begin, block.edge);
  typename Types::Rows new_max = row_maxima(scores);
  publish_rows<Config>(c, c.group().row_max.data, new_max);

  c.warp.sync_row();  // B
  if (next_q_tile >= 0) load_q_tile(c, next_q_tile);
  gather_rows<Config>(c, c.group().row_max.data, new_max,
                      [](Compute a, Compute b) { return larger(a, b); });
  new_max.for_each([&](Compute& x, int m, int group) {
    x = larger(rounded_product(x, factor), old_max.value[m][group]);
  });

  typename Types::Rows sum = exponentiate<Config>(scores, new_max, factor);
  publish_rows<Config>(c, c.group().row_sum.data, sum);
  drop_weights<Config>(
      c.params,
      RowsOfQueries{c.seq.entry, c.item.head, c.first_query(block.index), kv_begin + c.key0()},
      scores);
  typename Types::Output output;
  output.fill(0);
  Products<Config>::multiply_weights(output, scores, depth_by_rows(c.v(), Zero{}, c.key0()), c.p(),
                                     0, c.key0());
  publish_output<Config>(c, output);

  wait_o_tile<Config>(next_q_tile >= 0);
  c.warp.sync_row();  // C
  gather_rows<Config>(c, c.group().row_sum.data, sum, [](Compute a, Compute b) { return a + b; });
  gather_output<Config>(c, output);
  typename Types::Rows keep, kept;
  update_statistics<Config>(c, old_max, old_sum, new_max, sum, keep, kept, block.index, last);
  update_output<Config>(c, output, keep, sum, kept, block.index, first, last);
}

template <class Config>
__device__ inline void forward(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ForwardStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const WorkItem item = head_work_item(params.shape, params.shape.heads_q);
  const ForwardContext<Config> c{params, shared, item, sequence<Config>(params, item.entry),
                                 item.head / (params.shape.heads_q / params.shape.heads_kv)};

  const int q_tiles = ceil_div(c.seq.rows_q, Config::block_q);
  for (int i = 0; i < q_tiles; ++i) {
    if (is_dead_tile<Config>(params, c.seq, item.head, i)) {
      store_dead_tile(c, i);
    } else if (!Mask<Config>::has_first && !Config::Score::skips && !Config::Lengths::vary) {
      break;  // later queries see more
    }
  }

  const int kv_tiles = ceil_div(c.seq.seqlen_kv, Config::block_kv);
  for (int j = 0; j < kv_tiles; ++j) {
    const QBlocks<Config> blocks(c.seq, j * Config::block_kv);
    if (blocks.begin >= blocks.end) {
      if (Mask<Config>::has_first) continue;  // queries may see later keys
      break;                                  // no query sees later keys either
    }
    const auto shown_from = [&](int q_tile) {
      return next_shown<Config>(params, c.seq, item.head, q_tile, blocks.end, j);
    };
    const int begin = shown_from(blocks.begin);
    if (Config::Score::skips && begin == blocks.end) continue;
    __syncthreads();  // every group has read K and V before these
    load_kv_tile(c, j * Config::block_kv);
    load_q_tile(c, begin);
    wait_copies<Config::copies, 0>();
    __syncthreads();  // K_j and V_j have arrived
    for (int i = begin; i < blocks.end;) {
      const int next = shown_from(i + 1);
      forward_step(c, blocks[i], next < blocks.end ? next : -1, j);
      i = next;
    }
  }
}

}  // namespace cuflash::fa1
