// Dropout: drops weights at random. The draw for a query and a key depends only on these two, the
// entry, the number of heads, the head and the seed; cuflash/features/draws.py describes it and
// draws the same. The counter of the generator is laid out so that the four words of one call are
// the four registers that a lane has of 16 queries and 16 keys in the left operand of a product.
#pragma once

#include "../ptx/compare_halves.cuh"
#include "../tile/score.cuh"
#include "../tile/weights.cuh"

namespace cuflash {

struct DropoutParams {
  const unsigned* dropout_seed;  // 2, 4 or 6 words; null: key0 and key1 are the seed
  double inverse_keep;           // 1 over the share that is kept
  float inverse_keep_single;
  unsigned limit;  // the number of 2^14 draws that keep a weight
  unsigned key0;
  unsigned key1;
  int words;
  int entries;  // batch entries after which draws repeat
  int heads;    // query heads after which draws repeat
};

// Seven rounds of philox4x32: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1,
// 2, 3" (2011).
__device__ __forceinline__ void philox(unsigned (&counter)[4], unsigned key0, unsigned key1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const unsigned long long first = 0xd2511f53ull * counter[0];
    const unsigned long long second = 0xcd9e8d57ull * counter[2];
    counter[0] = static_cast<unsigned>(second >> 32) ^ counter[1] ^ key0;
    counter[1] = static_cast<unsigned>(second);
    counter[2] = static_cast<unsigned>(first >> 32) ^ counter[3] ^ key1;
    counter[3] = static_cast<unsigned>(first);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// x % count. Nearly all numbers are below the count and take no division, which would be the
// longest chain of instructions of a step.
__device__ __forceinline__ unsigned wrapped(unsigned x, unsigned count) {
  return x < count ? x : x % count;
}

// The mask of two draws, one in each half of a word: all bits of a half are set if its draw is
// below the limit. A draw of 14 bits is the bit pattern of a float16 that is neither negative nor
// infinite, and such patterns are ordered as the numbers are.
__device__ inline unsigned below(unsigned word, unsigned limit) {
  return ptx::halves_less_than(word & 0x3fff3fffu, limit * 0x00010001u);
}

struct Dropout {
  static constexpr bool drops = true;
  unsigned key0;
  unsigned key1;
  unsigned offset;
  int first_entry;  // the arrays' first entry in the larger call to which they belong
  int first_head;

  template <class Params>
  __device__ explicit Dropout(const Params& params) {
    const DropoutParams& given = params.dropout;
    key0 = given.key0;
    key1 = given.key1;
    offset = 0;
    first_entry = 0;
    first_head = 0;
    if (given.words > 0) {
      key0 = given.dropout_seed[0];
      key1 = given.dropout_seed[1];
    }
    if (given.words > 2) {  // the upper word of the offset changes the key
      offset = given.dropout_seed[2];
      key0 ^= given.dropout_seed[3];
    }
    if (given.words > 4) {
      first_entry = static_cast<int>(given.dropout_seed[4]);
      first_head = static_cast<int>(given.dropout_seed[5]);
    }
  }

  template <class Compute, class Params>
  __device__ static Compute inverse_keep(const Params& params) {
    if constexpr (sizeof(Compute) == 8) {
      return params.dropout.inverse_keep;
    } else {
      return params.dropout.inverse_keep_single;
    }
  }

  template <class Place>
  struct Draws;

  // A lane's generator calls for a block of 16 queries and 16 keys.
  struct Calls {
    unsigned keys;  // words of the counter, for query 0 and key 0 of the warp's tile
    unsigned queries;
    unsigned head;
    unsigned offset;
    unsigned key0;
    unsigned key1;
    unsigned limit;

    template <class Params, class Place>
    __device__ Calls(const Params& params, const Dropout& weights, const Place& place)
        : keys(place.key0 / 16 * 4),
          queries(place.query0 / 16 * 8),
          head((weights.first_entry + wrapped(place.batch, params.dropout.entries)) *
                   params.dropout.heads +
               wrapped(weights.first_head + place.head, params.dropout.heads)),
          offset(weights.offset),
          key0(weights.key0),
          key1(weights.key1),
          limit(params.dropout.limit) {}
    // The call of the block that lies `query` queries and `key` keys further on.
    __device__ __forceinline__ void call(unsigned (&words)[4], int query, int key) const {
      words[0] = keys + key / 16 * 4;
      words[1] = queries + query / 16 * 8;
      words[2] = head;
      words[3] = offset;
      philox(words, key0, key1);
    }
  };
};

// Rows are queries: a lane's four registers are the four words of its call.
template <>
struct Dropout::Draws<RowsOfQueries> : Dropout::Calls {
  int row;  // where the tile begins in its block of 16 queries and 16 keys: 0 or 8
  int column;
  template <class Params>
  __device__ Draws(const Params& params, const Dropout& weights, const RowsOfQueries& place)
      : Calls(params, weights, place), row(place.query0 % 16), column(place.key0 % 16) {
    const LanePosition lane;
    keys += lane.column / 2;
    queries += lane.row;
  }
  __device__ __forceinline__ void of_block(unsigned (&masks)[4], int row, int column) const {
    call(masks, row, column);
#pragma unroll
    for (int i = 0; i < 4; ++i) masks[i] = below(masks[i], limit);
  }
  __device__ unsigned of_fragment(int row, int column) const {
    row += this->row;
    column += this->column;
    unsigned words[4];
    call(words, row, column);
    const unsigned near = row / 8 % 2 == 0 ? words[0] : words[1];
    const unsigned far = row / 8 % 2 == 0 ? words[2] : words[3];
    return below(column / 8 % 2 == 0 ? near : far, limit);
  }
};

// Rows are keys: a register of a lane has one key and two queries, so it takes one half of a word
// from each of two calls. The neighbour with the next key takes the other halves, so each of the
// two lanes makes one of the calls.
template <>
struct Dropout::Draws<RowsOfKeys> : Dropout::Calls {
  bool odd;  // whether the lane's key, and the query of its call, are odd
  template <class Params>
  __device__ Draws(const Params& params, const Dropout& weights, const RowsOfKeys& place)
      : Calls(params, weights, place) {
    const LanePosition lane;
    odd = lane.row % 2 != 0;
    keys += lane.row / 2;
    queries += lane.column + (odd ? 1 : 0);
  }
  __device__ __forceinline__ void of_block(unsigned (&masks)[4], int row, int column) const {
    unsigned words[4];
    call(words, column, row);
    // Selectors of halves of words: those that the neighbour needs, and those of this lane's word
    // and of the received word that make a mask.
    const unsigned given = odd ? 0x5410u : 0x7632u;
    const unsigned first = odd ? 0x3254u : 0x5410u;
    const unsigned second = odd ? 0x3276u : 0x7610u;
#pragma unroll
    for (int far = 0; far < 2; ++far) {  // the next eight keys
      const unsigned sent = __byte_perm(words[2 * far], words[2 * far + 1], given);
      const unsigned got = __shfl_xor_sync(0xffffffffu, sent, 4);
      masks[far] = below(__byte_perm(words[2 * far], got, first), limit);
      masks[2 + far] = below(__byte_perm(words[2 * far + 1], got, second), limit);
    }
  }
};

// The end of a row: scales up the kept weights. The row's sum is that of all weights.
struct DropoutEnd {
  static constexpr bool finite_when_dead = false;
  template <class Config, class Compute>
  __device__ static Compute end(const typename Config::Params& params, int, Compute&, Compute&) {
    return Dropout::inverse_keep<Compute>(params);
  }
};

}  // namespace cuflash
