// FlashAttention-3 backward, blocks of rows: what rows of q need before and after their products,
// while other blocks multiply. Kernels of their own are bound by device memory and leave the matrix
// units idle, for a third of the time where sequences are short. A few multiprocessors do it beside
// the others in less, and find in L2 what has just been summed; bench/NOTES.md has the figures.
//
//   prepare   delta = rowsum(dO * O) - dlse, lse in units of the logits, zeros for the sums of dQ:
//             what steps/statistics.cu does, which here does it for the first heads alone (and
//             adds up a row in another order)
//   finish    dQ = scale * the sums, rounded: what steps/convert_dq.cu does for others
//
// Every kv tile has a share of its head's rows. Before each Config::shares blocks of tiles comes a
// block of rows, which prepares the shares of the tiles `ahead` of those blocks, and finishes the
// shares of the tiles `behind` them. Blocks start in the order of their numbers, and both distances
// are longer than a section of heads (tile/schedule.cuh) and the blocks that run at once, so that
// hardly any block waits; none waits for a later one. What is left comes after all tiles.
//
// Who waits for whom, by two counters in device memory for every kv head:
//   prepared   load, before it asks for rows' numbers (and so math, before it adds to dQ), for the
//              blocks that prepare the head's shares
//   summed     who finishes a share, for the blocks of all kv tiles of the head, which have seen
//              that the rows are prepared
#pragma once

#include "../ptx/mma.cuh"
#include "../ptx/proxy_fence.cuh"
#include "../ptx/turn.cuh"
#include "backward_types.cuh"

namespace cuflash::fa3 {

// By one thread: waits until `count` have passed a counter.
template <class Config>
__device__ inline void await_count(const int* counter, int count) {
  jitter<Config>();
  while (ptx::read_turn(counter) < count) __nanosleep(40);
}

// By the thread that loads: the rows of this block's head are prepared. Those of the first heads
// were by the kernel before.
template <class Config>
__device__ inline void await_prepared(const BackwardContext<Config>& c, unsigned tile) {
  if (tile < c.params.ahead) return;
  await_count<Config>(&counters_of(c.params, c.item.batch, c.item.head).prepared,
                      kv_tiles_of_head<Config>(c.params));
  ptx::fence_async_global();
}

// By one thread, when additions to dQ of this block's tile are under way, and known to be by it.
template <class Config>
__device__ inline void pass_sums(const BackwardContext<Config>& c) {
  jitter<Config>();
  ptx::pass_turn(&counters_of(c.params, c.item.batch, c.item.head).summed);
}

// By one thread beside math, where sums have no order.
template <class Config>
__device__ inline void sums_role(const BackwardContext<Config>& c) {
  wait<Config>(c.shared.added[0], 0);
  pass_sums(c);
}

// The rows of a kv tile: of every query head of its group as large a part as it is of the keys.
struct RowShare {
  int batch;
  int kv_head;
  int row;  // the first
};

// Sixteen rows of a query head.
struct RowUnit {
  int batch;
  int head;
  int row;
};

// What a block of rows has in shared memory.
template <class Config>
struct RowStorage {
  StagedRows staging[BackwardTypes<Config>::threads / 32];
  RowShare prepared[Config::shares];
  RowShare finished[Config::shares];
};

// Shares one after the other, in units.
template <class Config>
struct RowUnits {
  const Fa3BackwardParams& params;
  const RowShare* const shares;
  const unsigned of_head;   // units of a query head, as far as kv tiles read
  const unsigned of_share;  // and of a tile's share of it
  const unsigned count;     // of all shares

  __device__ RowUnits(const Fa3BackwardParams& params, const RowShare* shares, int count)
      : params(params),
        shares(shares),
        of_head(units_of_head(params)),
        of_share(units_of_share(params)),
        count(count * of_share * (params.shape.heads_q / params.shape.heads_kv)) {}

