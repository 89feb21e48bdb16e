"""A bias, on every backend and algorithm."""

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
#: A bias of queries and keys, and one of keys alone.
_WHOLE, _OF_KEYS = ("bhqk", "1hqk", "b1qk-inf", "qk"), ("bh1k", "1h1k-inf", "k")
#: Values of cases with sinks; ``test_sinks`` says why.
_VALUES = tuple(values for values in VALUES if values != "equal")
#: Features beside a bias of each width: another feature is another kernel to compile.
_BESIDE: dict[int, dict[str, Any]] = {40: {"values": _VALUES}, 64: {}, 128: {"softcaps": (3.0,)}}

_of_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
_of_runners = pytest.mark.parametrize("runner", runners())


def _results(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], bias: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], bias=bias)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = runner.backward(case, *given, bias=bias)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _check(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], bias: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Judge the results of both passes, and return them."""
    truth = judge(case, x if bias is None else {**x, "bias": bias})
    found = _results(runner, case, x, bias)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


@sweep(((40, 40), (64, 64), (128, 128)))
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    """A bias of all pairs without a causal mask and at head_dim 64; otherwise one of keys."""
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    options: dict[str, Any] = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype]}
    kinds = _WHOLE if not causal or dims == (64, 64) else _OF_KEYS
    sunk = ("float64" if dtype == "float64" else "float32") if dims == (40, 40) else ""
    windowed = causal and dims == (64, 64)
    drawn = cases(
        *(dtype, *dims),
        **(options | _BESIDE[dims[0]]),
        biases=kinds,
        sinks=(sunk,),
        windowed=windowed,
    )
    first = replace(several_tiles(tile, dtype, dims, causal), bias=kinds[0])

    def check(case: Case) -> None:
        _check(runner, case, inputs(case))

    examples(runner, drawn, check, 48, first=first)


@sweep(((64, 64),))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")
    kinds = ("1hqk:float32",) if causal else ("b11k",)

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), bias=kinds[0])
    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",), biases=kinds)
    examples(runner, drawn, check, 32, first=first)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("axes", ["qk", "1k", "q1", "11"])
def test_every_way_to_broadcast(runner: ApiRunner, dtype: str, axes: str) -> None:
    """Every way to broadcast over entries and heads, with strides of all kinds."""
    for seed, first in enumerate(("bh", "1h", "b1", "11", "h", "1", "")):
        bias = f"{first}{axes}"
        case = Case(2, 4, 2, 90, 136, dtype=dtype, causal=True, bias=bias, seed=seed)
        _check(runner, case, inputs(case))


@_of_runners
@_of_dtypes
def test_a_bias_of_zero_is_none(runner: ApiRunner, dtype: str) -> None:
    plain = Case(2, 4, 2, 150, 200, dtype=dtype, causal=True, seed=2)
    x, truth = inputs(plain), judge(plain, inputs(plain))
    for bias in ("bhqk", "k"):
        case = replace(plain, bias=bias)
        found = _check(runner, case, x, np.zeros(case.shape("bias"), case.storage))
        for name in truth.results:
            compare(truth, name, found[name]).check()


@_of_runners
@_of_dtypes
def test_a_bias_of_each_entry_of_the_batch(runner: ApiRunner, dtype: str) -> None:
    """An equal bias gives the same bits as a shared one; another reaches only its entry."""
    one = Case(3, 4, 2, 150, 200, dtype=dtype, causal=True, bias="1hqk", seed=2)
    each, x, runner = replace(one, bias="bhqk"), inputs(one), ordered(runner)
    assert one.recipe("bias") == each.recipe("bias") == CONTIGUOUS  # then both run the same kernels
    bias = np.ascontiguousarray(tensor(one, "bias"))
    expected, same = _results(runner, one, x, bias), np.repeat(bias, 3, axis=0)
    found = _results(runner, each, x, same)
    wide = found.pop("dbias").astype(np.float64).sum(axis=0, keepdims=True)
    if one.storage.itemsize > 2:  # sums of 16-bit numbers are rounded differently
        truth = judge(one, {**x, "bias": bias})
        compare(truth, "dbias", wide.astype(one.storage)).check()
    for name, got in found.items():
        assert got.tobytes() == expected[name].tobytes(), name
    same[1] += np.arange(200).astype(one.storage) / one.storage.type(200)
    for name, got in _check(runner, each, x, same).items():
        if name != "dbias":
            equal = [np.array_equal(a, b) for a, b in zip(got, expected[name], strict=True)]
            assert equal == [True, False, True], name


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_minus_infinity_is_a_mask(runner: ApiRunner, dtype: str) -> None:
    """Results are those of the equivalent window, whatever the gradient of a dead row is.

    The bits may differ, because kernels leave out tiles that a window hides.
    """
    window = Case(1, 4, 2, 300, 200, dtype=dtype, q_offset=-60, window="20:10")
    dead, x = window.visible() == 0, inputs(window)
    assert dead[0]
    assert dead[-1]
    truth = judge(window, x)
    case = replace(window, window="", bias="qk")
    bias = np.where(window.sees(), 0, -np.inf).astype(case.storage)
    x["dout"][:, dead], x["dlse"][:, :, dead] = np.inf, np.nan
    found = _results(ordered(runner), case, x, bias)
    dbias = found.pop("dbias")
    assert (dbias[~window.sees()] == 0).all()
    assert np.isfinite(dbias).all()
    for name, got in found.items():
        compare(truth, name, got).check()


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("bias", ["11qk", "1h1k", "b1q1", "1"])
def test_the_gradient_of_a_bias_has_the_same_bits_every_time(
    runner: ApiRunner, dtype: str, bias: str
) -> None:
    case = Case(3, 4, 2, 500, 300, dtype=dtype, causal=True, bias=bias, seed=3)
    x, runner = inputs(case), ordered(runner)
    first, *others = (_results(runner, case, x)["dbias"].tobytes() for _ in range(3))
    assert others == [first] * 2
