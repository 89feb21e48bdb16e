// FlashAttention-3 forward, the math role: a warpgroup's 64 rows of every tile of the block.
#pragma once

#include "../ptx/barrier_arrive.cuh"
#include "forward_store.cuh"

namespace cuflash::fa3 {

// Blocks of keys for one warpgroup, from the last to the first. It skips the blocks that none of
// its rows sees, and masks those that one of its rows does not see whole.
template <class Config>
struct WarpgroupBlocks {
  int row0;       // of the warpgroup
  KvRange seen;   // blocks that are computed: at least one of the tile's
  KvRange whole;  // blocks that need no mask; may be empty

  __device__ WarpgroupBlocks(const ForwardTile<Config>& tile, int warpgroup)
      : row0(tile.q_begin() + warpgroup * kRowsOfWarpgroup), seen{0, 0}, whole{0, 0} {
    const Sequence& seq = tile.seq;
    const int last_row = min(row0 + kRowsOfWarpgroup, seq.seqlen_q) - 1;
    seen.end = ceil_div(Mask<Config>::visible_end(seq, last_row), Config::block_kv);
    seen.end = max(tile.kv.begin + 1, min(tile.kv.end, seen.end));
    whole.end = Mask<Config>::visible_end(seq, row0) / Config::block_kv;
    if constexpr (Config::Chunks::split) seen.begin = tile.kv.begin;
    if constexpr (Mask<Config>::has_first) {
      seen.begin = Mask<Config>::visible_begin(seq, row0) / Config::block_kv;
      seen.begin = max(tile.kv.begin, min(seen.begin, seen.end - 1));
      whole.begin = ceil_div(Mask<Config>::visible_begin(seq, last_row), Config::block_kv);
    }
  }

  // Whether the first block that is computed, the last of the keys, needs a mask.
  __device__ bool last_is_edge() const {
    return seen.end > whole.end || (Mask<Config>::has_first && seen.end <= whole.begin);
  }
};

// A warp's state from step to step.
template <class Config, class Types = ForwardTypes<Config>>
struct ForwardState {
  typename Types::Output output;  // not yet divided by the rows' sums
  // Weights of the block whose product with V is not issued yet, as left operands 16 keys deep.
  unsigned weights[Config::block_kv / 16][4];
  RowState<Config> rows;
};

template <class Config, class Types = ForwardTypes<Config>>
struct ForwardMath {
  using Scores = typename Types::Scores;
  using Rows = typename Types::Rows;
  using State = ForwardState<Config>;
  const ForwardContext<Config>& c;
  const int warpgroup;
  const int warp_row;  // of this warp among its warpgroup's rows
  const float factor;
  const typename Config::Weights dropping;
  PipelineState<Config::q_stages> q_place;
  PipelineState<Config::num_stages> k_place;
  PipelineState<Config::num_stages> v_place;
  static constexpr bool has_operand = Config::operand_stages > 0;
  PipelineState<has_operand ? Config::operand_stages : 1> operand_place;

  __device__ ForwardMath(const ForwardContext<Config>& c, int warpgroup)
      : c(c),
        warpgroup(warpgroup),
        warp_row(static_cast<int>(threadIdx.x) / 32 % 4 * 16),
        factor(Logits<Config>::factor(Config::Score::unit(c.params))),
        dropping(c.params) {}

  // Warpgroups take turns at issuing products, so that one's softmax runs beside another's
  // products. Every warpgroup takes one turn for each block of a tile.
  __device__ void take_turn() const {
    if constexpr (takes_turns) {
      jitter<Config>();
      ptx::named_barrier(1 + warpgroup, 2 * kWarpgroup);
    }
  }
  __device__ void pass_turn() const {
    if constexpr (takes_turns) {
      jitter<Config>();
      const int next = warpgroup + 1 == Types::warpgroups ? 0 : warpgroup + 1;
      ptx::named_barrier_arrive(1 + next, 2 * kWarpgroup);
    }
  }
  __device__ void open_turns() const {
    if (warpgroup == Types::warpgroups - 1) pass_turn();
  }

