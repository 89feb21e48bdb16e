// FlashAttention-2, forward pass for few queries, as of a step of decoding: Dao et al.,
// "Flash-Decoding for long-context inference" (2023), inside one thread block.
//
// One block does one q tile of 16 rows of one (batch, head), or a chunk of its keys. Its warps have
// the same rows and divide the tiles of keys: tile t belongs to warp t % warps. Each warp has a
// ring of its own for K and V, which it fills itself, so no warp waits for another before the end.
// Such a pass reads every key once and does little with it: what counts is that enough copies are
// on their way at all times.
//
// At its end each warp has an output, a reference and a sum for every row. They are merged in the
// order of the warps.
#include "forward_few_load.cuh"
#include "forward_few_store.cuh"

namespace cuflash::fa2 {

// Moves references to the rows' maxima where these have risen by more than the slack, and turns
// scores into weights.
template <class Config>
__device__ inline void exponentiate_few(FewState<Config>& state,
                                        typename FewTypes<Config>::Scores& scores, float factor) {
  auto maxima = row_maxima(scores);
  typename FewTypes<Config>::Rows keep;
  if (move_references<Config>(state.reference, keep, maxima, factor)) {
    state.sum.for_each([&](float& x, int m, int group) { x *= keep.value[m][group]; });
    state.output.for_each([&](float& x, int m, int, int group, int) { x *= keep.value[m][group]; });
  }
  const auto offset = offsets_of(state.reference);
  exponentials<Config>(scores, factor,
                       [&](int m, int, int group, int) { return offset.value[m][group]; });
  scores.for_each([&](float& x, int m, int, int group, int) { state.sum.value[m][group] += x; });
}

// The steps of a warp. Copies are committed in the order K, V of one step after the other, and
// `num_stages` steps are on their way.
template <class Config>
__device__ inline void walk_keys(const FewContext<Config>& c, FewState<Config>& state) {
  using Types = FewTypes<Config>;
  constexpr int stages = Config::num_stages, warps = Config::warps;
  constexpr int ahead = stages * warps;  // tiles
  const float factor = logit_factor<Config>(c.params);
  auto& ring = c.shared.rings[c.warp()];
  const int first = c.first_tile();
  FewLoads<Config> loads{c};
  loads.find(first);
#pragma unroll
  for (int stage = 0; stage < stages; ++stage) {
    loads.find(first + (stage + 1) * warps);
    loads.keys(ring.stages[stage], first + stage * warps);
    loads.values(ring.stages[stage], first + stage * warps);
  }
  __syncthreads();  // Q is there
  const auto* const q = reinterpret_cast<const uint4*>(c.shared.q.data);
  int stage = 0;
#pragma unroll 1
  for (int tile = first; tile < c.range.end; tile += warps) {
    auto& now = ring.stages[stage];
    wait_copies<Config::copies, 2 * stages - 1>();
    __syncwarp();
    typename Types::Scores scores;
    scores.fill(0);
    FewProducts<Config>::score(scores, q, {now.k.data});
    __syncwarp();
    loads.find(tile + ahead + warps);
    loads.keys(now, tile + ahead);
    const int key0 = tile * Config::block_kv;
    prepare_scores<Config>(c.params, scores, c.seq, c.item.head, c.first_query(), key0,
                           is_edge_tile<Config>(c.seq, c.first_query(), key0));
    exponentiate_few(state, scores, factor);
    wait_copies<Config::copies, 2 * stages - 1>();
    __syncwarp();
    FewProducts<Config>::add(state.output, scores, {now.v.data});
    __syncwarp();
    loads.values(now, tile + ahead);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

template <class Config>
__device__ inline void forward_few(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<FewStorage<Config>*>(shared_bytes);
  static_assert(sizeof(FewStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const Shape& shape = params.shape;
  const TileOrder<Config::entries_inside> order{q_tiles_of_head<Config>(params),
                                                static_cast<unsigned>(shape.heads_q),
                                                static_cast<unsigned>(params.head_group)};
  if (Config::Lengths::packed && blockIdx.x >= order.tiles * order.heads) return;
  const auto [item, seq] = q_item_of<Config>(params, order, blockIdx.x);
  const KvBlocks<Config> blocks(params, seq, item);
  if constexpr (Config::Chunks::split) {
    if (blocks.count() == 0) return;
  }
  const int kv_head = item.head / (shape.heads_q / shape.heads_kv);
  const FewContext<Config> c{params, shared, item, seq, blocks.range, kv_head};
  load_few_q(c);
  FewState<Config> state;
  state.output.fill(0);
  state.reference.for_each(
      [&](float& reference, int m, int group) { begin_row(reference, state.sum.value[m][group]); });
  walk_keys(c, state);
  post_rows(c, state);
  __syncthreads();
  store_few(c);
}

}  // namespace cuflash::fa2
