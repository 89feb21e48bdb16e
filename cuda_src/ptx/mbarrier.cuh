// mbarrier: barriers in shared memory that count arrivals and bytes.
// PTX ISA "Parallel synchronization and communication instructions: mbarrier"; sm_90. Addresses are
// in the shared window, see shared_address.
#pragma once

namespace cuflash::ptx {

// A phase is complete after `arrivals` arrivals and all the bytes that they announced.
__device__ inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes this thread's initialised barriers visible to the copy engine.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ inline void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` bytes of bulk copies too.
__device__ inline void mbarrier_arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete. A fresh barrier is in the phase of parity 0,
// and the phase before it, of parity 1, counts as complete.
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for test builds: traps after a while instead of hanging, as deadline.cuh does. It is one
// asm text, because a loop around a separate test makes ptxas serialise the products beside it.
__device__ inline void mbarrier_wait_or_trap(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete, late;\n"
      ".reg .u32 begin, spent;\n"
      "mov.u32 begin, %%clock_hi;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra done;\n"
      "mov.u32 spent, %%clock_hi;\n"
      "sub.u32 spent, spent, begin;\n"
      "setp.gt.u32 late, spent, 4;\n"
      "@late trap;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace cuflash::ptx
