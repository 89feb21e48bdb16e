// FlashAttention-2 backward: the loads of a block's steps from device memory.
#pragma once

#include "backward_types.cuh"

namespace cuflash::fa2 {

// Loads Q and dO of the next step, and lse and delta of their rows. The addresses advance from step
// to step; they are recomputed only where a query head of the group ends.
template <class Config>
struct QLoads {
  using Types = BackwardTypes<Config>;
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  // lse and delta are loaded in chunks of 16 bytes, each by a thread of its own: the first `chunks`
  // threads load lse, the next ones delta.
  static constexpr int chunk = 16 / static_cast<int>(sizeof(Compute));
  static constexpr int chunks = Config::block_q / chunk;
  static_assert(Config::block_q % chunk == 0, "rows are whole chunks");
  static_assert(2 * chunks <= Types::threads, "a thread for each");

  TileStream<Config::copies, Types::threads, Direction::up, typename Types::QTile> q;
  TileStream<Config::copies, Types::threads, Direction::up, typename Types::DoutTile> dout;
  const Compute* numbers;  // this thread's chunk of lse or delta
  int q_tile;
  int head;
  int stage = 0;
  int left;  // remaining steps, including this one

  __device__ QLoads(const BackwardContext<Config>& c, const QSteps<Config>& steps)
      : q(first_row(c, steps, c.params.q), c.params.q.row_stride, c.params.shape.head_dim),
        dout(first_row(c, steps, c.params.dout), c.params.dout.row_stride,
             c.params.shape.head_dim_v),
        q_tile(steps.first().q_tile),
        head(steps.first().head),
        left(steps.count) {
    const void* from = is_lse() ? c.params.row_lse : c.params.delta;
    const long long row = c.head_row(head) + q_tile * Config::block_q;
    numbers = static_cast<const Compute*>(from) + row + thread() % chunks * chunk;
  }

  __device__ void load_q(const BackwardContext<Config>& c) {
    q.load(c.q(stage), left > 0, valid_rows(c));
  }
  __device__ void load_dout(const BackwardContext<Config>& c) {
    dout.load(c.dout(stage), left > 0, valid_rows(c));
  }
  __device__ void load_numbers(const BackwardContext<Config>& c) const {
    RowStatistics<Config>& rows = c.shared.rows[stage];
    Compute* to = is_lse() ? rows.lse.data : rows.delta.data;
    copy_chunk_if<Config::workspace_copies>(left > 0 && thread() < 2 * chunks,
                                            to + thread() % chunks * chunk, numbers);
  }

  // Goes on to the next step, after all loads of this one.
  __device__ void advance(const BackwardContext<Config>& c, const QSteps<Config>& steps) {
    --left;
    stage = stage + 1 == Config::num_stages ? 0 : stage + 1;
    if constexpr (skips_steps<Config>) {
      move_to(c, steps.after({head, q_tile, 0, 0, false}));
      return;
    }
    numbers += Config::block_q;
    if (++q_tile < steps.blocks.end) return;
    const int back = (q_tile - steps.blocks.begin) * Config::block_q;
    q.move(c.params.q.head_stride - back * q.row_stride);
    dout.move(c.params.dout.head_stride - back * dout.row_stride);
    numbers += c.params.padded_rows - back;
    q_tile = steps.blocks.begin;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static bool is_lse() { return thread() < chunks; }
  __device__ static const Storage* first_row(const BackwardContext<Config>& c,
                                             const QSteps<Config>& steps, const Tensor& tensor) {
    const QStep first = steps.first();
    return q_row<const Storage>(tensor, c.seq, first.head, first.q_begin);
  }
  // Where steps are skipped: moves the streams from the end of this step's rows to the first row of
  // the next step.
  __device__ void move_to(const BackwardContext<Config>& c, const QStep& next) {
    const long long heads = next.head - head;
    const int rows = (next.q_tile - q_tile) * Config::block_q;
    q.move(heads * c.params.q.head_stride + (rows - Config::block_q) * q.row_stride);
    dout.move(heads * c.params.dout.head_stride + (rows - Config::block_q) * dout.row_stride);
    numbers += heads * c.params.padded_rows + rows;
    head = next.head;
    q_tile = next.q_tile;
  }
  __device__ int valid_rows(const BackwardContext<Config>& c) const {
    return c.seq.seqlen_q - q_tile * Config::block_q;
  }
};

// Loads all tiles of a step and advances to the next; loads nothing if there is no such step.
template <class Config>
__device__ inline void load_step(const BackwardContext<Config>& c, const QSteps<Config>& steps,
                                 QLoads<Config>& loads) {
  loads.load_q(c);
  loads.load_dout(c);
  loads.load_numbers(c);
  commit_copies<Config::workspace_copies>();
  loads.advance(c, steps);
}

}  // namespace cuflash::fa2
