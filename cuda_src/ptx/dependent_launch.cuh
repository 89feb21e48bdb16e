// griddepcontrol: a kernel begins while the kernel before it in the stream still runs.
// PTX ISA "Parallel synchronization and communication instructions: griddepcontrol"; sm_90.
#pragma once

namespace cuflash::ptx {

// Lets the next kernel begin once every block has called this or ended.
__device__ inline void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// Waits until the kernel before has ended and its writes can be read. Returns at once if this
// kernel was launched after its end.
__device__ inline void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace cuflash::ptx
