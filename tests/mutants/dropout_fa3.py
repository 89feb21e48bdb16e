"""Bugs of dropout and slopes in the kernels of FlashAttention-3, which only the emulator runs."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS"]

_FORWARD = "cuda_src/fa3/forward_math.cuh"
_MATH = "cuda_src/fa3/backward_math.cuh"
_DRAWS = "cuda_src/fa3/backward_draws.cuh"
_DROPPED = "cuda_src/fa3/backward_dropped.cuh"
_SERIAL = "cuda_src/fa3/backward_serial.cuh"
_WIDE = "cuda_src/fa3/backward_wide.cuh"
_SCORE = "cuda_src/fa3/backward_score.cuh"
_AGAINST = "test_dropout.py::test_against_float64"
_SLOPES = "test_slopes.py::test_slopes_of_any_sign_and_size"

_ROWS = {
    "narrow": "fa3-sm_90-float16-d64-dv64-causal-dropout-0.3-filled",
    "changed": "fa3-sm_90-float16-d64-dv64-causal-softcap-alibi-heads-dropout-0.3-filled",
    "fa3": "fa3-sm_90-bfloat16-d128-dv128-causal-dropout-0.3-filled-192x80",
    "serial": "fa3-sm_90-float16-d192-dv128-causal-dropout-0.3:4-filled",
    "serial changed": "fa3-sm_90-bfloat16-d192-dv128-full-softcap-alibi-batch-dropout-0.3-filled",
    "wide": "fa3-sm_90-float16-d200-dv256-causal-alibi-heads-dropout-0.5-filled",
}


def _bug(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    _, _, dtype, dim, _, mask = _ROWS[of].split("-")[:6]
    dims = {"d64": "d64-dv64"}.get(dim, "d128-dv128")
    on_gpu = (
        f"tests/property/test_dropout.py::test_against_float64[cuda-auto-{dtype}-{dims}-{mask}]"
    )
    return Bug(name, file, find, replace, on_gpu, row(_ROWS[of], _AGAINST))


def _slopes(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    """A bug that shows where a caller's function has slopes of any sign and size."""
    test = f"{_SLOPES}[{of}]"
    return Bug(name, file, find, replace, f"tests/emulator/{test}", test)


BUGS = (
    _bug(
        "the first block of a tile keeps all weights",
        _FORWARD,
        "    drop(tile, blocks, state, blocks.seen.end - 1);\n",
        "",
        "narrow",
    ),
    _bug(
        "a block drops what the block before it dropped",
        _FORWARD,
        "    drop(tile, blocks, state, block);\n",
        "    drop(tile, blocks, state, block + 1);\n",
        "fa3",
    ),
    _bug(
        "all queries of a step draw as its first sixteen",
        _DRAWS,
        "draws.of_block(masks, 0, 16 * i);",
        "draws.of_block(masks, 0, 0 * i);",
        "fa3",
    ),
    _bug(
        "dV of fa3 has the weights that are dropped",
        _DROPPED,
        "clear_dropped(weights.value[i][part], masks[part]);",
        "clear_dropped(weights.value[i][part], ~0u);",
        "narrow",
    ),
    _bug(
        "all steps of a tile have the draws of the first",
        _MATH,
        "    draw_ahead<Config>(c.params, state, score_place(state));\n",
        "",
        "fa3",
    ),
    _bug(
        "draws of sixteen queries have bits of the next ones",
        _DRAWS,
        "0x00010001u << (4 * (i % 4) + part)",
        "0x00010001u << (2 * (i % 4) + part)",
        "narrow",
    ),
    _bug(
        "the second query of a pair is dropped with the first",
        _DRAWS,
        "if ((mask & 0xffff0000u) == 0) weights &= 0x0000ffffu;",
        "if ((mask & 0x0000ffffu) == 0) weights &= 0x0000ffffu;",
        "fa3",
    ),
    _bug(
        "dP of dropped pairs counts in fa3",
        _DROPPED,
        "mask != 0 ? dp : 0.0f",
        "mask != 1 ? dp : 0.0f",
        "changed",
    ),
    _bug(
        "dropped pairs have no dS",
        _DROPPED,
        "return fma(mask != 0 ? dp : 0.0f, kept, -delta * scale);",
        "return mask != 0 ? fma(dp, kept, -delta * scale) : 0.0f;",
        "fa3",
    ),
    _bug(
        "the second query of a pair adds the first one's P to slopes",
        _DROPPED,
        "sum.add(weight.y, weight.y * y, n, group, 1);",
        "sum.add(weight.x, weight.x * y, n, group, 1);",
        "changed",
    ),
    _bug(
        "gradients of values are not scaled up in fa3",
        _MATH,
        "      factor *= Config::Weights::template inverse_keep<float>(c.params);\n",
        "",
        "narrow",
    ),
    _bug(
        "dV of serial score tiles has the weights that are dropped",
        _SERIAL,
        "weights.value[i][part] &= masks[part];",
        "weights.value[i][part] &= ~0u;",
        "serial",
    ),
    _bug(
        "serial scores lose their slopes where weights are dropped",
        _SERIAL,
        "masks, i, weights, Math::has_slope ? sloped : weights, dp);",
        "masks, i, weights, weights, dp);",
        "serial changed",
    ),
    _bug(
        "a negative P marks the kept weights",
        _WIDE,
        "passed.value[i][part] |= ~masks[part] & 0x80008000u;",
        "passed.value[i][part] |= masks[part] & 0x80008000u;",
        "wide",
    ),
    _bug(
        "P of shared keys keeps its mark",
        _WIDE,
        "          weights.value[i][part] &= 0x7fff7fffu;\n",
        "",
        "wide",
    ),
    _bug(
        "dV of shared keys has the weights that are dropped",
        _WIDE,
        "        weights.value[i][part] &= masks[part];\n",
        "",
        "wide",
    ),
    _slopes(
        "a negative slope of shared keys marks a dropped weight",
        _WIDE,
        "marks = drops && !Config::Score::any_slope;",
        "marks = drops;",
        "bfloat16-d256-dv256-dropped",
    ),
    _slopes(
        "dropped weights that the key role draws are marked too",
        _WIDE,
        "if constexpr (marks) passed.value[i][part] |=",
        "passed.value[i][part] |=",
        "float16-d256-dv256-dropped",
    ),
    _slopes(
        "P times a slope of eight overflows in float16",
        _SCORE,
        "return any_slope ? 4 : 14;",
        "return 14;",
        "float16-d64-dv64-kept",
    ),
)