  __device__ static int units_of_head(const Fa3BackwardParams& params) {
    return ceil_div(params.shape.seqlen_q, Config::block_q) * (Config::block_q / 16);
  }
  __device__ static int units_of_share(const Fa3BackwardParams& params) {
    return ceil_div(units_of_head(params), kv_tiles_of_head<Config>(params));
  }
  __device__ static RowShare share(const Fa3BackwardParams& params, long long tile) {
    const WorkItem item = kv_order<Config>(params).template kv_item<Config::block_kv>(
        params.shape, static_cast<unsigned>(tile), Config::ordered);
    const int first = item.kv_begin / Config::block_kv * units_of_share(params) * 16;
    return {item.batch, item.head, first};
  }

  // Its row is beyond the length where a head has fewer units than its tiles share.
  __device__ RowUnit at(unsigned i) const {
    const unsigned group = params.shape.heads_q / params.shape.heads_kv;
    const unsigned heads = i / of_share;  // of queries, whose units come before
    const unsigned before = group == 1 ? heads : heads / group;
    const RowShare& share = shares[before];
    return {share.batch, static_cast<int>(share.kv_head * group + heads - before * group),
            share.row + static_cast<int>(i - heads * of_share) * 16};
  }
  __device__ bool has(const RowUnit& unit) const {
    return unit.row < static_cast<int>(of_head) * 16;
  }
  __device__ long long workspace_row(const RowUnit& unit) const {
    return (static_cast<long long>(unit.batch) * params.shape.heads_q + unit.head) *
               params.padded_rows +
           unit.row;
  }
};

// A row's lse as the caller has it -> in units of the logits; plus infinity, whose P is zero, for a
// row that sees nothing.
template <class Config>
__device__ inline float backward_lse(float given) {
  if (given == -infinity<float>()) return infinity<float>();
  const float lse = Logits<Config>::from_natural(given);
  return lse == infinity<float>() ? lse - lse : lse;  // NaN: no dead row, but one that overflowed
}

// A unit to prepare: what is read of it, and what is made of that.
//
// rowsum(dO * O) is the diagonal of dO O^T: a product of warp fragments takes far fewer
// instructions than converting, multiplying and adding across lanes would. The order of columns is
// free as long as it is the same for both, so a lane takes 16 bytes of a row, which are its
// elements of two products of depth 16. Lane l has rows l / 4 and l / 4 + 8.
template <class Config>
struct UnitToPrepare {
  using Storage = typename Config::Storage;
  static constexpr int chunks = (Config::head_dim_v + 31) / 32;  // of a lane, 32 columns apart
  static constexpr int at_once = 1;                              // by a warp: two would spill
  RowUnit unit;
  bool exists;
  uint4 out[chunks][2];  // of both rows
  uint4 dout[chunks][2];
  float lse[2];  // in the lane that will have their delta
  float dlse[2];

  __device__ static bool has_delta(int lane) { return lane % 4 == lane / 8; }

  __device__ __forceinline__ void load(const RowUnits<Config>& units, unsigned i, bool any) {
    const Fa3BackwardParams& params = units.params;
    const Shape& shape = params.shape;
    if (any) unit = units.at(i);
    exists = any && units.has(unit);
    if (!exists) return;
    const int lane = ptx::opaque_lane();
    const Sequence seq = sequence(shape, unit.batch);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = unit.row + lane / 4 + 8 * k;
      const bool valid = row < shape.seqlen_q;
      const auto* const from = q_row<const Storage>(params.out, seq, unit.head, row);
      const auto* const dfrom = q_row<const Storage>(params.dout, seq, unit.head, row);
#pragma unroll
      for (int j = 0; j < chunks; ++j) {
        const int column = 32 * j + lane % 4 * 8;
        out[j][k] = dout[j][k] = make_uint4(0, 0, 0, 0);
        if (valid && column < shape.head_dim_v) {
          out[j][k] = *reinterpret_cast<const uint4*>(from + column);
          dout[j][k] = *reinterpret_cast<const uint4*>(dfrom + column);
        }
      }
      lse[k] = -infinity<float>();
      dlse[k] = 0;
      if (valid && has_delta(lane)) {
        lse[k] = *row_number<const float>(params.lse, seq, unit.head, row);
        if (params.dlse.data != nullptr) {
          dlse[k] = *row_number<const float>(params.dlse, seq, unit.head, row);
        }
      }
    }
  }

