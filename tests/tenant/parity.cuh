// A mask by position: query i sees key j iff j is even (parity 0) or odd (parity 1).
namespace cuflash {

struct ParityParams {
  long long parity;
};

struct ParityTerm : AddedTerm {
  int parity;
  int first;  // key of the lane

  template <class Params>
  __device__ ParityTerm(const Params& params, const Lane& lane, double)
      : parity(static_cast<int>(params.parity.parity)), first(lane.j) {}

  template <class Compute>
  __device__ Compute operator()(Compute score, int, int dj) const {
    return (first + dj) % 2 == parity ? score : -infinity<Compute>();
  }
};

}  // namespace cuflash
