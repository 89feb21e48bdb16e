// cp.async.bulk: runs of bytes between global and shared memory, by the copy engine.
// PTX ISA "Data movement and conversion instructions: cp.async.bulk"; sm_90.
#pragma once

namespace cuflash::ptx {

// Copies `bytes` bytes, which count on the barrier. The addresses and `bytes` are multiples of 16.
__device__ inline void bulk_load(unsigned shared, const void* from, unsigned bytes,
                                 unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same from shared to global memory; joins the group that this thread commits next.
__device__ inline void bulk_store(void* to, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared), "r"(bytes)
               : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Waits until all groups of this thread are written.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

}  // namespace cuflash::ptx