  __device__ void wait_k() const { wait<Config>(c.shared.k_full[k_place.stage], k_place.phase); }
  __device__ void wait_v() const { wait<Config>(c.shared.v_full[v_place.stage], v_place.phase); }
  __device__ void wait_q() const {
    wait<Config>(c.shared.q_full[q_place.stage][warpgroup], q_place.phase);
  }
  __device__ void release_k() {
    arrive_warp<Config>(c.shared.k_empty[k_place.stage]);
    k_place.advance();
  }
  __device__ void release_v() {
    arrive_warp<Config>(c.shared.v_empty[v_place.stage]);
    v_place.advance();
  }
  __device__ void release_q() {
    arrive_warp<Config>(c.shared.q_empty[q_place.stage][warpgroup]);
    q_place.advance();
  }
  __device__ void wait_operand() const {
    if constexpr (has_operand) {
      wait<Config>(c.shared.operand_full[operand_place.stage], operand_place.phase);
    }
  }
  __device__ void release_operand() {
    if constexpr (has_operand) {
      __syncwarp();
      arrive_warp<Config>(c.shared.operand_empty[operand_place.stage]);
      operand_place.advance();
    }
  }

  // Skips blocks that no row of this warpgroup sees. It still waits for them: an arrival before a
  // phase has begun would count for the phase before.
  __device__ void skip(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_k();
      __syncwarp();  // no lane may still be waiting for a phase that the arrival ends
      release_k();
      take_turn();
      pass_turn();
      // The operand is released before V is awaited: load brings V of this block after the operand
      // of the next one, which needs this stage if there is only one.
      wait_operand();
      release_operand();
      wait_v();
      __syncwarp();
      release_v();
    }
  }

  // Clears the queries beyond a used length, as the copy engine clears those beyond an array. Their
  // rows would otherwise raise the references of other rows and change how these are rounded.
  __device__ void clear_surplus_queries(const ForwardTile<Config>& tile, int row0) const {
    if constexpr (Config::Lengths::vary) {
      const int count = max(0, tile.seq.seqlen_q - row0);
      if (count >= kRowsOfWarpgroup) return;
      clear_rows<kWarpgroup>(c.shared.q[q_place.stage][warpgroup], count);
      ptx::named_barrier(1 + Types::warpgroups + warpgroup, kWarpgroup);
    }
  }

