// A limit to waiting, for test builds: a wait that never ends is an error instead of a hang.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Special registers: %clock_hi", which counts 2^32 clocks, and "trap".
class Deadline {
  const unsigned begin;

  __device__ static unsigned now() {
    unsigned time;
    asm volatile("mov.u32 %0, %%clock_hi;\n" : "=r"(time)::"memory");
    return time;
  }

 public:
  __device__ Deadline() : begin(now()) {}

  // Ends the kernel with an error, some ten seconds after construction.
  __device__ void check() const {
    if (now() - begin > 4) asm volatile("trap;\n");
  }
};

}  // namespace cuflash::ptx
