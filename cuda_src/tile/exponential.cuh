// Exponentials in double precision of many numbers side by side. The CUDA library's exp branches
// for numbers far from zero, so several calls run one after the other, each a chain of dependent
// instructions. Here one branch serves all numbers.
#pragma once

namespace cuflash {

// A bound on the upper word of |x|, shifted left by one. Below it |x| < 704, and neither e^x nor a
// power of two on the way to it is subnormal or infinite.
constexpr unsigned kNearZero = 0x40860000u << 1;
__device__ inline unsigned distance_from_zero(double x) {
  return static_cast<unsigned>(__double_as_longlong(x) >> 32) << 1;
}

// e^x within one unit in the last place, for x near zero.
//
// e^x = 2^n e^r with n the whole number next to x / ln 2 (Cody and Waite, "Software Manual for the
// Elementary Functions", 1980, chapter 6). e^r is the minimax polynomial of degree 11 whose first
// two coefficients are 1 (found by Remez' algorithm): it errs by 3.6e-18 for |r| <= ln 2 / 2.
__device__ inline double exponential_near_zero(double x) {
  constexpr double to_whole = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to whole numbers
  const double shifted = fma(x, 0x1.71547652b82fep+0, to_whole);
  const double n = shifted - to_whole;
  double r = fma(n, -0x1.62e42fefa39efp-1, x);  // ln 2 in two parts
  r = fma(n, -0x1.abc9e3b39803fp-56, r);
  double y = 0x1.ad7f7b143fa7ep-26;
  y = fma(y, r, 0x1.28ad68a24880dp-22);
  y = fma(y, r, 0x1.71df253a0af57p-19);
  y = fma(y, r, 0x1.a0199a16e272cp-16);
  y = fma(y, r, 0x1.a01a012a69cb7p-13);
  y = fma(y, r, 0x1.6c16c184266cdp-10);
  y = fma(y, r, 0x1.1111111127b9bp-7);
  y = fma(y, r, 0x1.555555555088cp-5);
  y = fma(y, r, 0x1.55555555554fap-3);
  y = fma(y, r, 0x1.000000000000ap-1);
  y = fma(y, r, 1.0);
  y = fma(y, r, 1.0);
  // Times 2^n: adds n, the lower bits of `shifted`, to the exponent.
  return __longlong_as_double(__double_as_longlong(y) + (__double_as_longlong(shifted) << 52));
}

// x -> e^x of every element of a tile.
template <class Tile>
__device__ inline void exponentials(Tile& tile) {
  unsigned farthest = 0;
  tile.for_each([&](double& x, int, int, int, int) {
    const unsigned distance = distance_from_zero(x);
    farthest = distance > farthest ? distance : farthest;
  });
  if (farthest < kNearZero) {
    tile.for_each([](double& x, int, int, int, int) { x = exponential_near_zero(x); });
  } else {
    tile.for_each([](double& x, int, int, int, int) { x = exp(x); });
  }
}

}  // namespace cuflash
