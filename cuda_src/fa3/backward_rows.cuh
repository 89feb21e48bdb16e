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
  await_count(&counters_of(c.params, c.item).prepared, kv_tiles_of_head<Config>(c.params));
  ptx::fence_async_global();
}

// By one thread, when additions to dQ of this block's tile are under way, and known to be by it.
template <class Config>
__device__ inline void pass_sums(const BackwardContext<Config>& c) {
  ptx::pass_turn(&counters_of(c.params, c.item).summed);
}

// By one thread beside math, where sums have no order.
template <class Config>
__device__ inline void sums_role(const BackwardContext<Config>& c) {
  wait<Config>(c.shared.added[0], 0);
  pass_sums(c);
}

// The rows of a kv tile: of every query head of its group as large a part as it is of the keys.
struct RowShare {
  WorkItem item;  // of the tile
  int begin;
  int end;  // of the rows that a kv tile reads, which may reach beyond the length
};

template <class Config>
__device__ inline RowShare row_share(const Fa3BackwardParams& params, unsigned tile) {
  const WorkItem item = kv_order<Config>(params).template kv_item<Config::block_kv>(
      params.shape, tile, Config::ordered);
  const int tiles = kv_tiles_of_head<Config>(params);
  const int units = ceil_div(params.shape.seqlen_q, Config::block_q) * (Config::block_q / 16);
  const int each = ceil_div(units, tiles);
  const int first = min(item.kv_begin / Config::block_kv * each, units);
  return {item, first * 16, min(first + each, units) * 16};
}

// A row's lse as the caller has it -> in units of the logits; plus infinity, whose P is zero, for a
// row that sees nothing.
template <class Config>
__device__ inline float backward_lse(float given) {
  if (given == -infinity<float>()) return infinity<float>();
  const float lse = Logits<Config>::from_natural(given);
  return lse == infinity<float>() ? lse - lse : lse;  // NaN: no dead row, but one that overflowed
}

// Work on the rows of a share, by all warps of the block.
template <class Config, class Types = BackwardTypes<Config>>
struct RowWork {
  using Storage = typename Config::Storage;
  static constexpr int warps = Types::threads / 32;
  const Fa3BackwardParams& params;
  const RowShare share;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = ptx::opaque_lane();

  // work(head, row) for every `rows`-th row of the share's heads, the warps taking turns.
  template <int rows, class Work>
  __device__ __forceinline__ void for_each(Work&& work) const {
    const int group = params.shape.heads_q / params.shape.heads_kv;
    const int parts = (share.end - share.begin) / rows;
    for (int i = warp; i < group * parts; i += warps) {
      work(share.item.head * group + i / parts, share.begin + i % parts * rows);
    }
  }
  __device__ Sequence seq() const { return sequence(params.shape, share.item.batch); }
  __device__ long long workspace_row(int head, int row) const {
    return (static_cast<long long>(share.item.batch) * params.shape.heads_q + head) *
               params.padded_rows +
           row;
  }

