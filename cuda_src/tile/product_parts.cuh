// What products that have no form of their own for it do instead.
#pragma once

namespace cuflash {

template <class Products>
struct ProductsByParts {
  // As `multiply`; 16-bit products load their fragments ahead.
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply_ahead(Accumulators& accumulators, const A& a, const B& b) {
    Products::template multiply<depth>(accumulators, a, b);
  }

  // As `multiply_weights`, with prepare.prepare<columns>(first) called before those columns of the
  // weights are read; here of all of them.
  template <int, class Accumulators, class Weights, class B, class Scratch, class Prepare>
  __device__ static void multiply_prepared_weights(Accumulators& accumulators,
                                                   const Weights& weights, const B& b,
                                                   const Scratch& scratch, int row0, int key0,
                                                   Prepare prepare) {
    prepare.template prepare<Weights::columns>(0);
    Products::multiply_weights(accumulators, weights, b, scratch, row0, key0);
  }
};

}  // namespace cuflash
