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

// The steps of a warp. Copies are committed in the order K, V of one tile after the other; as many
// are on their way as there are slots.
template <class Config>
__device__ inline void walk_keys(const FewContext<Config>& c, FewState<Config>& state) {
  using Types = FewTypes<Config>;
  constexpr int slots = Config::num_slots, warps = Config::warps;
  const float factor = logit_factor<Config>(c.params);
  auto& ring = c.shared.rings[c.warp()];
  const int first = c.first_tile();
  FewLoads<Config> loads(c, ring, first);
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    if (slot % 2 == 0) {
      loads.keys();
    } else {
      loads.values();
    }
  }
  __syncthreads();  // Q is there
  const auto* const q = reinterpret_cast<const uint4*>(c.shared.q.data);
  int slot = 0;
  const auto arrived = [&] {  // the slot of the next matrix
    wait_copies<Config::copies, slots - 1>();
    __syncwarp();
    auto* const data = ring.slots[slot].data;
    slot = slot + 1 == slots ? 0 : slot + 1;
    return data;
  };
  const auto load_next = [&](bool keys) {  // once every lane has read the slot
    __syncwarp();
    if (keys) {
      loads.keys();
    } else {
      loads.values();
    }
  };
#pragma unroll 1
  for (int tile = first; tile < c.range.end; tile += warps) {
    typename Types::Scores scores;
    scores.fill(0);
    FewProducts<Config>::score(scores, q, {arrived()});
    load_next(slots % 2 == 0);
    const int key0 = tile * Config::block_kv;
    prepare_scores<Config>(c.params, scores, c.seq, c.item.head, c.first_query(), key0,
                           is_edge_tile<Config>(c.seq, c.first_query(), key0));
    exponentiate_few(state, scores, factor);
    FewProducts<Config>::add(state.output, scores, {arrived()});
    load_next(slots % 2 != 0);
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
