// A score term: z_ij += tilt * weights[batch, head] * (i - j), in natural units.
namespace cuflash {

struct TiltParams {
  double tilt;
  const void* weights;  // [batch, heads_q], contiguous
};

template <class T>
struct TiltTerm : AddedTerm {
  double slope;  // in units of the scores
  int ahead;     // of the lane's first query and key

  template <class Params>
  __device__ TiltTerm(const Params& params, const Lane& lane, double unit)
      : ahead(lane.i - lane.j) {
    const int place = lane.batch * params.shape.heads_q + lane.head;
    const double weight = to_compute(static_cast<const T*>(params.tilt.weights)[place]);
    slope = params.tilt.tilt * weight / unit;
  }

  template <class Compute>
  __device__ Compute operator()(Compute score, int di, int dj) const {
    return score + static_cast<Compute>(slope) * static_cast<Compute>(ahead + di - dj);
  }
};

}  // namespace cuflash
