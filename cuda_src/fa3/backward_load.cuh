// FlashAttention-3 backward, the load role: one thread brings K and V once, and Q and dO with the
// numbers of their rows step by step, through the copy engine.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "backward_types.cuh"

namespace cuflash::fa3 {

template <class Config, class Types = BackwardTypes<Config>>
struct BackwardLoader {
  const BackwardContext<Config>& c;
  const RingPhases phases;

  template <class Matrix>
  __device__ void load_kv(Matrix& matrix, const TensorMap* map, Barrier& full) const {
    arrive_expecting<Config>(full, Matrix::bytes);
    load_panels(matrix, map, ptx::shared_address(&full),
                static_cast<int>(c.seq.kv_row0) + c.item.kv_begin, c.item.head, c.seq.batch,
                ptx::kEvictFirst);
  }
  __device__ void load_k() const { load_kv(c.shared.k, &c.params.k_map, c.shared.k_full); }
  __device__ void load_v() const { load_kv(c.shared.v, &c.params.v_map, c.shared.v_full); }

  __device__ void load_q(const QPlace& place, int step) const {
    const RingPlace<Config::num_stages> ring(step, phases);
    wait_empty<Config>(c.shared.q_empty[ring.stage], ring.phase);
    load_rows(c.shared.q[ring.stage], &c.params.q_map, c.shared.q_full[ring.stage],
              c.shared.lse[ring.stage], c.params.row_lse, place);
  }
  __device__ void load_dout(const QPlace& place, int step) const {
    const RingPlace<Config::num_stages> ring(step, phases);
    wait_empty<Config>(c.shared.dout_empty[ring.stage], ring.phase);
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

// Everything of a kv tile, in the order in which the math role waits.
template <class Config>
__device__ inline void load_tile(const BackwardContext<Config>& c, unsigned kv_phase,
                                 RingPhases phases) {
  const BackwardLoader<Config> loader{c, phases};
  const int steps = c.steps();
  QPlace place = c.first();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    loader.load_q(place, step);
    if (step == 0) {
      wait_empty<Config>(c.shared.k_empty, kv_phase);
      loader.load_k();
    }
    loader.load_dout(place, step);
    if (step == 0) {
      wait_empty<Config>(c.shared.v_empty, kv_phase);
      loader.load_v();
    }
    place = c.after(place);
  }
}

template <class Config>
__device__ inline void load_role(const Fa3BackwardParams& params, BackwardStorage<Config>& shared) {
  const KvTiles<Config> tiles(params);
  unsigned kv_phase = 0;
  RingPhases phases;
#pragma unroll 1
  for (int round = 0; tiles.number(round) < tiles.count; ++round) {
    const BackwardContext<Config> c(params, shared, tiles.item(tiles.number(round)));
    if (c.steps() == 0) continue;
    load_tile(c, kv_phase, phases);
    phases.advance<Config::num_stages>(c.steps());
    kv_phase ^= 1;
  }
}

}  // namespace cuflash::fa3
