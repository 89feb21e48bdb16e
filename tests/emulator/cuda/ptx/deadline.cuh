// Stands for cuda_src/ptx/deadline.cuh. The emulator itself finds waits that never end.
#pragma once

namespace cuflash::ptx {

struct Deadline {
  void check() const {}
};

}  // namespace cuflash::ptx
