// A mask by position: query i sees key j iff j is even (parity 0) or odd (parity 1).
namespace cuflash {

struct ParityParams {
  long long parity;
};

struct ParityTerm : AddedTerm {
  int parity;

  template <class Params>
  __device__ ParityTerm(const Params& params, int, int, double)
      : parity(static_cast<int>(params.parity.parity)) {}

  template <class Compute>
  __device__ Compute operator()(Compute score, int, int j) const {
    return j % 2 == parity ? score : -infinity<Compute>();
  }
};

}  // namespace cuflash
