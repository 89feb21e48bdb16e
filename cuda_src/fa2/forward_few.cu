// FlashAttention-2, forward pass for few queries, as in decoding: Dao et al., "Flash-Decoding for
// long-context inference" (2023), inside one thread block.
//
// One block does one q tile of 16 queries of one (batch, head), or a chunk of its keys. Where query
// heads share keys, up to 32 rows of a block are queries of several heads, and several blocks may
// share the queries of a q tile. Its warps have the same rows and divide the tiles of keys: tile t
// belongs to warp t % warps. Each warp has a ring of its own for K and V, which it fills itself, so
// no warp waits for another before the end. Such a pass reads every key once and does little with
// it: what counts is that enough copies are on their way at all times.
//
// At its end each warp has an output, a reference and a sum for every row. They are merged in the
// order of the warps.
#include "../ptx/dependent_launch.cuh"
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

// Changes the raw products of a tile of keys to scores.
template <class Config>
__device__ inline void prepare_few(const FewContext<Config>& c,
                                   typename FewTypes<Config>::Scores& scores, int key0) {
  using Scores = typename FewTypes<Config>::Scores;
  const int query0 = c.rows.query0;
  const bool edge = is_edge_tile<Config>(c.seq, query0, key0);
  if constexpr (!Config::packs_heads) {
    prepare_scores<Config>(c.params, scores, c.seq, c.item.head, query0, key0, edge);
  } else {  // no term depends on the query or the head
    change_scores<Config>(c.params, RowsOfQueries{c.seq.entry, c.rows.head0, query0, key0}, scores);
    if (!edge) return;
    const LanePosition lane;
    scores.for_each([&](float& s, int m, int n, int group, int which) {
      const int i = c.rows.query(lane.row + Scores::row(m, group));
      const int j = key0 + lane.column + Scores::column(n, which);
      if (!Mask<Config>::visible(c.seq, i, j)) s = -infinity<float>();
    });
  }
}

// A warp's walk over its tiles of keys.
template <class Config>
struct KeyWalk {
  using Types = FewTypes<Config>;
  static constexpr int slots = Config::num_slots;
  const FewContext<Config>& c;
  FewRing<Config>& ring;
  const float factor;
  int tile;      // the next one
  int slot = 0;  // of the next matrix
  FewLoads<Config> loads;

  __device__ KeyWalk(const FewContext<Config>& c)
      : c(c),
        ring(c.shared.rings[c.warp()]),
        factor(logit_factor<Config>(c.params)),
        tile(c.first_tile()),
        loads(c, ring, tile) {
#pragma unroll
    for (int i = 0; i < slots; ++i) load(i % 2 == 0);
  }

  // Adds the tiles before `end` to the rows. Copies are committed tile by tile, K before V; as many
  // are on their way as there are slots.
  __device__ void add_until(int end, FewState<Config>& state) {
    const auto* const q = reinterpret_cast<const uint4*>(c.shared.q.data);
#pragma unroll 1
    for (; tile < end; tile += Config::warps) {
      typename Types::Scores scores;
      scores.fill(0);
      FewProducts<Config>::score(scores, q, {arrived()});
      load_next(slots % 2 == 0);
      const int key0 = tile * Config::block_kv;
      prepare_few(c, scores, key0);
      exponentiate_few(state, scores, factor);
      FewProducts<Config>::add(state.output, scores, {arrived()});
      load_next(slots % 2 != 0);
    }
  }

 private:
  // The next matrix, once it is there.
  __device__ auto* arrived() {
    wait_copies<Config::copies, slots - 1>();
    __syncwarp();
    auto* const data = ring.slots[slot].data;
    slot = slot + 1 == slots ? 0 : slot + 1;
    return data;
  }
  // Loads a matrix to the slot of the one that every lane has read.
  __device__ void load_next(bool keys) {
    __syncwarp();
    load(keys);
  }
  __device__ void load(bool keys) {
    if (keys) {
      loads.keys();
    } else {
      loads.values();
    }
  }
};

template <class Config>
__device__ inline void begin_few(FewState<Config>& state) {
  state.output.fill(0);
  state.reference.for_each(
      [&](float& reference, int m, int group) { begin_row(reference, state.sum.value[m][group]); });
}

// Adds the tiles before `end` to new rows, and puts them in shared memory for all threads.
template <class Config>
__device__ inline void add_and_post(const FewContext<Config>& c, KeyWalk<Config>& walk, int end) {
  FewState<Config> state;
  begin_few(state);
  walk.add_until(end, state);
  post_rows(c, state);
  __syncthreads();
}

// Computes one chunk after the other, and merges their results as if each chunk had a block of its
// own.
template <class Config>
__device__ inline void merge_all_chunks(const FewContext<Config>& c, KeyWalk<Config>& walk) {
  const int tiles = static_cast<int>(c.params.chunk_tiles);
  int number = 0;
  int end = (c.range.begin / tiles + 1) * tiles;
#pragma unroll 1
  for (int begin = c.range.begin; begin < c.range.end; begin = end, end += tiles, ++number) {
    add_and_post(c, walk, min(end, c.range.end));
    merge_chunk(c, number);
    __syncthreads();
  }
  store_merged(c, number);
}

template <class Config>
__device__ inline void forward_few(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<FewStorage<Config>*>(shared_bytes);
  static_assert(sizeof(FewStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const Shape& shape = params.shape;
  unsigned block = blockIdx.x, heads = shape.heads_q, part = 0;
  if constexpr (Config::packs_heads) {
    const auto parts = static_cast<unsigned>(params.parts);
    part = block % parts;
    block /= parts;
    heads /= static_cast<unsigned>(params.heads_of_block);
  }
  const TileOrder<Config::entries_inside> order{q_tiles_of_head<Config>(params), heads,
                                                static_cast<unsigned>(params.head_group)};
  if (Config::Lengths::packed && block >= order.tiles * order.heads) return;
  const auto [item, seq] = q_item_of<Config>(params, order, block);
  const FewRows<Config> rows(params, item, seq, static_cast<int>(part));
  if (Config::packs_heads && rows.count <= 0) return;
  const KvBlocks<Config> blocks(params, seq, item);
  if constexpr (Config::Chunks::split) {
    if (blocks.count() == 0) return;
  }
  if constexpr (Config::Chunks::split && Config::architecture >= 90) ptx::let_next_kernel_begin();
  const int kv_head = rows.head0 / (shape.heads_q / shape.heads_kv);
  const FewContext<Config> c{params, shared, item, seq, blocks.range, rows, kv_head};
  KeyWalk<Config> walk(c);  // the first keys are on their way
  load_few_q(c);
  __syncthreads();  // Q is there
  if constexpr (Config::merges_chunks) {
    merge_all_chunks(c, walk);
  } else {
    add_and_post(c, walk, c.range.end);
    store_chunk(c);
  }
}

}  // namespace cuflash::fa2
