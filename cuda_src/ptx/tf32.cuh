// float32 rounded to tf32: its upper 19 bits, of which 10 are fraction.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Data movement and conversion instructions: cvt"; sm_90. To nearest, ties to even.
__device__ inline float round_to_tf32(float x) {
  unsigned rounded;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(rounded) : "f"(x));
  return __uint_as_float(rounded);
}

// The same before sm_90, with ties away from zero, in two integer instructions; PTX's cvt.rna takes
// four, two of which look for NaN. A NaN whose payload is all ones becomes -0 here (x minus the
// result is still NaN), and the last 2^-12 of the range becomes infinity.
__device__ inline float round_to_tf32_by_integers(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}

}  // namespace cuflash::ptx
