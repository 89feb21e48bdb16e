// FlashAttention-3 backward, the math role: the products of a warpgroup, and a step of its 64 keys.
#pragma once

#include "backward_dropped.cuh"
#include "backward_store.cuh"

namespace cuflash::fa3 {

template <class Config, class Types = BackwardTypes<Config>>
struct BackwardMath {
  using Storage = typename Config::Storage;
  using Scores = typename Types::Scores;
  using QGradient = typename Types::QGradient;
  using Ring = RingPlace<Config::num_stages>;
  using ScoreRing = RingPlace<Config::score_stages>;
  static constexpr bool has_slope = Config::Score::has_slope;
  // Whether P times the slopes is rounded as well as P: with 128 queries a step the registers
  // cannot hold both in float32.
  static constexpr bool rounds_sloped = has_slope && Types::q_parted_by_rows;
  static constexpr int exponent =
      rounds_sloped || Config::Weights::drops ? rounding_exponent<Config> : 0;  // of P
  const BackwardContext<Config>& c;
  const int warpgroup;
  const int part;       // of the keys of the kv tile
  const int first_row;  // see warp_row
  const float factor;

  __device__ BackwardMath(const BackwardContext<Config>& c, int warpgroup)
      : c(c),
        warpgroup(warpgroup),
        part(Types::keys_shared ? 0 : warpgroup),
        first_row(static_cast<int>(threadIdx.x) / 32 % 4 * 16),
        factor(Logits<Config>::factor(Config::Score::unit(c.params))) {}

  // Row of this warp among the 64 of its warpgroup; recomputed where score tiles are serial.
  __device__ int warp_row() const {
    return Types::serial ? ptx::opaque_warp() % 4 * 16 : first_row;
  }
  __device__ int first_key() const { return c.item.kv_begin + part * kKeysOfWarpgroup; }

  __device__ RowsOfKeys score_place(const StepState& state) const {
    RowsOfKeys place{c.item.entry, state.place.head, state.place.tile * Config::block_q,
                     first_key() + warp_row()};
    if constexpr (Config::packed || Config::listed) place.shown = state.shown;
    return place;
  }

  // score_place() with the tile that a term of the scores reads; waits for the tile.
  __device__ RowsOfKeys await_operand(const StepState& state, int number) const {
    RowsOfKeys place = score_place(state);
    place.staged = await_tile<Config>(c.shared, number, part * kKeysOfWarpgroup + warp_row());
    return place;
  }
  __device__ void release_operand(int number) const { release_tile<Config>(c.shared, number); }

  // Goes on to the next step; `dead_rows` are the dead rows of this step's dQ.
  __device__ void advance(StepState& state, unsigned dead_rows) const {
    state.dead_before = dead_rows;
    if constexpr (!Config::listed) state.place = c.after(state.place);
  }
  // Finds the q tile of a step and its bits. Where steps are listed, only the load role knows the
  // tile; its note comes with Q.
  __device__ __forceinline__ void find_place(StepState& state, int number) const {
    const int along = tiles_of_bits<Config>(c.params.shape);
    const int line = part * kKeysOfWarpgroup + warp_row();
    if constexpr (Config::listed) {
      const Ring ring(number);
      wait<Config>(c.shared.q_full[ring.stage], ring.phase);
      const StepNote note = listed_step<Config>(c, number);
      state.place = {note.head, note.tile()};
      const bool every = __any_sync(0xffffffffu, note.every());
      state.shown = {{{note.pairs >> (2 * part), 0}}, every};
      if constexpr (Config::packed)
        state.shown = shown_pairs<Config>(c, every, note.pairs + line / 16 * along * 32);
    } else if constexpr (Config::packed) {
      const HiddenPairs hidden = hidden_pairs<Config>(c, state.place.head);
      const int lines = lines_of_bits<Config>(c.params.shape);
      const int tile = Config::one_row ? 0 : state.place.tile;
      const unsigned first = hidden.index_of(c.item.kv_begin + line, lines, along);
      state.shown = shown_pairs<Config>(c, false, first + tile * 32);
    }
  }

