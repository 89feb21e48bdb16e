// Stands for cuda_src/ptx/proxy_fence.cuh: there is one way to memory here.
#pragma once

namespace cuflash::ptx {

inline void fence_async_shared() {}
inline void fence_async_global() {}

}  // namespace cuflash::ptx
