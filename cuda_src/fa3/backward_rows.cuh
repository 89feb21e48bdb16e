// FlashAttention-3 backward, blocks of rows: what rows of q need before and after their products,
// while other blocks multiply. As kernels of their own these are bound by device memory, leave the
// matrix units idle and take a third of the time where sequences are short. A few multiprocessors
// do them beside the others in a third of that, and find in L2 what has just been summed.
//
//   prepare   delta = rowsum(dO * O) - dlse, lse in units of the logits, zeros for the sums of dQ:
//             what steps/statistics.cu does, which here does it for the first heads alone
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
//   summed     who finishes a share, for the blocks of all kv tiles of the head
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/proxy_fence.cuh"
#include "../ptx/turn.cuh"
#include "backward_types.cuh"

namespace cuflash::fa3 {

// By one thread: waits until `count` have passed a counter.
__device__ inline void await_count(const int* counter, int count) {
  while (ptx::read_turn(counter) < count) __nanosleep(40);
}

// By the thread that loads: the rows of this block's head are prepared. Those of the first heads
// were by the kernel before.
template <class Config>
__device__ inline void await_prepared(const BackwardContext<Config>& c, unsigned tile) {
  if (tile < c.params.ahead) return;
  await_count(&counters_of(c.params, c.item.batch, c.item.head).prepared,
              2 * kv_tiles_of_head<Config>(c.params));
  ptx::fence_async_global();
}

// By one thread, when additions to dQ of this block's tile are under way, and known to be by it.
template <class Config>
__device__ inline void pass_sums(const BackwardContext<Config>& c) {
  ptx::pass_turn(&counters_of(c.params, c.item.batch, c.item.head).summed);
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

// What a warp of a block of rows loads through: a unit for each slot.
constexpr int kMostSlots = 4;
struct alignas(128) RowSlots {
  static constexpr int bytes = 12 * 1024;
  unsigned char data[bytes];
  Barrier to_prepare[kMostSlots];
  Barrier to_finish[kMostSlots];
};

// What a block of rows has in shared memory.
template <class Config>
struct RowStorage {
  static constexpr int warps = BackwardTypes<Config>::threads / 32;
  StagedRows staging[warps];
  RowSlots slots[warps];
  RowShare prepared[Config::shares + 1];
  RowShare finished[Config::shares + 1];
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
        of_head(ceil_div(params.shape.seqlen_q, Config::block_q) * (Config::block_q / 16)),
        of_share(units_of_share(params)),
        count(count * of_share * (params.shape.heads_q / params.shape.heads_kv)) {}

  __device__ static unsigned units_of_share(const Fa3BackwardParams& params) {
    const int units = ceil_div(params.shape.seqlen_q, Config::block_q) * (Config::block_q / 16);
    return ceil_div(units, kv_tiles_of_head<Config>(params));
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
  __device__ bool has(const RowUnit& unit) const { return unit.row < static_cast<int>(of_head) * 16; }
  __device__ long long workspace_row(const RowUnit& unit) const {
    return (static_cast<long long>(unit.batch) * params.shape.heads_q + unit.head) *
               params.padded_rows +
           unit.row;
  }
};

// By one thread, with registers to spare: what clear_role will clear, for the share that a block of
// rows prepares meanwhile.
template <class Config>
__device__ inline Clearing clearing_of(const Fa3BackwardParams& params, unsigned tile) {
  using Units = RowUnits<Config>;
  if (tile + params.ahead >= kv_tiles_of_all<Config>(params)) return {nullptr, 0, 0, 0, nullptr};
  const RowShare share = Units::share(params, tile + params.ahead);
  const Units units(params, &share, 1);
  const RowUnit unit = units.at(0);
  const int rows = min(static_cast<int>(units.of_head) * 16 - unit.row,
                       static_cast<int>(units.of_share) * 16);
  constexpr int of_row = Config::head_dim * static_cast<int>(sizeof(float));
  return {static_cast<unsigned char*>(params.dq_accumulator) + units.workspace_row(unit) * of_row,
          params.padded_rows * of_row, static_cast<long long>(max(rows, 0)) * of_row,
          params.shape.heads_q / params.shape.heads_kv, &counters_of(params, share.batch, share.kv_head)};
}

// By a warp of a block that has a tile: zeros for sums of dQ. Written by the copy engine from a
// kilobyte of shared memory they cost a multiprocessor that multiplies next to nothing, and would
// cost one that prepares rows as long as it reads.
template <class Config>
__device__ inline void clear_role(BackwardStorage<Config>& shared) {
  const Clearing& clearing = shared.clearing;
  if (clearing.counters == nullptr) return;
  const int lane = ptx::opaque_lane();
  for (int i = lane; i < 64; i += 32) shared.zeros.chunks[i] = make_uint4(0, 0, 0, 0);
  ptx::fence_async_shared();
  __syncwarp();
  if (lane != 0) return;
  const unsigned from = ptx::shared_address(&shared.zeros);
  for (int run = 0; run < clearing.runs; ++run) {
    unsigned char* const to = clearing.first + run * clearing.stride;
#pragma unroll 1
    for (long long byte = 0; byte < clearing.bytes; byte += sizeof(Zeros)) {
      ptx::bulk_store(to + byte, from, sizeof(Zeros));
    }
  }
  ptx::bulk_stores_wait();
  ptx::fence_async_global();
  ptx::pass_turn(&clearing.counters->prepared);
}

// By a warp where sums have no order.
template <class Config>
__device__ inline void sums_role(const BackwardContext<Config>& c) {
  if (threadIdx.x % 32 != 0) return;
  wait<Config>(c.shared.added[0], 0);
  pass_sums(c);
}

// A row's lse as the caller has it -> in units of the logits; plus infinity, whose P is zero, for a
// row that sees nothing.
template <class Config>
__device__ inline float backward_lse(float given) {
  if (given == -infinity<float>()) return infinity<float>();
  const float lse = Logits<Config>::from_natural(given);
  return lse == infinity<float>() ? lse - lse : lse;  // NaN: no dead row, but one that overflowed
}

// A unit to prepare: its rows of out, then of dout, in a slot.
//
// rowsum(dO * O) is the diagonal of dO O^T: a product of warp fragments takes a tenth of the
// instructions that converting, multiplying and adding across lanes would. The order of columns is
// free as long as it is the same for both, so a lane takes 16 bytes of a row, which are its
// elements of two products of depth 16. Lane l has rows l / 4 and l / 4 + 8.
template <class Config>
struct UnitToPrepare {
  using Storage = typename Config::Storage;
  static constexpr int parts = 1;  // of a unit
  static constexpr int chunks = (Config::head_dim_v + 31) / 32;
  // Rows lie half of the banks apart, so that eight lanes, of two rows, meet different ones.
  static constexpr int pitch = (2 * Config::head_dim_v + 127) / 128 * 128 + 64;
  static constexpr int bytes = 2 * 16 * pitch;
  RowUnit unit;
  float lse[2];  // in the lane that will have their delta
  float dlse[2];

  __device__ static bool has_delta(int lane) { return lane % 4 == lane / 8; }

  __device__ __forceinline__ void load(const RowUnits<Config>& units, unsigned i,
                                       unsigned char* slot, Barrier& full) {
    const Fa3BackwardParams& params = units.params;
    const Shape& shape = params.shape;
    unit = units.at(i);
    const int lane = ptx::opaque_lane();
    const Sequence seq = sequence(shape, unit.batch);
    const int rows = max(min(shape.seqlen_q - unit.row, 16), 0);
    const unsigned row_bytes = shape.head_dim_v * static_cast<int>(sizeof(Storage));
    if (lane == 0) arrive_expecting<Config>(full, 2 * rows * row_bytes);
    __syncwarp();
    if (lane % 16 < rows) {
      const Tensor& tensor = lane < 16 ? params.out : params.dout;
      ptx::bulk_load(ptx::shared_address(slot + lane * pitch),
                     q_row<const Storage>(tensor, seq, unit.head, unit.row + lane % 16), row_bytes,
                     ptx::shared_address(&full));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = lane / 4 + 8 * k;
      lse[k] = -infinity<float>();
      dlse[k] = 0;
      if (row < rows && has_delta(lane)) {
        lse[k] = *row_number<const float>(params.lse, seq, unit.head, unit.row + row);
        if (params.dlse.data != nullptr) {
          dlse[k] = *row_number<const float>(params.dlse, seq, unit.head, unit.row + row);
        }
      }
    }
  }

  __device__ __forceinline__ static uint4 chunk(const unsigned char* slot, int row, int column,
                                                bool valid) {
    return valid ? *reinterpret_cast<const uint4*>(slot + row * pitch + 2 * column)
                 : make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void finish(const RowUnits<Config>& units, const unsigned char* slot,
                                         StagedRows&) const {
    const Fa3BackwardParams& params = units.params;
    const int lane = ptx::opaque_lane();
    float c[2][4] = {};  // dO of both rows by O of rows 0 to 7, and 8 to 15
#pragma unroll
    for (int j = 0; j < chunks; ++j) {
      const int column = 32 * j + lane % 4 * 8;
      const bool valid = column < params.shape.head_dim_v;
      const uint4 near = chunk(slot, 16 + lane / 4, column, valid);
      const uint4 far = chunk(slot, 24 + lane / 4, column, valid);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 b = chunk(slot, lane / 4 + 8 * k, column, valid);
        ptx::mma_m16n8k16(Storage{}, c[k][0], c[k][1], c[k][2], c[k][3],
                          {near.x, far.x, near.y, far.y}, b.x, b.y);
        ptx::mma_m16n8k16(Storage{}, c[k][0], c[k][1], c[k][2], c[k][3],
                          {near.z, far.z, near.w, far.w}, b.z, b.w);
      }
    }
    if (!has_delta(lane) || !units.has(unit)) return;
    const long long at = units.workspace_row(unit);
    const bool odd = lane / 4 % 2 != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const long long row = at + lane / 4 + 8 * k;
      const float sum = odd ? c[k][2 * k + 1] : c[k][2 * k];
      const float row_lse = backward_lse<Config>(lse[k]);
      static_cast<float*>(params.row_lse)[row] = row_lse;
      static_cast<float*>(params.delta)[row] =
          row_lse == infinity<float>() ? 0.0f : sum - dlse[k];
    }
  }
};

// 64 columns of a unit to finish: their sums of dQ in a slot, as they lie in memory.
template <class Config>
struct UnitToFinish {
  using Storage = typename Config::Storage;
  static constexpr int parts = Config::head_dim / kPanelColumns;
  static constexpr int bytes = 16 * kPanelColumns * static_cast<int>(sizeof(float));
  RowUnit unit;
  int column;

  __device__ __forceinline__ void load(const RowUnits<Config>& units, unsigned i,
                                       unsigned char* slot, Barrier& full) {
    unit = units.at(i / parts);
    column = static_cast<int>(i % parts) * kPanelColumns;
    if (ptx::opaque_lane() != 0) return;
    const bool any = units.has(unit);
    arrive_expecting<Config>(full, any ? bytes : 0);
    if (!any) return;
    const auto* const sums = static_cast<const float*>(units.params.dq_accumulator) +
                             accumulator_index<Config>(units.workspace_row(unit), 0, column, 0);
    ptx::bulk_load(ptx::shared_address(slot), sums, bytes, ptx::shared_address(&full));
  }

  __device__ __forceinline__ void finish(const RowUnits<Config>& units, const unsigned char* slot,
                                         StagedRows& staging) const {
    const Fa3BackwardParams& params = units.params;
    const int valid = params.shape.seqlen_q - unit.row;
    if (valid <= 0 || column >= params.shape.head_dim) return;
    const float scale = static_cast<float>(params.scale);
    WarpTile<float, 16, 16, kPanelColumns> sums;
    const auto* const from = reinterpret_cast<const float4*>(slot) + ptx::opaque_lane();
#pragma unroll
    for (int n = 0; n < sums.column_fragments; ++n) {
      const float4 four = from[32 * n];
      sums.value[0][n][0][0] = four.x * scale;
      sums.value[0][n][0][1] = four.y * scale;
      sums.value[0][n][1][0] = four.z * scale;
      sums.value[0][n][1][1] = four.w * scale;
    }
    const Sequence seq = sequence(params.shape, unit.batch);
    store_staged(sums, staging, q_row<Storage>(params.dq, seq, unit.head, unit.row) + column,
                 params.dq.row_stride, valid, params.shape.head_dim - column);
  }
};

// What a block of the grid does: a kv tile, or what rows need.
template <class Config>
struct BlockPlace {
  unsigned tile;       // of all, if `has_tile`
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

// For all units, by all warps of the block: as many as there are slots are under way.
template <class Config, class Unit>
__device__ inline void for_units(const RowUnits<Config>& units, RowStorage<Config>& shared,
                                 Barrier (RowSlots::*barriers)[kMostSlots]) {
  constexpr int fit = RowSlots::bytes / Unit::bytes;
  constexpr int slots = fit < kMostSlots ? fit : kMostSlots;
  static_assert(slots > 0, "a unit fits a slot");
  const unsigned warp = threadIdx.x / 32;
  const unsigned count = units.count * Unit::parts;
  RowSlots& mine = shared.slots[warp];
  Barrier* const full = mine.*barriers;
  Unit unit[slots];
  unsigned phase = 0;
#pragma unroll
  for (int j = 0; j < slots; ++j) {
    const unsigned i = warp + j * RowStorage<Config>::warps;
    if (i < count) unit[j].load(units, i, mine.data + j * Unit::bytes, full[j]);
  }
#pragma unroll 1
  for (unsigned first = warp; first < count; first += slots * RowStorage<Config>::warps) {
#pragma unroll
    for (int j = 0; j < slots; ++j) {
      const unsigned i = first + j * RowStorage<Config>::warps;
      if (i >= count) break;
      wait<Config>(full[j], phase);
      unit[j].finish(units, mine.data + j * Unit::bytes, shared.staging[warp]);
      const unsigned next = i + slots * RowStorage<Config>::warps;
      __syncwarp();  // all have read the slot
      if (next < count) unit[j].load(units, next, mine.data + j * Unit::bytes, full[j]);
    }
    phase ^= 1;
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
  if (mine % 32 == 0) {
    RowSlots& slots = shared.slots[mine / 32];
    for (int slot = 0; slot < kMostSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&slots.to_prepare[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&slots.to_finish[slot]), 1);
    }
    ptx::mbarrier_init_fence();
  }
  if (mine < to_finish.count) {
    shared.finished[mine] = Units::share(params, to_finish.first + mine);
  }
  __syncthreads();
  const Units prepared(params, shared.prepared, to_prepare.count);
  for_units<Config, UnitToPrepare<Config>>(prepared, shared, &RowSlots::to_prepare);
  if (mine < to_finish.count) {
    await_count(&counters(shared.finished[mine]).summed, kv_tiles_of_head<Config>(params));
  }
  __syncthreads();
  if (mine < to_prepare.count) ptx::pass_turn(&counters(shared.prepared[mine]).prepared);
  const Units finished(params, shared.finished, to_finish.count);
  for_units<Config, UnitToFinish<Config>>(finished, shared, &RowSlots::to_finish);
}

}  // namespace cuflash::fa3
