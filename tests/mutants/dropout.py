"""Planted bugs in dropout, on the host and in the kernels of FlashAttention-1 and 2."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS"]

_FEATURE = "cuda_src/features/dropout.cuh"
_WEIGHTS = "cuda_src/tile/weights.cuh"
_FA1_FORWARD = "cuda_src/fa1/forward.cu"
_FA2_FORWARD = "cuda_src/fa2/forward_steps.cuh"
_SOFTMAX = "cuda_src/tile/backward_steps.cuh"
_BIAS = "cuda_src/steps/bias_gradient.cu"
_DRAWS = "cuflash/features/draws.py"
_HOST = "cuflash/features/dropout.py"
_NUMPY = "cuflash/tiled_numpy/"

_PROPERTY = "tests/property/test_dropout.py::"
_UNIT = "tests/unit/test_dropout.py::"
_PHILOX = "tests/unit/test_philox.py::"
_PLAN = "tests/unit/test_plan_dropout.py::"
_AGAINST = "test_dropout.py::test_against_float64"

_ROWS = {
    "fa1": "fa1-sm_90-float16-d64-dv64-causal-dropout-0.3",
    "fa1 words": "fa1-sm_75-float32-d5-dv24-full-dropout-0.5:4-sinks-float32",
    "fa2": "fa2-sm_90-float16-d64-dv64-band-dropout-0.3",
    "fa2 full": "fa2-sm_80-bfloat16-d40-dv64-full-softcap-dropout-0.5:4-filled",
    "fa2 double": "fa2-sm_90-float64-d64-dv64-causal-bias-1hqk-dropout-0.5:4",
    "transposed": "fa2-sm_90-float16-d64-dv64-causal-dropout-0.1:2-filled-ordered",
}


def _bug(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    """A bug of device code."""
    algorithm, _, dtype, dim, _, mask = _ROWS[of].split("-")[:6]
    dims = {"d5": "d40-dv40", "d40": "d40-dv40"}.get(dim, f"{dim}-dv{dim[1:]}")
    mask = {"band": "causal"}.get(mask, mask)  # windows are drawn among those
    on_gpu = f"{_PROPERTY}test_against_float64[cuda-{algorithm}-{dtype}-{dims}-{mask}]"
    return Bug(name, file, find, replace, on_gpu, row(_ROWS[of], _AGAINST))


_OF_DRAWS = (
    _bug("six rounds are made", _FEATURE, "round < 7", "round < 6", "fa1"),
    _bug(
        "draws are held to the limit in one half alone",
        _FEATURE,
        "limit * 0x00010001u",
        "limit",
        "fa1",
    ),
    _bug(
        "all heads draw alike",
        _FEATURE,
        "wrapped(weights.first_head + place.head, params.dropout.heads)",
        "wrapped(weights.first_head, params.dropout.heads)",
        "fa2",
    ),
    _bug(
        "all entries of the batch draw alike",
        _FEATURE,
        "weights.first_entry + wrapped(place.batch, params.dropout.entries))",
        "weights.first_entry)",
        "fa2 full",
    ),
    _bug(
        "blocks of keys are as far apart as blocks of queries",
        _FEATURE,
        "words[0] = keys + key / 16 * 4;",
        "words[0] = keys + key / 16 * 8;",
        "fa2 full",
    ),
    _bug(
        "the offset of a seed is not read",
        _FEATURE,
        "    offset = given.dropout_seed[2];\n",
        "",
        "fa1 words",
    ),
    _bug(
        "the upper word of an offset is not read",
        _FEATURE,
        "    key0 ^= given.dropout_seed[3];\n",
        "",
        "fa2 full",
    ),
    _bug(
        "lanes draw for the keys of their neighbours",
        _FEATURE,
        "    keys += lane.column / 2;\n",
        "    keys += lane.column / 2 ^ 1;\n",
        "fa2",
    ),
    _bug(
        "rows of doubles have the draws of eight rows before",
        _FEATURE,
        "row / 8 % 2 == 0 ? words[0] : words[1]",
        "row / 8 % 2 == 0 ? words[0] : words[0]",
        "fa2 double",
    ),
    _bug(
        "neighbours send what they need themselves",
        _FEATURE,
        "odd ? 0x5410u : 0x7632u",
        "odd ? 0x7632u : 0x5410u",
        "transposed",
    ),
    _bug(
        "halves of odd keys change places",
        _FEATURE,
        "odd ? 0x3254u : 0x5410u",
        "odd ? 0x5432u : 0x5410u",
        "transposed",
    ),
)
_OF_WEIGHTS = (
    _bug(
        "the kept pairs of odd columns are forgotten",
        _WEIGHTS,
        "mask & 0x00010001u << i % 16",
        "mask & 0x00000001u << i % 16",
        "fa2",
    ),
    _bug(
        "gradients of kept weights are not scaled up",
        _WEIGHTS,
        "keeps(m, n, group, which) ? x * factor : Compute(0)",
        "keeps(m, n, group, which) ? x : Compute(0)",
        "fa1",
    ),
    _bug(
        "gradients of values are not scaled up",
        _WEIGHTS,
        "Config::Weights::template inverse_keep<double>(params)",
        "1.0",
        "fa2 full",
    ),
    _bug(
        "outputs are not scaled up",
        _FEATURE,
        "return Dropout::inverse_keep<Compute>(params);",
        "return 1;",
        "fa1",
    ),
    _bug(
        "dV has the weights that are dropped",
        _SOFTMAX,
        "kept.of_weights(p), p_tile",
        "p, p_tile",
        "fa2",
    ),
    _bug(
        "dP of dropped pairs counts",
        _SOFTMAX,
        "  kept.scale_gradients(c.params, ds);\n",
        "",
        "fa1",
    ),
    _bug(
        "weights are dropped as those of another block of queries",
        _FA1_FORWARD,
        "c.first_query(block.index), kv_begin + c.key0()",
        "c.first_query(block.index) + 16, kv_begin + c.key0()",
        "fa1",
    ),
    _bug(
        "all parts of a step drop what the first does",
        _FA2_FORWARD,
        "    place.key0 += first;\n",
        "",
        "fa2 full",
    ),
    _bug(
        "dropped pairs add to the gradient of a bias",
        _BIAS,
        "      if constexpr (Config::Weights::drops) scale_gradients(step, dp);\n",
        "",
        "fa2 double",
    ),
)
_OF_HOST = (
    Bug(
        "the words of a call are of keys before queries",
        _DRAWS,
        "found[..., number % 2, :, :, number // 2, :, :]",
        "found[..., number // 2, :, :, number % 2, :, :]",
        _PHILOX + "test_the_draw_of_every_pair",
    ),
    Bug(
        "the number of draws that keep a weight is rounded down",
        _DRAWS,
        "round(DRAWS * (1 - p))",
        "int(DRAWS * (1 - p))",
        _PHILOX + "test_of_a_part_the_nearest_number_of_draws_counts",
    ),
    Bug(
        "NumPy does not read the upper word of an offset",
        _DRAWS,
        "lower ^ offset[1], upper",
        "lower, upper",
        _PHILOX + "test_every_word_of_a_seed_counts",
    ),
    Bug(
        "kept weights are scaled by the p that was given",
        _HOST,
        '("inverse_keep", DRAWS / limit)',
        '("inverse_keep", 1 / (1 - p))',
        _PLAN + "test_the_share_that_is_kept",
    ),
    Bug(
        "a seed without dropout is ignored",
        _HOST,
        "if seeded and not p:",
        "if seeded and p is False:",
        "tests/unit/test_dropout_arguments.py::test_a_seed_needs_a_part",
    ),
    Bug(
        "NumPy draws of a part of a call as of the first entries",
        _HOST,
        "entry + place.batch[:, :, 0] %",
        "place.batch[:, :, 0] %",
        _UNIT + "test_a_part_of_a_call_draws_as_the_whole",
    ),
    Bug(
        "NumPy's sums of few rows lack the dropped weights",
        _NUMPY + "few_rows.py",
        "        state.row_sum += scores.sum(axis=-1)\n",
        "        operands.drop(scores.swapaxes(-1, -2), tile)\n"
        "        state.row_sum += scores.sum(axis=-1)\n",
        _UNIT + "test_many_heads_and_long_rows_are_drawn_tile_by_tile",
    ),
    Bug(
        "NumPy's outputs are not scaled up",
        _NUMPY + "outputs.py",
        "if made.inverse_keep != 1:",
        "if made.inverse_keep < 1:",
        _UNIT + "test_both_passes_against_the_formula",
    ),
    Bug(
        "NumPy's dP of dropped pairs counts",
        _NUMPY + "gradients.py",
        "            self._drop(dscores, kept)\n",
        "            pass\n",
        _UNIT + "test_both_passes_against_whole_matrices",
    ),
)
BUGS = (*_OF_DRAWS, *_OF_WEIGHTS, *_OF_HOST)
