// A score term: z_ij += tilt * weights[batch, head] * (i - j), in natural units.
namespace cuflash {

struct TiltParams {
  double tilt;
  const void* weights;  // [batch, heads_q], contiguous
};

template <class T>
struct TiltTerm : AddedTerm {
  double slope;  // in units of the scores

  template <class Params>
  __device__ TiltTerm(const Params& params, int batch, int head, double unit) {
    const int place = batch * params.shape.heads_q + head;
    const double weight = to_compute(static_cast<const T*>(params.tilt.weights)[place]);
    slope = params.tilt.tilt * weight / unit;
  }

  template <class Compute>
  __device__ Compute operator()(Compute score, int i, int j) const {
    return score + static_cast<Compute>(slope) * static_cast<Compute>(i - j);
  }
};

}  // namespace cuflash