  // Whether some pair of the warpgroup's keys and a q tile is masked.
  __device__ bool is_edge(const QPlace& place) const {
    return Mask<Config>::template is_edge<Config::block_q, kKeysOfWarpgroup>(
        c.seq, place.tile * Config::block_q, first_key());
  }

  // Whether the warpgroup's keys are hidden from all of a q tile.
  __device__ bool is_hidden(const QPlace& place) const {
    return Mask<Config>::template hides_all<Config::block_q, kKeysOfWarpgroup>(
        c.seq, place.tile * Config::block_q, first_key());
  }

  // S^T = K Q^T or dP^T = V dO^T of the warpgroup's keys, as one group of products.
  template <int depth_end, class Products, class Keys, class Queries>
  __device__ __forceinline__ void issue_scores(Products& scores, const Keys& keys,
                                               const Queries& queries, unsigned stage) const {
    const DepthInColumns<Keys> a(keys);
    const DepthInColumns<Queries> b(queries);
    unsigned a_step = part * (kKeysOfWarpgroup * 128 / 16);
    if constexpr (Config::stays) a_step += c.kv_place() * (sizeof(Keys) / 16);
    const unsigned b_step = stage * (sizeof(Queries) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < depth_end; depth += 16) {
      ptx::wgmma<false, false>(Storage{}, scores.value[0], a.at(depth) + a_step,
                               b.at(depth) + b_step, depth > 0);
    }
    ptx::wgmma_commit();
  }

  // dV += P^T dO or dK += dS^T Q of the first rows of the q tile, as one group of products.
  template <int rows = Config::block_q, class Gradient, class Queries>
  __device__ __forceinline__ void issue_kv(Gradient& gradient, const ScoreOperand<Config>& scores,
                                           const Queries& queries, unsigned stage) const {
    const DepthInRows<Queries> b(queries);
    const unsigned b_step = stage * (sizeof(Queries) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int query = 0; query < rows; query += 16) {
      ptx::wgmma<true>(Storage{}, gradient.value[0], scores.value[query / 16],
                       b.at(query) + b_step);
    }
    ptx::wgmma_commit();
  }

  // Issues the warpgroup's part of dQ = dS K once dS of all keys is written. If the step does not
  // exist, it multiplies stale data and the result is not used: ptxas lets products run
  // asynchronously only if every step issues the same ones.
  template <class Part>
  __device__ __forceinline__ void issue_q(Part& dq, int step, bool exists) const {
    const ScoreRing ring(step);
    if (exists) wait<Config>(c.shared.ds_full[ring.stage], ring.phase);
    const DepthInColumns<typename Types::ScorePanels> a(c.shared.ds[0]);
    const DepthInRows<typename Types::KPanels> b(c.shared.k[0]);
    const unsigned a_step = ring.stage * (sizeof(typename Types::ScorePanels) / 16) +
                            (Types::q_parted_by_rows ? warpgroup * (kRowsOfProduct * 128 / 16) : 0);
    // The second warpgroup's columns begin after the first one's, with a panel.
    constexpr unsigned of_part =
        Types::q_parted_by_rows ? 0 : Types::KPanels::byte_of(Types::q_columns) / 16;
    unsigned b_step = warpgroup * of_part;
    if constexpr (Config::stays) b_step += c.kv_place() * (sizeof(typename Types::KPanels) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < Config::block_kv; key += 16) {
      ptx::wgmma<false, true>(Storage{}, dq.value[0], a.at(key) + a_step, b.at(key) + b_step,
                              key > 0);
    }
    ptx::wgmma_commit();
  }