  __device__ __forceinline__ static void clear_sums(float* sums) {
    auto* const to = reinterpret_cast<uint4*>(sums) + ptx::opaque_lane();
#pragma unroll
    for (int i = 0; i < 16 * Config::head_dim / 4 / 32; ++i) to[32 * i] = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void finish(const RowUnits<Config>& units) const {
    if (!exists) return;
    const Fa3BackwardParams& params = units.params;
    const int lane = ptx::opaque_lane();
    const long long at = units.workspace_row(unit);
    clear_sums(static_cast<float*>(params.dq_accumulator) + at * Config::head_dim);
    float c[2][4] = {};  // dO of both rows by O of rows 0 to 7, and 8 to 15
#pragma unroll
    for (int j = 0; j < chunks; ++j) {
      const uint4& near = dout[j][0];
      const uint4& far = dout[j][1];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4& b = out[j][k];
        ptx::mma_m16n8k16(Storage{}, c[k][0], c[k][1], c[k][2], c[k][3],
                          {near.x, far.x, near.y, far.y}, b.x, b.y);
        ptx::mma_m16n8k16(Storage{}, c[k][0], c[k][1], c[k][2], c[k][3],
                          {near.z, far.z, near.w, far.w}, b.z, b.w);
      }
    }
    if (!has_delta(lane)) return;
    const bool odd = lane / 4 % 2 != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const long long row = at + lane / 4 + 8 * k;
      const float sum = odd ? c[k][2 * k + 1] : c[k][2 * k];
      const float row_lse = backward_lse<Config>(lse[k]);
      static_cast<float*>(params.row_lse)[row] = row_lse;
      static_cast<float*>(params.delta)[row] = row_lse == infinity<float>() ? 0.0f : sum - dlse[k];
    }
  }
};

// 64 columns of a unit to finish: the sums of dQ, and dQ.
template <class Config>
struct UnitToFinish {
  using Storage = typename Config::Storage;
  static constexpr int parts = Config::head_dim / kPanelColumns;  // of a unit
  static constexpr int at_once = 2;                               // by a warp
  RowUnit unit;
  int column;
  bool exists;
  WarpTile<float, 16, 16, kPanelColumns> sums;

  __device__ __forceinline__ void load(const RowUnits<Config>& units, unsigned i, bool any) {
    const Shape& shape = units.params.shape;
    if (any) unit = units.at(i / parts);
    column = static_cast<int>(i % parts) * kPanelColumns;
    exists = any && unit.row < shape.seqlen_q && column < shape.head_dim;
    if (!exists) return;
    load_from_accumulator<Config>(static_cast<const float*>(units.params.dq_accumulator), sums,
                                  units.workspace_row(unit), 0, column);
  }

  __device__ __forceinline__ void finish(const RowUnits<Config>& units, StagedRows& staging) {
    if (!exists) return;
    const Fa3BackwardParams& params = units.params;
    const float scale = static_cast<float>(params.scale);
    sums.for_each([&](float& x, int, int, int, int) { x *= scale; });
    const Sequence seq = sequence(params.shape, unit.batch);
    store_staged(sums, staging, q_row<Storage>(params.dq, seq, unit.head, unit.row) + column,
                 params.dq.row_stride, params.shape.seqlen_q - unit.row,
                 params.shape.head_dim - column);
  }
};

