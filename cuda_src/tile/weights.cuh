// Features that drop weights of the softmax. Config::Weights names the feature; sums and
// log-sum-exps of rows cover all weights.
//
//   AllWeights           keeps all of them
//   struct Weights {     drops the weights of some pairs and scales up the others: Config::Rows
//                        scales rows of the output, and the code below scales the gradients
//     static constexpr bool drops = true;
//     Weights(params);   // what all tiles have in common
//     static Compute inverse_keep<Compute>(params);  // the factor of kept weights
//     struct Draws<Place> {                          // for a warp's tile of scores
//       Draws(params, const Weights&, const Place&);
//       // Masks of a lane's pairs in 16 rows and 16 columns that begin at (row, column): one mask
//       // for two neighbouring columns, in the order of a left operand. value[m][n][group] has
//       // mask n % 2 * 2 + group. The lower half covers the first column; ones keep a weight.
//       void of_block(unsigned (&masks)[4], int row, int column) const;
//       unsigned of_fragment(int row, int column) const;  // for 8 rows and 8 columns
//     };
//   };
//
// All lanes of a warp call these functions together.
#pragma once

#include "score_place.cuh"

namespace cuflash {

struct AllWeights {
  static constexpr bool drops = false;
  template <class Params>
  __device__ explicit AllWeights(const Params&) {}
};

// Calls function(mask, m, n, group) for every two neighbouring columns that a lane holds of a tile.
// A tile of whole blocks of 16 rows and columns begins at a multiple of 16 queries and keys.
template <class Config, class Tile, class Place, class Function>
__device__ __forceinline__ void for_each_mask(const typename Config::Params& params,
                                              const typename Config::Weights& weights,
                                              const Place& place, Function function) {
  const typename Config::Weights::template Draws<Place> draws(params, weights, place);
  if constexpr (Tile::fragment_rows == 16 && Tile::columns % 16 == 0) {
#pragma unroll
    for (int m = 0; m < Tile::row_fragments; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::column_fragments; n += 2) {
        unsigned masks[4];
        draws.of_block(masks, Tile::row(m, 0), Tile::column(n));
#pragma unroll
        for (int i = 0; i < 4; ++i) function(masks[i], m, n + i / 2, i % 2);
      }
    }
  } else {
    Tile::for_each_pair([&](int m, int n, int group) {
      function(draws.of_fragment(Tile::row(m, group), Tile::column(n)), m, n, group);
    });
  }
}

// Clears the dropped weights of a tile; does not scale up the others.
template <class Config, class Place, class Tile>
__device__ __forceinline__ void drop_weights(const typename Config::Params& params,
                                             const Place& place, Tile& tile) {
  if constexpr (Config::Weights::drops) {
    using Compute = typename Tile::Compute;
    const typename Config::Weights weights(params);
    for_each_mask<Config, Tile>(params, weights, place,
                                [&](unsigned mask, int m, int n, int group) {
                                  Compute(&pair)[2] = tile.value[m][n][group];
                                  if ((mask & 0x0000ffffu) == 0) pair[0] = 0;
                                  if ((mask & 0xffff0000u) == 0) pair[1] = 0;
                                });
  }
}

// The pairs of a tile that are kept, for code that has the weights first and their gradients later;
// empty where all are kept.
template <class Config, class Tile, bool drops = Config::Weights::drops>
struct KeptPairs {
  template <class Place>
  __device__ KeptPairs(const typename Config::Params&, const Place&) {}
  __device__ const Tile& of_weights(const Tile& weights) const { return weights; }
  __device__ void scale_gradients(const typename Config::Params&, Tile&) const {}
};
template <class Config, class Tile>
struct KeptPairs<Config, Tile, true> {
  using Compute = typename Tile::Compute;
  static constexpr int pairs =
      Tile::row_fragments * Tile::column_fragments * Tile::row_groups;  // of neighbouring columns
  unsigned bits[(pairs + 15) / 16] = {};  // pair i: bit i % 16 of both halves of word i / 16

  template <class Place>
  __device__ KeptPairs(const typename Config::Params& params, const Place& place) {
    const typename Config::Weights weights(params);
    for_each_mask<Config, Tile>(params, weights, place,
                                [&](unsigned mask, int m, int n, int group) {
                                  const int i = pair(m, n, group);
                                  bits[i / 16] |= mask & 0x00010001u << i % 16;
                                });
  }
  // The weights without the dropped ones, not yet scaled up.
  __device__ Tile of_weights(Tile weights) const {
    weights.for_each([&](Compute& x, int m, int n, int group, int which) {
      if (!keeps(m, n, group, which)) x = 0;
    });
    return weights;
  }
  // Turns gradients of the kept weights into gradients of all weights.
  __device__ void scale_gradients(const typename Config::Params& params, Tile& gradients) const {
    const auto factor = Config::Weights::template inverse_keep<Compute>(params);
    gradients.for_each([&](Compute& x, int m, int n, int group, int which) {
      x = keeps(m, n, group, which) ? x * factor : Compute(0);
    });
  }

 private:
  __device__ static constexpr int pair(int m, int n, int group) {
    return (m * Tile::column_fragments + n) * Tile::row_groups + group;
  }
  __device__ bool keeps(int m, int n, int group, int which) const {
    const int i = pair(m, n, group);
    return (bits[i / 16] & 1u << (i % 16 + 16 * which)) != 0;
  }
};

// The factor by which the finished gradient of the values is multiplied.
template <class Config>
__device__ inline double value_factor(const typename Config::Params& params) {
  if constexpr (Config::Weights::drops) {
    return Config::Weights::template inverse_keep<double>(params);
  } else {
    return 1.0;
  }
}

}  // namespace cuflash