  // Adds dQ of a step to the sums in device memory, and zeros to the lane's `dead` rows.
  template <class Part>
  __device__ __forceinline__ void add_q(const QPlace& place, unsigned dead, Part& dq,
                                        int step) const {
    const RingPlace<kTurnStages> ring(step);
    if constexpr (Config::half_last) {
      if (warpgroup == 1 && is_last(place)) return;  // its rows lie beyond the length
    }
    if constexpr (Config::ordered) {
      wait<Config>(c.shared.turn_full[ring.stage], ring.phase);
    } else if constexpr (!Config::stays) {
      wait<Config>(c.shared.cleared, 0);
    }
    const int row = place.tile * Config::block_q +
                    (Types::q_parted_by_rows ? warpgroup * kRowsOfProduct : 0) + warp_row();
    const int column = Types::q_parted_by_rows ? 0 : warpgroup * Types::q_columns;
    dq.for_each([&](float& x, int, int, int group, int) {
      if (dead >> group & 1) x = 0;
    });
    add_to_accumulator<Config, ByFragments>(static_cast<float*>(c.params.dq_accumulator), dq,
                                            c.head_row(place.head), row, column,
                                            [](int) { return false; });
    if constexpr (Config::ordered) {
      __syncwarp();
      arrive_warp<Config>(c.shared.added[ring.stage]);
    }
  }

  // A warp says that it will add no more to dQ.
  __device__ __forceinline__ void end_sums() const {
    if constexpr (Config::kv_tiles_per_convert_block > 0 && !Config::ordered) {
      __syncwarp();
      arrive_warp<Config>(c.shared.added[0]);
    }
  }

  // Clears the rows of Q and dO of dead queries, which are rare: a NaN there, multiplied by the
  // zeros of P and dS, would give NaN. Each warpgroup does so before its own dV and dK read these
  // rows. The other warpgroup may read them meanwhile for scores that are hidden, and both write
  // the same zeros, so no order is needed. Returns the dead rows of dQ of this lane.
  template <class... Matrices>
  __device__ unsigned clear_dead(const QPlace& place, const QueryNumbers<Config>& lse,
                                 Matrices&... matrices) const {
    if (!must_clear<Config>(lse, c.seq, place.tile * Config::block_q)) return 0;
    (clear_dead_queries<Config>(matrices, lse), ...);
    ptx::fence_async_shared();
    jitter<Config>();
    // The barrier's number is computed: a variable for this rare case would take a register.
    ptx::named_barrier(static_cast<int>(threadIdx.x) / kWarpgroup, kWarpgroup);
    return dead_rows_of_q(lse);
  }

  __device__ unsigned dead_rows_of_q(const QueryNumbers<Config>& lse) const {
    const LanePosition lane;
    const int row =
        (Types::q_parted_by_rows ? warpgroup * kRowsOfProduct : 0) + warp_row() + lane.row;
    return (lse.value[row] == infinity<float>() ? 1u : 0u) |
           (lse.value[row + 8] == infinity<float>() ? 2u : 0u);
  }

  // Clears the hidden pairs of `scores` (P, dP), and the rows of dead queries in Q and dO. Returns
  // the dead rows of dQ of this lane.
  template <int rows = Config::block_q, class... All>
  __device__ __forceinline__ unsigned hide(const StepState& state, unsigned stage, bool dead,
                                           const RowsOfKeys& place, All&... scores) const {
    const QueryNumbers<Config>& lse = c.shared.lse[stage];
    if (dead) {
      apply_mask<Config, rows>(lse, c.seq, place, scores...);
      return clear_dead(state.place, lse, c.shared.q[stage], c.shared.dout[stage]);
    }
    if (is_edge(state.place)) apply_mask_to_live_queries<Config, rows>(c.seq, place, scores...);
    return 0;
  }

