// Float8 caches: keys and values are stored as e4m3 numbers, a byte each (float8_e4m3fn: up to 448,
// no infinity). Keys and values are the stored numbers times a scale. There is one scale for all
// keys and one for all values, or one for each sequence and head.
#pragma once

#include "../ptx/float8.cuh"
#include "../tile/numeric.cuh"
#include "../tile/score.cuh"
#include "../tile/stored.cuh"

namespace cuflash {

struct Float8Params {
  const float* k_scale;  // [batch, heads_kv], or one number; null: k_number
  const float* v_scale;
  float k_number;
  float v_number;
  int k_each;  // whether every sequence and head has its own
  int v_each;

  __device__ float scale_of_keys(const Shape& shape, int entry, int head) const {
    return k_scale == nullptr ? k_number : k_scale[k_each ? entry * shape.heads_kv + head : 0];
  }
  __device__ float scale_of_values(const Shape& shape, int entry, int head) const {
    return v_scale == nullptr ? v_number : v_scale[v_each ? entry * shape.heads_kv + head : 0];
  }
};

// Rounds to the nearest e4m3 number, ties to even; larger numbers become the largest. NaN stays
// NaN.
__device__ inline unsigned char float8_of(float x) {
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
  const float size = fminf(fabs(x), 448.0f);
  if (x != x) return 0x7f;
  if (size < 0.015625f) {  // below the least normal number, 2^-6, steps are of 2^-9
    return static_cast<unsigned char>(sign | static_cast<unsigned>(rintf(size * 512.0f)));
  }
  const unsigned bits = __float_as_uint(size);
  const unsigned rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;  // 3 fraction bits
  return static_cast<unsigned char>(sign | (rounded - (127 - 7) * 8));
}

// Converts two e4m3 numbers in float16 to a 16-bit type, which holds them exactly.
__device__ inline unsigned pair_of_halves(__half, unsigned halves) { return halves; }
__device__ inline unsigned pair_of_halves(__nv_bfloat16, unsigned halves) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack(__nv_bfloat16{}, both.x, both.y);
}

struct StoredInFloat8 {
  static constexpr bool converts = true;
  template <class Storage>
  using Cell = unsigned char;

  struct Row {
    float scale;
    template <class Storage>
    __device__ unsigned char operator()(Storage x) const {
      return float8_of(to_compute(x) / scale);
    }
  };
  template <class Params>
  __device__ static Row row_of(const Params& params, bool of_keys, int entry, int head) {
    const Float8Params& given = params.float8;
    return {of_keys ? given.scale_of_keys(params.shape, entry, head)
                    : given.scale_of_values(params.shape, entry, head)};
  }

  // Converts four numbers to two registers with two numbers each.
  template <class Storage>
  __device__ static void convert(unsigned bytes, unsigned& first, unsigned& second) {
    unsigned halves[2];
    ptx::halves_of_float8(halves, bytes);
    first = pair_of_halves(Storage{}, halves[0]);
    second = pair_of_halves(Storage{}, halves[1]);
  }
  // The factor of stored values, and so of the output.
  template <class Params>
  __device__ static float scale_of_values(const Params& params, int entry, int head) {
    return params.float8.scale_of_values(params.shape, entry, head);
  }
};

// Multiplies raw products with stored keys by the scale of keys.
struct StoredKeysTerm : FunctionTerm {
  float scale;

  template <class Params>
  __device__ StoredKeysTerm(const Params& params, const Lane& lane, double)
      : scale(params.float8.scale_of_keys(params.shape, lane.batch,
                                          head_of_keys(params.shape, lane.head))) {}

  template <class Params>
  __device__ static double unit(const Params&, double before) {
    return before;
  }
  // In packed groups `head` is already the head of keys.
  __device__ static int head_of_keys(const Shape& shape, int head) {
    return shape.heads_q == shape.heads_kv ? head : head / (shape.heads_q / shape.heads_kv);
  }
  __device__ Graded<float> operator()(float score, int, int) const {
    return {score * scale, scale};
  }
};

}  // namespace cuflash
