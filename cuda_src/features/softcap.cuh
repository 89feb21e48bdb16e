// Soft capping: a score s becomes cap * tanh(s / cap), which never exceeds the cap. Its slope is
// 1 - tanh(s / cap)^2.
#pragma once

#include "../ptx/tanh.cuh"
#include "../tile/score.cuh"

namespace cuflash {

struct SoftcapParams {
  double inner;  // scale / cap
  double cap;
};

// As accurate as the storage type needs it: one instruction for bfloat16.
__device__ inline float tanh_for(__nv_bfloat16, float x) { return ptx::tanh_approximate(x); }
__device__ inline float tanh_for(__half, float x) { return tanhf(x); }
__device__ inline float tanh_for(float, float x) { return tanhf(x); }
__device__ inline double tanh_for(double, double x) { return tanh(x); }

// Scores are in units of the cap.
template <class Storage>
struct SoftcapTerm : FunctionTerm {
  using Compute = decltype(to_compute(Storage()));
  Compute inner;

  template <class Params>
  __device__ SoftcapTerm(const Params& params, int, int, double)
      : inner(static_cast<Compute>(params.softcap.inner)) {}

  template <class Params>
  __device__ static double unit(const Params& params, double) {
    return params.softcap.cap;
  }

  __device__ Graded<Compute> operator()(Compute score, int, int) const {
    const Compute capped = tanh_for(Storage(), rounded_product(score, inner));
    return {capped, fma(-capped, capped, Compute(1))};
  }
};

}  // namespace cuflash
