// cvt: float8 (e4m3) to float16.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Data movement and conversion instructions: cvt"; sm_89. Converts the four numbers of a
// register to float16, two in a register, the first in the low half. The conversion is exact, and
// NaN stays NaN.
__device__ inline void halves_of_float8(unsigned (&halves)[2], unsigned four) {
  asm("{\n"
      ".reg .b16 first, last;\n"
      "mov.b32 {first, last}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, last;\n"
      "}\n"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(four));
}

}  // namespace cuflash::ptx
