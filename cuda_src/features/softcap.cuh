// Soft capping: a score s becomes cap * tanh(s / cap), which never exceeds the cap. Its slope is
// 1 - tanh(s / cap)^2, or 4 e / (1 + e)^2 with e = exp(-2 |s| / cap).
#pragma once

#include "../ptx/tanh.cuh"
#include "../tile/score.cuh"

namespace cuflash {

struct SoftcapParams {
  double inner;  // scale / cap
  double cap;
  float inner_single;  // rounded by the host: here each step would convert it
};

// scale / cap in the compute type.
template <class Params>
__device__ inline double inner_of(double, const Params& params) {
  return params.softcap.inner;
}
template <class Params>
__device__ inline float inner_of(float, const Params& params) {
  return params.softcap.inner_single;
}

// As accurate as the storage type needs: one instruction for bfloat16.
__device__ inline float tanh_for(__nv_bfloat16, float x) { return ptx::tanh_approximate(x); }
__device__ inline float tanh_for(__half, float x) { return tanhf(x); }
__device__ inline float tanh_for(float, float x) { return tanhf(x); }
__device__ inline double tanh_for(double, double x) { return tanh(x); }

// The slope at x, whose hyperbolic tangent is y. A 16-bit type cannot hold the digits that 1 - y^2
// cancels.
template <class Storage, class Compute>
__device__ inline Compute slope_for(Storage, Compute x, Compute y) {
  if constexpr (sizeof(Storage) == 2) {
    return fma(-y, y, Compute(1));
  } else {
    const Compute e = exp_of(Compute(-2) * fabs(x));
    return Compute(4) * e / ((Compute(1) + e) * (Compute(1) + e));
  }
}

// Scores are in units of the cap.
template <class Storage>
struct SoftcapTerm : FunctionTerm {
  using Compute = decltype(to_compute(Storage()));
  Compute inner;

  template <class Params>
  __device__ SoftcapTerm(const Params& params, const Lane&, double)
      : inner(inner_of(Compute(), params)) {}

  template <class Params>
  __device__ static double unit(const Params& params, double) {
    return params.softcap.cap;
  }

  __device__ Graded<Compute> operator()(Compute score, int, int) const {
    const Compute x = rounded_product(score, inner);
    const Compute capped = tanh_for(Storage(), x);
    return {capped, slope_for(Storage(), x, capped)};
  }
};

}  // namespace cuflash
