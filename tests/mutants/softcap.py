"""Bugs in soft caps, and in the derivatives ("slopes") that any change of scores has."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS", "HOPPER"]

_FEATURE = "cuda_src/features/softcap.cuh"
_SCORE = "cuda_src/tile/score.cuh"
_STEPS = "cuda_src/tile/backward_steps.cuh"
_TRANSPOSED = "cuda_src/fa2/backward_transposed.cuh"
_FA3_SCORE = "cuda_src/fa3/backward_score.cuh"
_FA3_FORWARD = "cuda_src/fa3/forward_math.cuh"
_FA3_KERNEL = "cuda_src/fa3/backward.cu"
_FA3_MATH = "cuda_src/fa3/backward_math.cuh"
_SERIAL = "cuda_src/fa3/backward_serial.cuh"
_WIDE = "cuda_src/fa3/backward_wide.cuh"
_NUMPY = "cuflash/features/softcap.py"

_FORMULA = "tests/unit/test_softcap.py::test_both_passes_against_the_formula"
_PROPERTY = "tests/property/test_softcap.py::"
_IN_KERNELS = "tests/tenant/test_tenants_in_kernels.py::test_against_float64"


_AGAINST = "test_softcap.py::test_against_float64"
_ROWS = {
    "fa1": "fa1-sm_90-float16-d64-dv64-causal-softcap",
    "fa2": "fa2-sm_90-float16-d64-dv64-band-softcap",
    "fa2 double": "fa2-sm_90-float64-d64-dv64-causal-softcap",
    "fa2 wide": "fa2-sm_80-float32-d5-dv24-causal-softcap",
    "transposed": "fa2-sm_90-float16-d64-dv64-causal-softcap-filled-ordered",
    "fa3 narrow": "fa3-sm_90-float16-d64-dv64-causal-softcap-filled",
    "fa3": "fa3-sm_90-bfloat16-d128-dv128-causal-softcap-filled-192x80",
    "fa3 serial": "fa3-sm_90-float16-d192-dv128-causal-softcap-filled",
    "fa3 wide": "fa3-sm_90-float16-d200-dv256-causal-softcap-filled",
}


_DEAD = "test_softcap.py::test_dead_rows_may_hold_anything"


def _bug(name: str, file: str, find: str, replace: str, of: str, test: str = _AGAINST) -> Bug:
    """A bug of device code."""
    algorithm, dtype, dims = _ROWS[of].split("-", 3)[0], *_ROWS[of].split("-")[2:4]
    runner = {"fa3": "auto"}.get(algorithm, algorithm)
    dims = {"d200": "d100-dv256", "d192": "d192-dv128", "d5": "d40-dv40"}.get(
        dims, f"{dims}-dv{dims[1:]}"
    )
    on_gpu = f"{_PROPERTY}test_against_float64[cuda-{runner}-{dtype}-{dims}-causal]"
    return Bug(name, file, find, replace, on_gpu, row(_ROWS[of], test))


BUGS = (
    Bug(
        "NumPy's slope of a cap is 1",
        _NUMPY,
        "return 4 * e / (1 + e) ** 2  # 1 - tanh^2, which would cancel",
        "return 1 + 0 * e",
        _FORMULA,
    ),
    Bug(
        "NumPy's slope is that of twice the score",
        _NUMPY,
        "e = np.exp(-2 * np.abs(scores))",
        "e = np.exp(-4 * np.abs(scores))",
        _FORMULA,
    ),
    Bug(
        "NumPy takes what keys have in common off scores that are capped",
        "cuflash/tiled_numpy/operands.py",
        "if wanted and not self._terms.have_slopes:",
        "if wanted:",
        "tests/unit/test_softcap.py::test_scores_are_whole_where_keys_have_a_common_part[fa2]",
    ),
    Bug(
        "scale and cap change places in the kernels' parameters",
        _NUMPY,
        '(("inner", inner), ("cap", cap), ("inner_single", inner))',
        '(("inner", cap), ("cap", inner), ("inner_single", inner))',
        "tests/unit/test_softcap.py::test_the_size_of_the_cap_is_no_part_of_a_kernel[fa2]",
    ),
    _bug(
        "scores are capped and not scaled back",
        _SCORE,
        "(unit = Terms::unit(params, unit))",
        "(unit = 0 * Terms::unit(params, unit) + params.scale)",
        "fa2 double",
    ),
    _bug(
        "the slope of a cap is 1",
        _FEATURE,
        "return fma(-y, y, Compute(1));",
        "return Compute(1);",
        "fa1",
    ),
    _bug(
        "the slope of a cap is 1 + tanh^2",
        _FEATURE,
        "return fma(-y, y,",
        "return fma(y, y,",
        "fa2",
    ),
    _bug(
        "the slope of a cap of a wide type lacks a square",
        _FEATURE,
        "/ ((Compute(1) + e) * (Compute(1) + e));",
        "/ (Compute(1) + e);",
        "fa2 wide",
    ),
    _bug(
        "fa1 and fa2 multiply no slopes",
        _STEPS,
        "if constexpr (!Config::Score::summed) slopes.multiply(p);",
        "",
        "fa2",
    ),
    _bug(
        "transposed scores have no slopes",
        _TRANSPOSED,
        "if constexpr (!Config::Score::summed) slopes.multiply(p);",
        "",
        "transposed",
    ),
    Bug(
        "the factor of the logits is that of scores without a cap",
        _NUMPY,
        "unit=cap,",
        "unit=None,",
        "tests/unit/test_softcap.py::test_the_size_of_the_cap_is_no_part_of_a_kernel[fa1]",
    ),
    Bug(
        "the factor of the logits forgets the unit of scores",
        "cuflash/planning/problem.py",
        "min(max(self.unit * (",
        "min(max(self.scale * (",
        "tests/unit/test_softcap.py::test_the_size_of_the_cap_is_no_part_of_a_kernel[fa2]",
    ),
    Bug(
        "terms behind a cap add in units of the scale",
        _SCORE,
        "    return {params, lane, unit(params)};",
        "    return {params, lane, params.scale};",
        f"{_IN_KERNELS}[fa1-sm_90-float32-d64-parity-tilt-softcap]",
        "../tenant/test_tenants_in_kernels.py::test_against_float64"
        "[fa1-sm_90-float32-d64-parity-tilt-softcap]",
    ),
)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    _bug(
        "blocks that need no mask are not capped",
        _FA3_FORWARD,
        "return ScoreChange<Config, Scores, RowsOfQueries>(c.params, place(tile, blocks, block));",
        "return NoChange();",
        "fa3",
    ),
    _bug(
        "references rise to what scores are without a cap",
        _FA3_FORWARD,
        "Rows keep = lane_maxima(scores, change);",
        "Rows keep = lane_maxima(scores, NoChange());",
        "fa3",
        "test_softcap.py::test_references_rise",
    ),
    _bug(
        "P and P times slopes change places",
        _FA3_SCORE,
        "      put_pair(weights, n, group, p[0], p[1]);\n",
        "      put_pair(weights, n, group, p[0] * slope[0], p[1] * slope[1]);\n",
        "fa3 narrow",
    ),
    _bug(
        "dS of fa3 is made of P without slopes",
        _FA3_SCORE,
        "put_pair(sloped, n, group, times_slope<Config>(p[0], slope[0]),\n"
        "               times_slope<Config>(p[1], slope[1]));",
        "put_pair(sloped, n, group, p[0], p[1]);",
        "fa3",
    ),
    _bug(
        "a pair's slope is its neighbour's",
        _FA3_SCORE,
        "slope[which] = score.slope;",
        "slope[1 - which] = score.slope;",
        "fa3",
    ),
    _bug(
        "hidden pairs keep the P that dV is made of",
        _FA3_MATH,
        "dead_rows = hide(state, stage, dead, place, p, dp, weights);",
        "dead_rows = hide(state, stage, dead, place, p, dp);",
        "fa3",
    ),
    _bug(
        "the wrong half of an operand is cleared",
        _FA3_SCORE,
        "&= which == 0 ? 0xffff0000u : 0x0000ffffu;",
        "&= which == 1 ? 0xffff0000u : 0x0000ffffu;",
        "fa3",
    ),
    _bug(
        "serial P of narrow heads is not hidden at the edge",
        _FA3_MATH,
        "apply_mask_to_live_queries<Config>(c.seq, place, weights, sloped);",
        "",
        "fa3 narrow",
    ),
    _bug(
        "dV of narrow heads keeps the power of two of P",
        _FA3_KERNEL,
        "static_cast<float>(1 << BackwardMath<Config>::exponent)",
        "1.0f",
        "fa3 narrow",
    ),
    _bug(
        "serial scores lose their slopes",
        _SERIAL,
        "gradients, i, Math::has_slope ? sloped : weights, dp,",
        "gradients, i, weights, dp,",
        "fa3 serial",
    ),
    _bug(
        "hidden pairs of shared keys keep their P",
        _WIDE,
        "apply_mask<Config>(lse, c.seq, place, p, weights);",
        "apply_mask<Config>(lse, c.seq, place, p);",
        "fa3 wide",
    ),
    _bug(
        "serial S of narrow heads is not waited for",
        _FA3_MATH,
        "    ptx::wgmma_wait<0>();\n    ptx::wgmma_hold(p.value[0]);\n    exponentiate<",
        "    ptx::wgmma_wait<1>();\n    ptx::wgmma_hold(p.value[0]);\n    exponentiate<",
        "fa3 narrow",
    ),
    _bug(
        "serial dP of narrow heads is not waited for",
        _FA3_MATH,
        "    ptx::wgmma_wait<0>();\n    ptx::wgmma_hold(dp.value[0]);\n",
        "    ptx::wgmma_wait<1>();\n    ptx::wgmma_hold(dp.value[0]);\n",
        "fa3 narrow",
    ),
    _bug(
        "serial dP of narrow heads is of a dO that may not have come",
        _FA3_MATH,
        "    Scores dp;\n    wait<Config>(c.shared.dout_full[stage], ring.phase);\n",
        "    Scores dp;\n",
        "fa3 narrow",
    ),
    _bug(
        "serial dS of narrow heads is overwritten while dQ reads it",
        _FA3_MATH,
        "    wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);\n"
        "    const unsigned dead_rows = hide(",
        "    const unsigned dead_rows = hide(",
        "fa3 narrow",
    ),
    _bug(
        "serial P of dead queries of narrow heads stays",
        _FA3_MATH,
        "      apply_mask<Config>(lse, c.seq, place, weights, sloped);\n    } else if",
        "    } else if",
        "fa3 narrow",
        _DEAD,
    ),
    _bug(
        "hidden pairs of serial scores keep their P",
        _SERIAL,
        "if (dead || edge) apply_mask<Config>(lse, c.seq, place, weights, sloped);",
        "",
        "fa3 serial",
    ),
)
