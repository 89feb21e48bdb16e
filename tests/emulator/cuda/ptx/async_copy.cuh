// Stands for cuda_src/ptx/async_copy.cuh. A copy is done at once or when its group is waited for;
// warps and blocks alternate between the two.
#pragma once

#include "load_matrix.cuh"

namespace cuflash::ptx {

inline void async_copy_16(unsigned shared, const void* global, int bytes) {
  void* to = emulated::shared_at(shared, 16);
  if (reinterpret_cast<std::uintptr_t>(global) % 16) {
    emulated::fail("cp.async: an address is not a multiple of 16");
  }
  if ((threadIdx.x / 32 + emulated::variant()) % 2 != 0) {
    emulated::finish({to, global, bytes != 0});
    return;
  }
  emulated::copy_with_group({to, global, bytes != 0});
}

inline void async_copy_16_if(bool wanted, unsigned shared, const void* global, int bytes) {
  if (wanted) async_copy_16(shared, global, bytes);
}

inline void async_copy_commit() { emulated::close_copies(); }

template <int pending>
inline void async_copy_wait() {
  emulated::wait_for_copies(pending);
}

}  // namespace cuflash::ptx
