// Default forms for products that have no special form.
#pragma once

namespace cuflash {

template <class Products>
struct ProductsByParts {
  // Same as `multiply`. 16-bit products override it and load their fragments ahead.
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply_ahead(Accumulators& accumulators, const A& a, const B& b) {
    Products::template multiply<depth>(accumulators, a, b);
  }

  // Same as `multiply_weights`, but calls prepare.prepare<columns>(first) before it reads those
  // columns of the weights; here it prepares all of them at once.
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
