// A score function that the caller has written. The translation unit includes
// features/score_text.cuh, and then defines
//     struct cuflash::ScoreModParams {
//       double inner; float inner_single; int position; int entries; int heads;
//       const void* score_place; ...
//     };
//     constexpr bool cuflash_text::kUsesPosition, kUsesHead;  // the text has i or j, batch or head
//     struct cuflash_text::Arguments { explicit Arguments(const cuflash::ScoreModParams&); ... };
//     Value cuflash_text::score(Value s, int batch, int head, int i, int j, int offset,
//                               const Arguments& p);
// before it includes this file; the ellipses stand for the caller's numbers and arrays.
#pragma once

#include "../tile/score.cuh"
#include "score_text.cuh"

namespace cuflash {

// The batch entry and the head as the text sees them. If the arrays are a part of a larger call,
// the text sees entries and heads of that call; `score_place` holds the part's first ones. Entries
// repeat after params.entries, and heads after params.heads.
__device__ inline int entry_of(const ScoreModParams& params, int entry) {
  if constexpr (!cuflash_text::kUsesHead) return entry;
  const unsigned* first = static_cast<const unsigned*>(params.score_place);
  return (first == nullptr ? 0 : static_cast<int>(first[0])) + entry % params.entries;
}
__device__ inline int head_of(const ScoreModParams& params, int head) {
  if constexpr (!cuflash_text::kUsesHead) return head;
  const unsigned* first = static_cast<const unsigned*>(params.score_place);
  return ((first == nullptr ? 0 : static_cast<int>(first[1])) + head) % params.heads;
}

// Scores are in natural units. Scores beyond the lengths are hidden later; they use the last
// position.
template <class Storage>
struct ScoreModTerm : FunctionTerm {
  static constexpr bool any_slope = true;
  static constexpr bool by_position = cuflash_text::kUsesPosition;
  using Compute = decltype(to_compute(Storage()));
  const cuflash_text::Arguments arguments;
  const Compute inner;  // the scale
  const int batch;
  const int head;
  const int i;
  const int j;
  const int last_i;
  const int last_j;
  const int position;

  template <class Params>
  __device__ ScoreModTerm(const Params& params, const Lane& lane, double)
      : arguments(params.score_mod),
        inner(inner_of(Compute(), params)),
        batch(entry_of(params.score_mod, lane.batch)),
        head(head_of(params.score_mod, lane.head)),
        i(lane.i),
        j(lane.j),
        last_i(params.shape.seqlen_q - 1),
        last_j(params.shape.seqlen_kv - 1),
        position(params.score_mod.position + shift_of(params, lane.batch, 0)) {}

  template <class Params>
  __device__ static double unit(const Params&, double) {
    return 1;
  }
  template <class Params>
  __device__ static double inner_of(double, const Params& params) {
    return params.score_mod.inner;
  }
  template <class Params>
  __device__ static float inner_of(float, const Params& params) {
    return params.score_mod.inner_single;
  }

  __device__ Graded<Compute> operator()(Compute score, int di, int dj) const {
    const cuflash_text::Value natural({score, inner}, Compute(1));
    const cuflash_text::Value changed = cuflash_text::score(
        natural, batch, head, ::min(i + di, last_i), ::min(j + dj, last_j), position, arguments);
    return {changed.value(), changed.slope()};
  }
};

}  // namespace cuflash
