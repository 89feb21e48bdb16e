// Stands for cuda_src/ptx/mbarrier.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  emulated::begin_phases(barrier, arrivals);
}

inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(unsigned barrier) {
  emulated::arrive(emulated::phases_at(barrier), 0);
  emulated::pause();
}

inline void mbarrier_arrive_expecting(unsigned barrier, unsigned bytes) {
  emulated::arrive(emulated::phases_at(barrier), bytes);
}

inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  emulated::wait(emulated::phases_at(barrier), parity);
}

inline void mbarrier_wait_or_trap(unsigned barrier, unsigned parity) {
  mbarrier_wait(barrier, parity);
}

}  // namespace cuflash::ptx
