// rcp: the reciprocal of the special function unit.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Floating point instructions: rcp". Within one unit of the last place; subnormal inputs
// and results count as 0.
__device__ inline float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuflash::ptx
