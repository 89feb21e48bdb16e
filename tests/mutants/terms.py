"""Planted bugs in the interfaces by which features change scores; tests/tenant kills them."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS", "HOPPER"]

_SCORE = "cuda_src/tile/score.cuh"
_GRADIENTS = "cuflash/tiled_numpy/gradients.py"
_HEADS = "cuflash/tiled_numpy/heads.py"
_OPERANDS = "cuflash/tiled_numpy/operands.py"
_OWN_LSE = "cuflash/tiled_numpy/own_lse.py"
_SOURCE = "cuflash/cuda/source.py"

_ON_NUMPY = "tests/tenant/test_tenants_on_numpy.py::"
_ANY = f"{_ON_NUMPY}test_any_call_against_float64[fa2]"
_IN_KERNELS = "tests/tenant/test_tenants_in_kernels.py::"
_ROWS = {
    "fa1": "fa1-sm_90-float32-d64-tilt",
    "fa2": "fa2-sm_75-float16-d64-tilt",
    "fa2 transposed": "fa2-sm_90-bfloat16-d64-parity-tilt",
    "fa3": "fa3-sm_90-float16-d64-tilt",
    "fa3 wide": "fa3-sm_90-float16-d192-parity-tilt",
}


def _in_kernels(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    """A bug of device code, killed by the same test with a GPU and without."""
    test = f"{_IN_KERNELS}test_against_float64[{_ROWS[of]}]"
    return Bug(name, file, find, replace, test, f"../{test.removeprefix('tests/')}")


BUGS = (
    Bug(
        "NumPy adds terms twice in the backward pass",
        _GRADIENTS,
        "        slopes = self._operands.change_with_slopes(weights, tile)\n",
        "        slopes = self._operands.change_with_slopes(weights, tile)\n"
        "        self._operands.change(weights, tile)\n",
        _ANY,
    ),
    Bug(
        "NumPy's backward pass has no terms",
        _GRADIENTS,
        "        slopes = self._operands.change_with_slopes(weights, tile)\n",
        "        slopes = self._blocks.apply_mask(weights, tile)\n",
        _ANY,
    ),
    Bug(
        "NumPy's terms are given the batch entries of a task from 0 on",
        _HEADS,
        "np.arange(problem.batch)[self._batch, None, None, None, None]",
        "np.arange(len(np.arange(problem.batch)[self._batch]))[:, None, None, None, None]",
        f"{_ON_NUMPY}test_batches_and_heads_that_are_computed_apart[2]",
    ),
    Bug(
        "NumPy's terms are given the heads of a task from 0 on",
        _HEADS,
        "np.arange(problem.heads_q).reshape(self._split(problem.heads_q))[self._heads]",
        "np.arange(problem.heads_q).reshape(self._split(problem.heads_q))\n"
        "        heads = heads[: len(heads[self._heads])]",
        f"{_ON_NUMPY}test_batches_and_heads_that_are_computed_apart[4]",
    ),
    Bug(
        "NumPy bounds scores without their terms",
        _OPERANDS,
        "-1.0 if self._terms else self._measure()",
        "self._measure()",
        f"{_ON_NUMPY}test_many_rows[None-fa2]",
    ),
    Bug(
        "NumPy's own log-sum-exp has no terms",
        _OWN_LSE,
        "operands.change(scores, tile)",
        "blocks.apply_mask(scores, tile)",
        f"{_ON_NUMPY}test_keys_with_a_common_part[fa2-False]",
    ),
    Bug(
        "a seam has one feature alone",
        _SOURCE,
        'added.setdefault(seam, []).append("cuflash::" + kind.format(**names, before=before))',
        'added.setdefault(seam, ["cuflash::" + kind.format(**names, before=before)])',
        f"{_IN_KERNELS}test_sources_name_the_terms_in_the_order_of_the_table"
        "[fa2-sm_75-float16-d64-parity-tilt]",
    ),
    _in_kernels(
        "a term is given the batch entry for the head",
        _SCORE,
        "return {params, lane, unit(params)};",
        "return {params, Lane{lane.head, lane.batch, lane.i, lane.j}, unit(params)};",
        "fa2",
    ),
    _in_kernels(
        "fa1 and fa2 hide and do not change scores",
        "cuda_src/tile/softmax.cuh",
        "  change_scores<Config>(params, RowsOfQueries{seq.entry, head, row0, key0}, scores, "
        "slopes...);\n",
        "",
        "fa1",
    ),
    _in_kernels(
        "all warps are given the first keys of a transposed tile",
        "cuda_src/fa2/backward_transposed.cuh",
        "step.q_begin, c.item.kv_begin + key0},",
        "step.q_begin, c.item.kv_begin},",
        "fa2 transposed",
    ),
)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    _in_kernels(
        "scores are changed twice in the backward pass",
        "cuda_src/fa3/backward_score.cuh",
        "  change_scores<Config>(params, place, scores);\n",
        "  change_scores<Config>(params, place, scores);\n"
        "  change_scores<Config>(params, place, scores);\n",
        "fa3",
    ),
    _in_kernels(
        "terms are given the queries of another warp",
        "cuda_src/fa3/forward_math.cuh",
        "tile.item.head, row0 + warp_row,",
        "tile.item.head, row0,",
        "fa3",
    ),
)