// What a block of the grid does: a kv tile, or what rows need.
template <class Config>
struct BlockPlace {
  unsigned tile;  // of all, if `has_tile`
  bool has_tile;
  long long prepared;  // first tile whose share is prepared, if not
  long long finished;  // first tile whose share is finished
  int shares;          // that are prepared and finished

  __device__ explicit BlockPlace(const Fa3BackwardParams& params) {
    const unsigned tiles = kv_tiles_of_all<Config>(params);
    constexpr unsigned blocks = Config::shares + 1;  // of a round
    const unsigned rounds = (tiles + Config::shares - 1) / Config::shares;
    const unsigned round = blockIdx.x / blocks;
    const unsigned within = blockIdx.x % blocks;
    const unsigned first = min(round, rounds) * Config::shares;
    tile = first + within - 1;
    has_tile = round < rounds && within > 0 && tile < tiles;
    prepared = first + params.ahead;
    finished = first - params.behind;
    shares = Config::shares;
    if (round >= rounds) {  // after all tiles a block finishes one share
      finished += blockIdx.x - rounds * blocks;
      shares = 1;
    } else if (within > 0) {  // after the last tile of the last round
      shares = 0;
    }
  }
};

// For `count` units, by all warps of the block: load of some, then finish of the same. What they
// read hides the way to memory and back.
template <class Unit, class Units, class... More>
__device__ inline void for_units(const Units& units, unsigned count, More&... more) {
  const unsigned warps = blockDim.x / 32;
#pragma unroll 1
  for (unsigned i = threadIdx.x / 32; i < count; i += Unit::at_once * warps) {
    Unit unit[Unit::at_once];
#pragma unroll
    for (int j = 0; j < Unit::at_once; ++j) {
      const unsigned mine = i + j * warps;
      unit[j].load(units, mine, mine < count);
    }
#pragma unroll
    for (int j = 0; j < Unit::at_once; ++j) unit[j].finish(units, more...);
  }
}

// The kv tiles whose shares a block does: those of [begin, begin + most) that there are.
struct ShareRange {
  long long first;
  int count;
  __device__ ShareRange(long long begin, int most, long long tiles)
      : first(max(begin, 0ll)),
        count(static_cast<int>(max(min(begin + most, tiles) - first, 0ll))) {}
};

// By a whole block.
template <class Config>
__device__ inline void row_block(const Fa3BackwardParams& params, const BlockPlace<Config>& place,
                                 RowStorage<Config>& shared) {
  using Units = RowUnits<Config>;
  const long long tiles = kv_tiles_of_all<Config>(params);
  const ShareRange to_prepare(place.prepared, place.shares, tiles);
  const ShareRange to_finish(place.finished, place.shares, tiles);
  const int mine = static_cast<int>(threadIdx.x);
  const auto counters = [&](const RowShare& share) -> HeadCounters& {
    return counters_of(params, share.batch, share.kv_head);
  };
  if (mine < to_prepare.count) {
    shared.prepared[mine] = Units::share(params, to_prepare.first + mine);
  }
  if (mine < to_finish.count) {
    shared.finished[mine] = Units::share(params, to_finish.first + mine);
  }
  __syncthreads();
  const Units prepared(params, shared.prepared, to_prepare.count);
  for_units<UnitToPrepare<Config>>(prepared, prepared.count);
  __syncthreads();
  jitter<Config>();
  if (mine < to_prepare.count) ptx::pass_turn(&counters(shared.prepared[mine]).prepared);
  if (mine < to_finish.count) {
    await_count<Config>(&counters(shared.finished[mine]).summed, kv_tiles_of_head<Config>(params));
  }
  __syncthreads();
  using Finish = UnitToFinish<Config>;
  const Units finished(params, shared.finished, to_finish.count);
  for_units<Finish>(finished, finished.count * Finish::parts, shared.staging[mine / 32]);
}

}  // namespace cuflash::fa3