  // P and dS of a step, rounded, where the registers do not hold slopes beside P and dP. Rounds P,
  // times 2^exponent, and P times its slopes before dP is issued. Returns what hide() returns.
  __device__ __forceinline__ unsigned score_serially(ScoreOperand<Config>& weights,
                                                     ScoreOperand<Config>& gradients, Scores& p,
                                                     const StepState& state, const Ring& ring,
                                                     const ScoreRing& score_ring,
                                                     int number) const {
    const unsigned stage = ring.stage;
    const QueryNumbers<Config>& lse = c.shared.lse[stage];
    const RowsOfKeys place = await_operand(state, number);
    const StepBits<Config> bits(c.params, state, score_place(state));
    ScoreOperand<Config> sloped;
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(p.value[0]);
    exponentiate<Config, exponent>(c.params, p, weights, sloped, lse, place, factor);
    release_operand(number);
    const bool dead = has_dead_queries(lse);
    if (dead) {
      apply_mask<Config>(lse, c.seq, place, weights, sloped);
    } else if (is_edge(state.place)) {
      apply_mask_to_live_queries<Config>(c.seq, place, weights, sloped);
    }
    Scores dp;
    wait<Config>(c.shared.dout_full[stage], ring.phase);
    issue_scores<Config::head_dim_v>(dp, c.shared.v[0], c.shared.dout[0], stage);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dp.value[0]);
    wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);
    const unsigned dead_rows = hide(state, stage, dead, score_place(state), dp);
    if constexpr (Config::Weights::drops) {
      differentiate_dropped<Config, exponent>(c, score_place(state), gradients, weights, sloped, dp,
                                              c.shared.delta[stage], bits);
    } else {
      sum_pairs<Config, exponent>(c, score_place(state), weights, dp, c.shared.delta[stage]);
      differentiate_rounded<Config>(gradients, sloped, dp, c.shared.delta[stage]);
    }
    return dead_rows;
  }

  static_assert(!Config::half_last ||
                    (Types::q_parted_by_rows && !Config::ordered && !Mask<Config>::has_first),
                "half steps need 128 queries, sums in no order and no first key");

  // Whether the place is the last q tile of a head.
  __device__ __forceinline__ bool is_last(const QPlace& place) const {
    return place.tile + 1 == c.blocks.end;
  }

  // A step: its scores, then its gradients beside dQ of the step before. Only the first `rows` rows
  // of the q tile count.
  template <int rows = Config::block_q>
  __device__ __forceinline__ void step(StepState& state, typename Types::KGradient& dk,
                                       typename Types::VGradient& dv, int number) const {
    const Ring ring(number);
    const ScoreRing score_ring(number);
    const unsigned stage = ring.stage;
    WarpTile<float, 16, 16, rows> p, dp;
    QGradient dq;
    find_place(state, number);
    wait<Config>(c.shared.q_full[stage], ring.phase);
    issue_scores<Config::head_dim>(p, c.shared.k[0], c.shared.q[0], stage);
    ScoreOperand<Config> weights, gradients;
    unsigned dead_rows;
    if constexpr (rounds_sloped) {
      dead_rows = score_serially(weights, gradients, p, state, ring, score_ring, number);
    } else {
      wait<Config>(c.shared.dout_full[stage], ring.phase);
      issue_scores<Config::head_dim_v>(dp, c.shared.v[0], c.shared.dout[0], stage);
      const StepBits<Config> bits(c.params, state, score_place(state));
      ptx::wgmma_wait<1>();
      ptx::wgmma_hold(p.value[0]);

      const RowsOfKeys place = await_operand(state, number);
      ScoreOperand<Config> sloped;  // used where weights are dropped
      if constexpr (Config::Weights::drops) {
        exponentiate_early<Config, exponent>(c.params, p, weights, sloped, c.shared.lse[stage],
                                             place, factor);
      } else if constexpr (has_slope) {
        exponentiate<Config>(c.params, p, weights, p, c.shared.lse[stage], place, factor);
      } else {
        exponentiate<Config>(c.params, p, c.shared.lse[stage], place, factor);
      }
      release_operand(number);
      const bool dead = has_dead_queries(c.shared.lse[stage]);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(dp.value[0]);
      wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);
      if constexpr (Config::Weights::drops) {
        dead_rows = has_slope ? hide(state, stage, dead, place, weights, sloped, dp)
                              : hide(state, stage, dead, place, weights, dp);
        differentiate_dropped<Config, exponent>(c, place, gradients, weights,
                                                has_slope ? sloped : weights, dp,
                                                c.shared.delta[stage], bits);
      } else if constexpr (has_slope) {
        dead_rows = hide(state, stage, dead, place, p, dp, weights);
        sum_pairs<Config, exponent>(c, place, weights, dp, c.shared.delta[stage]);
        differentiate<Config>(gradients, p, dp, c.shared.delta[stage]);
      } else {
        dead_rows = hide<rows>(state, stage, dead, place, p, dp);
        sum_pairs<Config, exponent>(c, place, p, dp, c.shared.delta[stage]);
        differentiate<Config>(gradients, p, dp, c.shared.delta[stage], weights);
      }
    }
    store_gradients<Config, rows>(gradients, c.shared.ds[0], score_ring.stage, part);

    issue_q(dq, number - 1, Config::stays ? state.has_before() : number > 0);
    issue_kv<rows>(dv, weights, c.shared.dout[0], stage);
    issue_kv<rows>(dk, gradients, c.shared.q[0], stage);
    // The fence waits for pending additions to device memory: it comes before dQ is added.
    ptx::fence_async_shared();
    __syncwarp();
    arrive_warp<Config>(c.shared.ds_full[score_ring.stage]);

    ptx::wgmma_wait<2>();
    ptx::wgmma_hold(dq.value[0]);
    if (Config::stays ? state.has_before() : number > 0) {
      arrive_warp<Config>(c.shared.ds_empty[ScoreRing(number - 1).stage]);
      add_q(place_before(c, state, number), state.dead_before, dq, number - 1);
    }
    advance(state, dead_rows);
    draw_ahead<Config>(c.params, state, score_place(state));
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(dv.value[0]);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dk.value[0]);
    end_step<Config>(stage);
  }

  // A step whose pairs are all hidden: dS is zero, and dV and dK do not change.
  __device__ __forceinline__ void hidden_step(StepState& state, int number) const {
    const Ring ring(number);
    const ScoreRing score_ring(number);
    const unsigned stage = ring.stage;
    QGradient dq;
    wait<Config>(c.shared.q_full[stage], ring.phase);
    wait<Config>(c.shared.dout_full[stage], ring.phase);
    await_operand(state, number);
    release_operand(number);
    const QueryNumbers<Config>& lse = c.shared.lse[stage];
    const unsigned dead_rows = has_dead_queries(lse) ? dead_rows_of_q(lse) : 0;
    wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);
    store_gradients<Config>(ScoreOperand<Config>{}, c.shared.ds[0], score_ring.stage, part);
    issue_q(dq, number - 1, Config::stays ? state.has_before() : number > 0);
    ptx::fence_async_shared();
    __syncwarp();
    arrive_warp<Config>(c.shared.ds_full[score_ring.stage]);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(dq.value[0]);
    if (Config::stays ? state.has_before() : number > 0) {
      arrive_warp<Config>(c.shared.ds_empty[ScoreRing(number - 1).stage]);
      add_q(place_before(c, state, number), state.dead_before, dq, number - 1);
    }
    advance(state, dead_rows);
    end_step<Config>(stage);
  }

  // Store the finished gradients of the warp's keys to memory; dV times `factor`.
  __device__ __forceinline__ void store_v(typename Types::VGradient& dv, float factor) const {
    if constexpr (Config::Weights::drops) {
      factor *= Config::Weights::template inverse_keep<float>(c.params);
    }
    store_gradient(c, dv, c.params.dv, c.params.dv_parts, part * kKeysOfWarpgroup, warp_row(),
                   c.params.shape.head_dim_v, factor);
  }
  __device__ __forceinline__ void store_k(typename Types::KGradient& dk) const {
    store_gradient(c, dk, c.params.dk, c.params.dk_parts, part * kKeysOfWarpgroup, warp_row(),
                   c.params.shape.head_dim, static_cast<float>(c.params.scale));
  }
};

}  // namespace cuflash::fa3
