// FlashAttention-2 forward, pairs of warps that share rows.
//
// A warp of 16 rows reads as much of K and V from shared memory as one of 32, and shared memory is
// the bound; but the registers of a warp cannot hold 32 rows of a wide output. Two warps that share
// 32 rows therefore each compute the scores of half of a tile's keys and half of the output's
// columns. They exchange row maxima and P through shared memory:
//
//   maxima   posted after the scores of a tile, read after the block's next barrier. Both warps
//            derive the same references from them
//   P        barrier 1 + w, of 64 threads: warp w arrives when it has written its weights of a
//            step, which it multiplies from registers. The other warp waits there before it
//            multiplies these weights
//   the end  barrier 9 + pair, of both warps: sums, and rows of the output. It is a separate
//            barrier because the other warp may still be on its way to P of the last step
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/barrier_arrive.cuh"
#include "forward_steps.cuh"

namespace cuflash::fa2 {

constexpr int kThreadsOfPair = 64;

// The barrier of this warp's weights, and that of the weights of the other warp of its pair.
__device__ inline int own_barrier() { return 1 + static_cast<int>(threadIdx.x) / 32; }
__device__ inline int other_barrier() { return 1 + (static_cast<int>(threadIdx.x) / 32 ^ 1); }
// Synchronises both warps of a pair.
__device__ inline void meet_in_pair() {
  ptx::named_barrier(9 + static_cast<int>(threadIdx.x) / kThreadsOfPair, kThreadsOfPair);
}

// Writes one number for every row of this warp to shared memory, where both warps of the pair read
// it.
template <class Config, class Rows>
__device__ inline void post_numbers(const ForwardContext<Config>& c, Rows& numbers) {
  const LanePosition lane;
  auto* const to = &c.shared.of_rows.data[c.row0 + lane.row];
  if (lane.column == 0) {
    numbers.for_each([&](typename Config::Compute& x, int m, int group) {
      auto& both = to[ForwardTypes<Config>::Scores::row(m, group)];
      (c.part() == 0 ? both.x : both.y) = x;
    });
  }
  __syncwarp();
}

// Combines the two numbers that the warps of the pair have posted for every row.
template <class Config, class Rows, class Function>
__device__ inline void combine_numbers(const ForwardContext<Config>& c, Rows& numbers,
                                       Function combine) {
  const LanePosition lane;
  const auto* const from = &c.shared.of_rows.data[c.row0 + lane.row];
  numbers.for_each([&](typename Config::Compute& x, int m, int group) {
    const auto both = from[ForwardTypes<Config>::Scores::row(m, group)];
    x = combine(both.x, both.y);
  });
}

// Adds up a row's sums over its lanes and both warps.
template <class Config, class Rows>
__device__ inline void add_up_sums(const ForwardContext<Config>& c, Rows& sums) {
  using Compute = typename Config::Compute;
  const auto add = [](Compute a, Compute b) { return a + b; };
  sums.for_each([&](Compute& x, int, int) { x = combine_row_lanes(x, add); });
  post_numbers(c, sums);
  meet_in_pair();
  combine_numbers(c, sums, add);
}

// Exponentiates a few scores just before their products, and writes the weights for the other warp.
template <class Config, class Scores>
struct PairedWeights {
  const ForwardContext<Config>& c;
  int step;
  ForwardState<Config>& state;
  Scores& scores;
  const typename ForwardTypes<Config>::Rows& offset;
  typename Config::Compute factor;
  template <int columns>
  __device__ void prepare(int first) const {
    using Compute = typename Config::Compute;
    WarpTile<Compute, Config::fragment_rows, Scores::rows, columns> part;
    typename ForwardTypes<Config>::Rows sums;
    exponentiate_columns<Config>(part, sums, scores, offset, factor, first);
    drop_columns(c, step, part, first);
    store_shared<Config::architecture>(part, c.p(), c.row0, Aligned{c.first_key() + first});
    part.for_each([&](Compute& x, int m, int n, int group, int which) {
      scores.value[m][first / 8 + n][group][which] = x;
    });
    sums.for_each([&](Compute& x, int m, int group) { state.sum.value[m][group] += x; });
    if (first + columns == Scores::columns) {
      ptx::named_barrier_arrive(own_barrier(), kThreadsOfPair);
    }
  }
};

// Exponentiates scores, and adds weights V of a step to this warp's columns of the output.
template <class Config, class Scores>
__device__ inline void exponentiate_paired_tile(const ForwardContext<Config>& c,
                                                ForwardState<Config>& state, Scores& scores,
                                                int step) {
  using Compute = typename Config::Compute;
  using Types = ForwardTypes<Config>;
  constexpr int columns = Types::Output::columns;
  const Compute factor = logit_factor<Config>(c.params);
  typename Types::Rows maxima, keep;
  combine_numbers(c, maxima, [](Compute a, Compute b) { return larger(a, b); });
  if (move_references<Config>(state.reference, keep, maxima, factor)) rescale(state, keep);
  const auto offset = offsets_of(state.reference);
  const auto column0 = part_offset<typename Types::VTile, columns>(c.part());
  Products<Config>::template multiply_prepared_weights<Types::keys_at_once>(
      state.output, scores, depth_by_rows(c.v(step), column0, c.first_key()), c.p(), c.row0,
      c.first_key(), PairedWeights<Config, Scores>{c, step, state, scores, offset, factor});
  ptx::named_barrier(other_barrier(), kThreadsOfPair);
  const int other_key = Scores::columns - c.first_key();
  Products<Config>::template multiply_ahead<Scores::columns>(
      state.output, rows_by_depth(c.p(), c.row0, Aligned{other_key}),
      depth_by_rows(c.v(step), column0, other_key));
}

}  // namespace cuflash::fa2
