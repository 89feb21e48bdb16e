// Stands for cuda_src/ptx/deadline.cuh: what never comes is found by whoever waits.
#pragma once

namespace cuflash::ptx {

struct Deadline {
  void check() const {}
};

}  // namespace cuflash::ptx
