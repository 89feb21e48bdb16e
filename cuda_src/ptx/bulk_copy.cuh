// cp.async.bulk: runs of bytes from global to shared memory, by the copy engine.
// PTX ISA "Data movement and conversion instructions: cp.async.bulk"; sm_90.
#pragma once

namespace cuflash::ptx {

// `bytes` bytes, which count on the barrier; all of them multiples of 16.
__device__ inline void bulk_load(unsigned shared, const void* from, unsigned bytes,
                                 unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace cuflash::ptx
