// Stands for cuda_src/ptx/proxy_fence.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void fence_async_shared() { emulated::fence_shared(); }

inline void fence_async_global() {
  if (emulated::has_stores()) emulated::fail("a fence behind stores that are under way");
  emulated::current->cleared = false;
}

}  // namespace cuflash::ptx
