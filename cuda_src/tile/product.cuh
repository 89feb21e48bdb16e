// The unit and the instruction that multiply the tiles of a Config.
#pragma once

#include "product_fp64.cuh"
#include "product_mma.cuh"
#include "product_scalar.cuh"
#include "product_tf32.cuh"

namespace cuflash {

enum class ProductKind {
  tensor_cores,  // 16-bit storage on the tensor cores
  tf32,          // float32 on the tensor cores: three tf32 products for each (sm_80)
  fp64,          // float64 on the tensor cores (sm_80)
  scalar,        // float32 and float64 by fused multiply-adds
};

template <class Config, ProductKind kind = Config::products>
struct ProductsOf {
  using Type = TensorCoreProducts<typename Config::Storage, Config::mma_depth>;
};
template <class Config>
struct ProductsOf<Config, ProductKind::tf32> {
  using Type = Tf32Products<Config::architecture>;
};
template <class Config>
struct ProductsOf<Config, ProductKind::fp64> {
  using Type = Fp64Products<Config::mma_depth>;
};
template <class Config>
struct ProductsOf<Config, ProductKind::scalar> {
  using Type = ScalarProducts<typename Config::Storage, Config::fragment_rows>;
};

template <class Config>
using Products = typename ProductsOf<Config>::Type;

}  // namespace cuflash
