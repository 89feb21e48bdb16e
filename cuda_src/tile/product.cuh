// Which unit multiplies the tiles of a Config.
#pragma once

#include "product_mma.cuh"
#include "product_scalar.cuh"

namespace cuflash {

enum class ProductKind {
  tensor_cores,  // 16-bit storage
  scalar,        // float32 and float64 by fused multiply-adds
};

template <class Config, ProductKind kind = Config::products>
struct ProductsOf {
  using Type = TensorCoreProducts<typename Config::Storage, Config::mma_depth>;
};
template <class Config>
struct ProductsOf<Config, ProductKind::scalar> {
  using Type = ScalarProducts<typename Config::Storage, Config::fragment_rows>;
};

template <class Config>
using Products = typename ProductsOf<Config>::Type;

}  // namespace cuflash
