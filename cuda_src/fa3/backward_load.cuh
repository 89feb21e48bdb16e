// FlashAttention-3 backward, the load role: one thread loads K and V once, and Q and dO with lse
// and delta of their rows step by step, through the copy engine.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "backward_types.cuh"

namespace cuflash::fa3 {

// The number of the block's valid keys if it has a tail; block_kv or more if it has none.
template <class Config>
__device__ inline int keys_before_tail(const BackwardContext<Config>& c) {
  return rows_before_tail<Config>(c.seq, c.item.kv_begin);
}

template <class Config>
struct BackwardLoader {
  const BackwardContext<Config>& c;

  template <class Matrix>
  __device__ void load_kv(Matrix& matrix, const TensorMap* map, Barrier& full) const {
    arrive_expecting<Config>(full, Matrix::bytes);
    load_panels(matrix, map, ptx::shared_address(&full),
                static_cast<int>(c.seq.kv_row0) + c.item.kv_begin, c.kv_head(), c.seq.batch,
                ptx::kEvictFirst);
  }
  __device__ void load_k() const {
    if constexpr (Config::Lengths::vary) {
      if (keys_before_tail(c) < Config::block_kv) {
        load_kv(c.shared.k[0], &c.params.k_map, c.shared.k_tail.raw);
        return;
      }
    }
    load_kv(c.shared.k[0], &c.params.k_map, c.shared.k_full);
  }
  __device__ void load_v() const { load_kv(c.shared.v[0], &c.params.v_map, c.shared.v_full); }

  // Where steps are listed, also writes the note for the math roles.
  __device__ void load_q(const QPlace& place, const StepNote& note, int step) const {
    const RingPlace<Config::num_stages> ring(step);
    if constexpr (Config::listed) c.note_of(step) = note;
    load_rows(c.shared.q[ring.stage], &c.params.q_map, c.shared.q_full[ring.stage],
              c.shared.lse[ring.stage], c.params.row_lse, place);
  }
  // Where a term of the scores reads an array: loads the array's tile of a step, whose stage must
  // be free.
  __device__ void load_operand(const QPlace& place, int step) const {
    if constexpr (Config::operand_stages > 0) {
      const RingPlace<Config::operand_stages> ring(step);
      load_operand_tile<Config>(c.shared, c.params, ring.stage, c.seq.batch, place.head,
                                place.tile * Config::block_q, c.item.kv_begin);
    }
  }
  __device__ void load_dout(const QPlace& place, int step) const {
    const RingPlace<Config::num_stages> ring(step);
    load_rows(c.shared.dout[ring.stage], &c.params.dout_map, c.shared.dout_full[ring.stage],
              c.shared.delta[ring.stage], c.params.delta, place);
  }

 private:
  template <class Matrix>
  __device__ void load_rows(Matrix& matrix, const TensorMap* map, Barrier& full,
                            QueryNumbers<Config>& numbers, const void* all_numbers,
                            const QPlace& place) const {
    constexpr unsigned bytes = sizeof(numbers.value);
    const unsigned barrier = ptx::shared_address(&full);
    const int row = place.tile * Config::block_q;
    arrive_expecting<Config>(full, Matrix::bytes + bytes);
    load_panels(matrix, map, barrier, static_cast<int>(c.seq.q_row0) + row, place.head, c.seq.batch,
                ptx::kEvictLast);
    ptx::bulk_load(ptx::shared_address(numbers.value),
                   static_cast<const float*>(all_numbers) + c.head_row(place.head) + row, bytes,
                   barrier);
  }
};

// The loading thread issues the loads that have room from the start, in the order in which math
// waits for them. The same thread has initialised the barriers, so it waits for no other thread.
template <class Config>
__device__ inline void load_first(const BackwardContext<Config>& c) {
  const BackwardLoader<Config> loader{c};
  StepWalk<BackwardContext<Config>, Config::listed> walk(c);
#pragma unroll
  for (int step = 0; step < Config::num_stages; ++step) {
    if (step >= c.steps()) return;
    if (step == 0) loader.load_k();
    loader.load_q(walk.place, walk.note, step);
    if (step < Config::operand_stages) loader.load_operand(walk.place, step);
    if (step == 0) loader.load_v();
    loader.load_dout(walk.place, step);
    walk.advance();
  }
}

// The later loads of the array that a term of the scores reads; load_first() issues the first ones.
// Math releases a step's tile of the array before the step ends, so that the next tile is loaded
// during the rest of the step.
template <class Config, bool = (Config::operand_stages > 0)>
struct OperandLoads {
  const BackwardContext<Config>& c;
  StepWalk<BackwardContext<Config>, Config::listed> walk;
  int step = Config::operand_stages;

  __device__ explicit OperandLoads(const BackwardContext<Config>& c) : c(c), walk(c) {
    for (int i = 0; i < step; ++i) walk.advance();
  }
  __device__ void load_next(const BackwardLoader<Config>& loader, int steps) {
    if (step >= steps) return;
    const RingPlace<Config::operand_stages> ring(step);
    wait_empty<Config>(c.shared.operand_empty[ring.stage], ring.phase);
    loader.load_operand(walk.place, step);
    walk.advance();
    ++step;
  }
};
template <class Config>
struct OperandLoads<Config, false> {
  __device__ explicit OperandLoads(const BackwardContext<Config>&) {}
  __device__ void load_next(const BackwardLoader<Config>&, int) {}
};

// A warp clears the rows of K beyond the valid keys, which dQ would sum. V needs none of this:
// dP of these keys is hidden.
template <class Config>
__device__ inline void clear_k_tail(const BackwardContext<Config>& c) {
  if constexpr (Config::Lengths::vary) {
    const int count = keys_before_tail(c);
    if (count >= Config::block_kv) return;
    wait<Config>(c.shared.k_tail.raw, 0);
    clear_rows<32>(c.shared.k[0], count);
    __syncwarp();
    arrive_warp<Config>(c.shared.k_full);
  }
}

// A whole warp waits for room for the remaining loads; one of its threads issues them.
template <class Config>
__device__ inline void load_role(const BackwardContext<Config>& c) {
  constexpr int stages = Config::num_stages;
  const BackwardLoader<Config> loader{c};
  const bool loads = threadIdx.x % 32 == 0;
  const int steps = c.steps();
  clear_k_tail(c);
  StepWalk<BackwardContext<Config>, Config::listed> walk(c);
  OperandLoads<Config> operands(c);
#pragma unroll
  for (int step = 0; step < stages; ++step) walk.advance();
#pragma unroll 1
  for (int step = stages; step < steps + stages; ++step) {
    if (loads) operands.load_next(loader, steps);
    await_step<Config>(step % stages);
    if (loads && step < steps) {
      loader.load_q(walk.place, walk.note, step);
      loader.load_dout(walk.place, step);
    }
    __syncwarp();
    walk.advance();
  }
}

}  // namespace cuflash::fa3
