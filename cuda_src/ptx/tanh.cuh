// tanh: the hyperbolic tangent of the special function unit.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Floating point instructions: tanh"; sm_75 and newer. Relative error at most 2^-11,
// subnormal results included.
__device__ inline float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuflash::ptx
