"""Planted bugs in ALiBi, and in gradients that are sums over pairs."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS", "HOPPER"]

_FEATURE = "cuda_src/features/alibi.cuh"
_SUMS = "cuda_src/tile/pair_sums.cuh"
_STEPS = "cuda_src/tile/backward_steps.cuh"
_TRANSPOSED = "cuda_src/fa2/backward_transposed.cuh"
_GRADIENT = "cuda_src/steps/slope_gradient.cu"
_FA3_FORWARD = "cuda_src/fa3/forward_math.cuh"
_FA3_SCORE = "cuda_src/fa3/backward_score.cuh"
_FA3_BACKWARD = "cuda_src/fa3/backward.cu"
_SERIAL = "cuda_src/fa3/backward_serial.cuh"
_NUMPY = "cuflash/features/alibi.py"

_FORMULA = "tests/unit/test_alibi.py::test_both_passes_against_the_formula"
_PROPERTY = "tests/property/test_alibi.py::"
_AGAINST = "test_alibi.py::test_against_float64"

_ROWS = {
    "fa1": "fa1-sm_90-float16-d64-dv64-causal-alibi-heads",
    "fa1 full": "fa1-sm_75-float32-d5-dv24-full-softcap-alibi-batch",
    "fa2": "fa2-sm_90-float16-d64-dv64-band-alibi-batch",
    "fa2 double": "fa2-sm_90-float64-d64-dv64-causal-softcap-alibi-batch",
    "fa2 full": "fa2-sm_80-float32-d5-dv24-full-alibi-heads-sinks-float32",
    "transposed": "fa2-sm_90-float16-d64-dv64-causal-alibi-batch-filled-ordered",
    "transposed full": "fa2-sm_80-bfloat16-d40-dv64-full-softcap-alibi-heads-filled",
    "fa3 narrow": "fa3-sm_90-float16-d64-dv64-causal-alibi-heads-filled",
    "fa3": "fa3-sm_90-bfloat16-d128-dv128-causal-alibi-heads-filled-192x80",
    "fa3 serial": "fa3-sm_90-float16-d192-dv128-causal-alibi-batch-filled",
    "fa3 serial full": "fa3-sm_90-float16-d192-dv128-full-softcap-alibi-heads-filled",
}


def _bug(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    """A bug of device code."""
    algorithm, _, dtype, dim, _, mask = _ROWS[of].split("-")[:6]
    runner = {"fa3": "auto"}.get(algorithm, algorithm)
    dims = {"d5": "d40-dv40", "d40": "d40-dv40", "d192": "d192-dv128"}.get(
        dim, f"{dim}-dv{dim[1:]}"
    )
    mask = {"band": "causal"}.get(mask, mask)  # windows are drawn among those
    on_gpu = f"{_PROPERTY}test_against_float64[cuda-{runner}-{dtype}-{dims}-{mask}]"
    return Bug(name, file, find, replace, on_gpu, row(_ROWS[of], _AGAINST))


BUGS = (
    Bug(
        "NumPy's distances begin at key 0",
        _NUMPY,
        'return np.abs(place.i + given["position"] - place.j)',
        "return np.abs(place.i - place.j)",
        _FORMULA,
    ),
    Bug(
        "NumPy takes the slopes of another entry of the batch",
        _NUMPY,
        "slopes[place.batch, place.head]",
        "slopes[place.batch - 1, place.head]",
        _FORMULA,
    ),
    Bug(
        "NumPy's gradient of slopes has the wrong sign",
        _NUMPY,
        "return -_distances(place, given)",
        "return _distances(place, given)",
        _FORMULA,
    ),
    _bug(
        "distances of keys have a sign",
        _FEATURE,
        "return fabs(ahead + static_cast<Compute>(di - dj));",
        "return ahead + static_cast<Compute>(di - dj);",
        "fa2 full",
    ),
    _bug(
        "distances of keys begin at key 0",
        _FEATURE,
        "lane.i + params.alibi.position +",
        "lane.i +",
        "fa1 full",
    ),
    Bug(
        "every entry of the batch has the slopes of the first",
        _FEATURE,
        "[lane.batch * params.alibi.batch_stride + lane.head]",
        "[lane.head]",
        f"{_PROPERTY}test_slopes_of_each_entry_of_the_batch[float16-cuda-fa2]",
        row(_ROWS["transposed"], _AGAINST),
    ),
    _bug(
        "slopes are in natural units where scores are not",
        "cuda_src/features/added.cuh",
        "return block.inverse_unit_single;",
        "return 1;",
        "fa1",
    ),
    _bug(
        "the gradient of slopes has the wrong sign",
        _FEATURE,
        "return -distance(di, dj);",
        "return distance(di, dj);",
        "fa1",
    ),
    _bug(
        "sums of the other heads of a group are not cleared",
        _SUMS,
        "head < first_head + heads; ++head",
        "head < first_head + 1; ++head",
        "fa2",
    ),
    Bug(
        "hidden pairs that are not finite reach the sums over pairs",
        _SUMS,
        "if (p != Compute(0)) sum =",
        "sum =",
        f"{_PROPERTY}test_queries_that_see_no_key_may_hold_anything[float16-cuda-fa1]",
        row(_ROWS["fa1"], "test_alibi.py::test_dead_rows_may_hold_anything"),
    ),
    _bug(
        "kv tiles share the sums of pairs",
        _SUMS,
        "kv_begin / Config::block_kv * static_cast<long long>(blockDim.x) + threadIdx.x;",
        "threadIdx.x;",
        "transposed",
    ),
    _bug(
        "pairs are summed after the slope of a cap",
        _STEPS,
        "    sum_pairs<Config>(c.params, place, kv_begin, p, ds);\n    slopes.multiply(ds);\n",
        "    slopes.multiply(ds);\n    sum_pairs<Config>(c.params, place, kv_begin, p, ds);\n",
        "fa2 double",
    ),
    _bug(
        "transposed dS lacks the slope of a cap where pairs are summed",
        _TRANSPOSED,
        "    slopes.multiply(ds);\n",
        "",
        "transposed full",
    ),
    _bug(
        "entries of the batch are a head apart in the sums",
        _GRADIENT,
        "(entry * params.shape.heads_q + blockIdx.x)",
        "(entry + blockIdx.x)",
        "fa1",
    ),
)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    _bug(
        "blocks that are changed late have the distances of the next",
        _FA3_FORWARD,
        "return ScoreChange<Config, Scores, RowsOfQueries>(c.params, place(tile, blocks, block));",
        "return ScoreChange<Config, Scores, RowsOfQueries>"
        "(c.params, place(tile, blocks, block + 1));",
        "fa3",
    ),
    _bug(
        "sums of pairs keep the power of two of P",
        _FA3_SCORE,
        " * (1.0f / static_cast<float>(1 << exponent));",
        ";",
        "fa3 serial",
    ),
    _bug(
        "pairs are summed with the delta of the neighbouring query",
        _FA3_SCORE,
        "dp.value[0][n][group][which] - (which == 0 ? offset.x : offset.y);",
        "dp.value[0][n][group][which] - (which == 1 ? offset.x : offset.y);",
        "fa3",
    ),
    _bug(
        "serial pairs are summed after the slope of a cap",
        _SERIAL,
        "(c, place, weights, dp, c.shared",
        "(c, place, Math::has_slope ? sloped : weights, dp, c.shared",
        "fa3 serial full",
    ),
    _bug(
        "fa3 clears the sums of other query heads",
        _FA3_BACKWARD,
        "c.item.entry, c.item.head * c.group, c.group, c.item.kv_begin);",
        "c.item.entry, c.item.head, c.group, c.item.kv_begin);",
        "fa3 narrow",
    ),
)