  // scores = Q K^T, as one group of products.
  __device__ __forceinline__ void issue_scores(Scores& scores) const {
    const DepthInColumns<typename Types::QPanels> q(c.shared.q[0][0]);
    const DepthInColumns<typename Types::KPanels> k(c.shared.k[0]);
    const unsigned q_step =
        (q_place.stage * Types::warpgroups + warpgroup) * (sizeof(typename Types::QPanels) / 16);
    const unsigned k_step = k_place.stage * (sizeof(typename Types::KPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < Config::head_dim; depth += 16) {
      ptx::wgmma<false, false>(typename Config::Storage{}, scores.value[0], q.at(depth) + q_step,
                               k.at(depth) + k_step, depth > 0);
    }
    ptx::wgmma_commit();
  }

  // output += weights V, as one group of products.
  __device__ __forceinline__ void issue_output(State& state) const {
    const DepthInRows<typename Types::VPanels> v(c.shared.v[0]);
    const unsigned v_step = v_place.stage * (sizeof(typename Types::VPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Config::block_kv; key += 16) {
      ptx::wgmma<true>(typename Config::Storage{}, state.output.value[0], state.weights[key / 16],
                       v.at(key) + v_step);
    }
    ptx::wgmma_commit();
  }

  // Turns the products Q K^T into scores, and sets those of hidden pairs to minus infinity.
  template <class Blocks>
  __device__ __forceinline__ void mask(const ForwardTile<Config>& tile, const Blocks& blocks,
                                       Scores& scores, int block, bool masked) const {
    const RowsOfQueries where = place(tile, blocks, block);
    if constexpr (Config::listed) {
      change_scores<Config, Applied::changing>(c.params, where, scores);
      if (!blocks.shown.every) change_scores<Config, Applied::hiding>(c.params, where, scores);
      masked = Mask<Config>::template is_edge<kRowsOfWarpgroup, Config::block_kv>(
          tile.seq, blocks.row0, block * Config::block_kv);
    } else {
      change_scores<Config>(c.params, where, scores);
    }
    if (masked) apply_mask<Config>(scores, tile.seq, where);
  }
  template <class Blocks>
  __device__ __forceinline__ RowsOfQueries place(const ForwardTile<Config>& tile,
                                                 const Blocks& blocks, int block) const {
    const int key0 = block * Config::block_kv;
    if constexpr (Config::listed) {
      RowsOfQueries where = place_of_operand(tile, blocks.row0, key0);
      where.shown = blocks.shown;
      return where;
    } else {
      return place_of_operand(tile, blocks.row0, key0);
    }
  }
  __device__ __forceinline__ RowsOfQueries place_of_operand(const ForwardTile<Config>& tile,
                                                            int row0, int key0) const {
    if constexpr (has_operand) {
      const auto& panels = c.shared.operand[operand_place.stage];
      const int row = warpgroup * kRowsOfWarpgroup + warp_row;
      return {tile.item.entry,
              tile.item.head,
              row0 + warp_row,
              key0,
              {panels.data, panels.panel_bytes, row, 0, false}};
    } else {
      return {tile.item.entry, tile.item.head, row0 + warp_row, key0};
    }
  }

  // Whether the terms of the scores are computed in the loop that makes the weights, which is
  // possible only if no mask follows. Terms and weights may both need the special function unit,
  // which then works on both at once. Terms that read shared memory, and score functions of the
  // caller that use positions, are applied before the loop: the compiler would hoist them out of it
  // and keep them in registers.
  template <bool masked>
  static constexpr bool changes_late =
      !masked && !Config::Score::is_empty && !has_operand && !Config::Score::by_position;

  // The terms of the scores of a block that are still to be applied.
  template <bool masked, class Blocks>
  __device__ __forceinline__ auto late_change(const ForwardTile<Config>& tile, const Blocks& blocks,
                                              int block) const {
    if constexpr (changes_late<masked>) {
      return ScoreChange<Config, Scores, RowsOfQueries>(c.params, place(tile, blocks, block));
    } else {
      return NoChange();
    }
  }

  // Raises the references to the maxima so far, and rescales the output.
  template <class Change>
  __device__ __forceinline__ void rescale(State& state, const Scores& scores,
                                          const Change& change) const {
    Rows keep = lane_maxima(scores, change);
    raise_references(state.rows, keep, factor);
    state.output.for_each([&](float& x, int m, int, int group, int) { x *= keep.value[m][group]; });
  }

  // Writes the weights of change(scores) to state.weights, whose product has retired, and adds
  // their sums. Maxima are computed only while some row has no reference, where a term may raise
  // the scores by more than the slack, or if a sum shows that weights are too large. The loop runs
  // once, rarely twice; it keeps the code short.
  template <class Change>
  __device__ __forceinline__ void exponentiate(State& state, const Scores& scores,
                                               const Change& change) const {
    bool raise = !state.rows.settled;
    if constexpr (Change::may_rise) raise |= change.rises(Logits<Config>::slack() / factor);
    Rows sums;
#pragma unroll 1
    while (true) {
      if (raise) rescale(state, scores, change);
      sums = exponentiate_scores<Config>(state.weights, scores, state.rows, factor, change);
      bool fits = true;  // a NaN does not fit
      sums.for_each([&](float& x, int, int) { fits &= x < Logits<Config>::most_weight(); });
      if (raise || __all_sync(0xffffffffu, fits)) break;
      raise = true;
    }
    sums.for_each([&](float& x, int m, int group) { state.rows.sum.value[m][group] += x; });
  }

  // Clears the dropped weights of a block. The sums keep them.
  template <class Blocks>
  __device__ __forceinline__ void drop(const ForwardTile<Config>& tile, const Blocks& blocks,
                                       State& state, int block) const {
    if constexpr (Config::Weights::drops) {
      for_each_mask<Config, Scores>(c.params, dropping, place(tile, blocks, block),
                                    [&](unsigned mask, int, int n, int group) {
                                      state.weights[n / 2][n % 2 * 2 + group] &= mask;
                                    });
    }
  }

  // Scores and weights of a tile's first block.
  template <class Blocks>
  __device__ __forceinline__ void first_scores(const ForwardTile<Config>& tile, Blocks& blocks,
                                               State& state) {
    Scores scores;
    wait_q();
    clear_surplus_queries(tile, blocks.row0);
    wait_k();
    if constexpr (Config::listed) blocks.find(c, k_place.stage);
    take_turn();
    issue_scores(scores);
    pass_turn();
    if constexpr (Config::listed) blocks.agree();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(scores.value[0]);
    release_k();
    if (blocks.seen.end == blocks.seen.begin + 1) release_q();
    begin_rows(state.rows);
    wait_operand();
    mask(tile, blocks, scores, blocks.seen.end - 1, blocks.last_is_edge());
    release_operand();
    state.output.fill(0);
    exponentiate(state, scores, NoChange());
    drop(tile, blocks, state, blocks.seen.end - 1);
  }

  // The scores of a block, issued together with weights times V of the block before. The softmax
  // follows both, because it overwrites the weights that this product reads.
  template <bool masked, class Blocks>
  __device__ __forceinline__ void step(const ForwardTile<Config>& tile, Blocks& blocks,
                                       State& state, int block) {
    Scores scores;
    wait_k();
    if constexpr (Config::listed) blocks.find(c, k_place.stage);
    take_turn();
    issue_scores(scores);
    wait_v();
    issue_output(state);
    pass_turn();
    if constexpr (Config::listed) {
      blocks.agree();
      block = blocks.note.block.tile;
    }
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(scores.value[0]);
    release_k();
    if (block == blocks.seen.begin) release_q();
    wait_operand();
    if constexpr (!changes_late<masked>) mask(tile, blocks, scores, block, masked);
    release_operand();
    const auto change = late_change<masked>(tile, blocks, block);  // loads beside the products
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(state.output.value[0]);
    release_v();
    exponentiate(state, scores, change);
    drop(tile, blocks, state, block);
  }

  // Issues the last product of a tile, computes the log-sum-exp beside it, and stores the output.
  // Where lengths vary, reads the tile from its slot again.
  __device__ __forceinline__ void finish(const ForwardTile<Config>& tile,
                                         const QueuedItem<Config>& slot, int row0, State& state) {
    wait_v();
    issue_output(state);
    if constexpr (Config::Lengths::vary) {
      end_tile(c.tile(slot), row0, state);
    } else {
      end_tile(tile, row0, state);
    }
  }

  __device__ __forceinline__ void end_tile(const ForwardTile<Config>& tile, int row0,
                                           State& state) {
    const Rows inverse = end_rows(c, tile, state.rows, row0 + warp_row);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(state.output.value[0]);
    release_v();
    store_rows(c, tile, state.output, inverse, row0 + warp_row);
  }

  __device__ __forceinline__ void one_tile(const ForwardTile<Config>& tile,
                                           const QueuedItem<Config>& slot, State& state) {
    const WarpgroupBlocks<Config> blocks(tile, warpgroup);
    skip(tile.kv.end - blocks.seen.end);
    first_scores(tile, blocks, state);
    int block = blocks.seen.end - 2;
    if constexpr (Mask<Config>::has_first) {
      const int masked_end = max(blocks.whole.end, blocks.seen.begin);
#pragma unroll 1
      for (; block >= masked_end; --block) step<true>(tile, blocks, state, block);
#pragma unroll 1
      for (; block >= max(blocks.whole.begin, blocks.seen.begin); --block) {
        step<false>(tile, blocks, state, block);
      }
#pragma unroll 1
      for (; block >= blocks.seen.begin; --block) step<true>(tile, blocks, state, block);
    } else {
      const int first = Config::Chunks::split ? blocks.seen.begin : 0;
      const int masked_end =
          Config::Chunks::split ? max(blocks.whole.end, first) : blocks.whole.end;
#pragma unroll 1
      for (; block >= masked_end; --block) step<true>(tile, blocks, state, block);
#pragma unroll 1
      for (; block >= first; --block) step<false>(tile, blocks, state, block);
    }
    finish(tile, slot, blocks.row0, state);
    if constexpr (Mask<Config>::has_first) skip(blocks.seen.begin - tile.kv.begin);
  }

 private:
  static constexpr bool takes_turns = Types::warpgroups > 1 && Config::takes_turns;
};

}  // namespace cuflash::fa3