  // A lane's part of sixteen bytes of two rows.
  __device__ static float products(const uint4& a, const uint4& b) {
    struct Eight {
      Pair<Storage> pair[4];
    };
    const auto& x = reinterpret_cast<const Eight&>(a);
    const auto& y = reinterpret_cast<const Eight&>(b);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = fma(to_compute(x.pair[i].x), to_compute(y.pair[i].x), sum);
      sum = fma(to_compute(x.pair[i].y), to_compute(y.pair[i].y), sum);
    }
    return sum;
  }

  // Sixteen rows: all that is read is on its way before any of it is used.
  __device__ __forceinline__ void prepare_rows(int head, int row) const {
    constexpr int chunks = Config::head_dim_v / 8;
    constexpr int lanes = largest_power_of_two_in(32, chunks);  // that share a row
    constexpr int rows = 32 / lanes;                            // at a time
    constexpr int of_lane = (chunks + lanes - 1) / lanes;       // chunks of a row
    const Shape& shape = params.shape;
    const long long at = workspace_row(head, row);
    float given = -infinity<float>(), from_lse = 0;
    if (lane < 16 && row + lane < shape.seqlen_q) {
      given = *row_number<const float>(params.lse, seq(), head, row + lane);
      if (params.dlse.data != nullptr) {
        from_lse = *row_number<const float>(params.dlse, seq(), head, row + lane);
      }
    }
    uint4 out[16 / rows][of_lane], dout[16 / rows][of_lane];
#pragma unroll
    for (int i = 0; i < 16 / rows; ++i) {
      const int mine = row + i * rows + lane / lanes;
      const int column = lane % lanes * 8;
      const auto* const from = q_row<const Storage>(params.out, seq(), head, mine) + column;
      const auto* const dfrom = q_row<const Storage>(params.dout, seq(), head, mine) + column;
#pragma unroll
      for (int j = 0; j < of_lane; ++j) {
        const bool valid = mine < shape.seqlen_q && column + j * lanes * 8 < shape.head_dim_v;
        out[i][j] = dout[i][j] = make_uint4(0, 0, 0, 0);
        if (valid) {
          out[i][j] = *reinterpret_cast<const uint4*>(from + j * lanes * 8);
          dout[i][j] = *reinterpret_cast<const uint4*>(dfrom + j * lanes * 8);
        }
      }
    }
    clear_sums(at);
    float mine = 0;
#pragma unroll
    for (int i = 0; i < 16 / rows; ++i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < of_lane; ++j) sum += products(out[i][j], dout[i][j]);
#pragma unroll
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
      const float other = __shfl_sync(0xffffffffu, sum, lane % rows * lanes);
      if (lane / rows == i) mine = other;
    }
    if (lane < 16) {
      const float lse = backward_lse<Config>(given);
      static_cast<float*>(params.row_lse)[at + lane] = lse;
      static_cast<float*>(params.delta)[at + lane] =
          lse == infinity<float>() ? 0.0f : mine - from_lse;
    }
  }

  __device__ __forceinline__ void clear_sums(long long row) const {
    auto* to = reinterpret_cast<uint4*>(static_cast<float*>(params.dq_accumulator) +
                                        row * Config::head_dim) +
               lane;
#pragma unroll 4
    for (int i = 0; i < 16 * Config::head_dim / 4 / 32; ++i) to[32 * i] = make_uint4(0, 0, 0, 0);
  }

  // Sixteen rows of 64 columns after the other.
  __device__ __forceinline__ void finish_rows(int head, int row, StagedRows& staging) const {
    const int valid = params.shape.seqlen_q - row;
    if (valid <= 0) return;
    const float scale = static_cast<float>(params.scale);
#pragma unroll 1
    for (int column = 0; column < params.shape.head_dim; column += kPanelColumns) {
      WarpTile<float, 16, 16, kPanelColumns> part;
      load_from_accumulator<Config>(static_cast<const float*>(params.dq_accumulator), part,
                                    workspace_row(head, 0), row, column);
      part.for_each([&](float& x, int, int, int, int) { x *= scale; });
      store_staged(part, staging, q_row<Storage>(params.dq, seq(), head, row) + column,
                   params.dq.row_stride, valid, params.shape.head_dim - column);
    }
  }

  __device__ void prepare() const {
    for_each<16>([&](int head, int row) { prepare_rows(head, row); });
  }
  __device__ void finish(StagedRows* staging) const {
    for_each<16>([&](int head, int row) { finish_rows(head, row, staging[warp]); });
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

// By a whole block. `staging` of every warp.
template <class Config>
__device__ inline void row_block(const Fa3BackwardParams& params, const BlockPlace<Config>& place,
                                 StagedRows* staging) {
  const long long tiles = kv_tiles_of_all<Config>(params);
  const auto has = [&](long long first, int i) {
    return i < place.shares && first + i >= 0 && first + i < tiles;
  };
  const auto share_of = [&](long long first, int i) {
    return row_share<Config>(params, static_cast<unsigned>(first + i));
  };
  const int mine = static_cast<int>(threadIdx.x);
  for (int i = 0; has(place.prepared, i); ++i) {
    RowWork<Config>{params, share_of(place.prepared, i)}.prepare();
  }
  __syncthreads();
  if (has(place.prepared, mine)) {
    ptx::pass_turn(&counters_of(params, share_of(place.prepared, mine).item).prepared);
  }
  if (has(place.finished, mine)) {
    await_count(&counters_of(params, share_of(place.finished, mine).item).summed,
                kv_tiles_of_head<Config>(params));
  }
  __syncthreads();
  for (int i = 0; i < place.shares; ++i) {
    if (has(place.finished, i)) {
      RowWork<Config>{params, share_of(place.finished, i)}.finish(staging);
    }
  }
}

}  // namespace cuflash::fa3
