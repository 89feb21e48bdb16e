"""A boolean mask, on every backend and algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ..kit.case import VALUES, Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import tensor
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from ..kit.strides import CONTIGUOUS
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import inputs

_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}
#: A mask of queries and keys, and one of keys alone.
_WHOLE, _OF_KEYS = ("bhqk", "1hqk-blocks", "b1qk", "qk"), ("bh1k", "1h1k-blocks", "k")
#: With sinks; see ``test_sinks``.
_VALUES = tuple(values for values in VALUES if values != "equal")
#: Features beside a mask of each width: another feature is another kernel to compile.
_BESIDE: dict[int, dict[str, Any]] = {
    40: {"values": _VALUES},
    64: {},
    128: {"biases": ("1hqk", "11qk-inf")},
}

_of_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
_of_runners = pytest.mark.parametrize("runner", runners())


def _results(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], mask: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], mask=mask)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = runner.backward(case, *given, mask=mask)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _check(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], mask: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Judge the results of both passes, and return them."""
    truth = judge(case, x if mask is None else {**x, "mask": mask})
    found = _results(runner, case, x, mask)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


@sweep(((40, 40), (64, 64), (128, 128)))
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    """A mask of all pairs without the causal mask and at head_dim 64; otherwise one of keys."""
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    options: dict[str, Any] = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype]}
    kinds = _WHOLE if not causal or dims == (64, 64) else _OF_KEYS
    sunk = ("float64" if dtype == "float64" else "float32") if dims == (40, 40) else ""
    windowed = causal and dims == (64, 64)
    drawn = cases(
        *(dtype, *dims),
        **(options | _BESIDE[dims[0]]),
        masks=kinds,
        sinks=(sunk,),
        windowed=windowed,
    )
    first = replace(several_tiles(tile, dtype, dims, causal), mask=kinds[0])

    def check(case: Case) -> None:
        _check(runner, case, inputs(case))

    examples(runner, drawn, check, 48, first=first)


@sweep(((64, 64),))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")
    kinds = ("1hqk",) if causal else ("b11k",)

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), mask=kinds[0])
    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",), masks=kinds)
    examples(runner, drawn, check, 32, first=first)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("axes", ["qk", "1k", "q1", "11"])
def test_every_way_to_broadcast(runner: ApiRunner, dtype: str, axes: str) -> None:
    """Every way to broadcast over entries and heads, with strides of all kinds."""
    for seed, first in enumerate(("bh", "1h", "b1", "11", "h", "1", "")):
        mask = f"{first}{axes}"
        case = Case(2, 4, 2, 90, 136, dtype=dtype, causal=True, mask=mask, seed=seed)
        _check(runner, case, inputs(case))


@_of_runners
@_of_dtypes
def test_a_mask_that_hides_nothing_is_none(runner: ApiRunner, dtype: str) -> None:
    plain = Case(2, 4, 2, 150, 200, dtype=dtype, causal=True, seed=2)
    x, truth = inputs(plain), judge(plain, inputs(plain))
    for mask in ("bhqk", "k"):
        case = replace(plain, mask=mask)
        found = _check(runner, case, x, np.ones(case.shape("mask"), bool))
        for name in truth.results:
            compare(truth, name, found[name]).check()


@_of_runners
@_of_dtypes
def test_a_mask_that_hides_everything_leaves_nothing(runner: ApiRunner, dtype: str) -> None:
    """Results do not depend on the contents of dead rows."""
    case = Case(2, 4, 2, 150, 208, dtype=dtype, mask="1hqk", seed=2)
    x = inputs(case)
    x["dout"][...], x["dlse"][...] = np.inf, np.nan
    found = _results(runner, case, x, np.zeros(case.shape("mask"), bool))
    assert (found.pop("lse") == -np.inf).all()
    for name, got in found.items():
        assert (got == 0).all(), name


@_of_runners
@_of_dtypes
def test_a_mask_of_each_entry_of_the_batch(runner: ApiRunner, dtype: str) -> None:
    """An equal mask gives the same bits as a shared one; another reaches only its entry."""
    one = Case(3, 4, 2, 150, 208, dtype=dtype, causal=True, mask="1hqk", seed=0)
    each, x, runner = replace(one, mask="bhqk"), inputs(one), ordered(runner)
    assert one.recipe("mask") == each.recipe("mask") == CONTIGUOUS  # then both run the same kernels
    mask = np.ascontiguousarray(tensor(one, "mask"))
    expected, same = _results(runner, one, x, mask), np.repeat(mask, 3, axis=0)
    for name, got in _results(runner, each, x, same).items():
        assert got.tobytes() == expected[name].tobytes(), name
    same[1] ^= np.arange(208) % 7 == 3
    for name, got in _check(runner, each, x, same).items():
        equal = [np.array_equal(a, b) for a, b in zip(got, expected[name], strict=True)]
        assert equal == [True, False, True], name


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_mask_is_the_window_that_it_shows(runner: ApiRunner, dtype: str) -> None:
    """Results do not depend on the gradient of a dead row.

    The bits may differ, because kernels leave out tiles that a window hides.
    """
    window = Case(1, 4, 2, 300, 208, dtype=dtype, q_offset=-60, window="20:10")
    dead, x = window.visible() == 0, inputs(window)
    assert dead[0]
    assert dead[-1]
    truth = judge(window, x)
    case = replace(window, window="", mask="qk")
    x["dout"][:, dead], x["dlse"][:, :, dead] = np.inf, np.nan
    for name, got in _results(ordered(runner), case, x, window.sees()).items():
        compare(truth, name, got).check()


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mask", ["1hqk", "b11k"])
def test_every_byte_but_zero_is_true(runner: ApiRunner, dtype: str, mask: str) -> None:
    case = Case(2, 4, 2, 150, 208, dtype=dtype, causal=True, mask=mask, seed=0)
    x, runner = inputs(case), ordered(runner)
    seen = np.ascontiguousarray(tensor(case, "mask"))
    odd = (seen * np.uint8(254)).view(bool)
    expected = _results(runner, case, x, seen)
    for name, got in _results(runner, case, x, odd).items():
        assert got.tobytes() == expected[name].tobytes(), name
