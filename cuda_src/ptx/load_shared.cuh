// ld.shared: one or two elements from an address of the shared window (see shared_address). Such
// an address takes one register; a pointer takes two.
// PTX ISA "Data movement and conversion instructions: ld"; every architecture.
#pragma once

namespace cuflash::ptx {

__device__ inline void load_shared(float& x, unsigned address) {
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(x) : "r"(address) : "memory");
}
__device__ inline void load_shared(double& x, unsigned address) {
  asm volatile("ld.shared.f64 %0, [%1];\n" : "=d"(x) : "r"(address) : "memory");
}

// Two neighbouring elements; the address is a multiple of their total size.
__device__ inline void load_shared(float (&x)[2], unsigned address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(x[0]), "=f"(x[1])
               : "r"(address)
               : "memory");
}
__device__ inline void load_shared(double (&x)[2], unsigned address) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];\n"
               : "=d"(x[0]), "=d"(x[1])
               : "r"(address)
               : "memory");
}

}  // namespace cuflash::ptx
