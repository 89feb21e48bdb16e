// ex2: the exponential of the special function unit.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Floating point instructions: ex2"; every architecture. 2^x with an error of about 2^-22;
// subnormal results are flushed to zero, 2^-inf is +0, a NaN stays NaN.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuflash::ptx
