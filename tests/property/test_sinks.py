"""Attention sinks, on every backend and algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from ..kit.case import VALUES, Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays, tensor
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles

_DIMS = ((40, 40), (64, 64), (192, 128))
#: Without "equal": all scores of a head are then one number, for which plain NumPy may by luck have
#: no error. Softmax cancels the error of that number, but a sink does not.
_VALUES = tuple(values for values in VALUES if values != "equal")
_BUDGET = {"float16": 2**18, "bfloat16": 2**18, "float32": 2**18, "float64": 2**15}


def _results(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], sinks: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], sinks=sinks)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = runner.backward(case, *given, sinks=sinks)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _inputs(case: Case) -> dict[str, np.ndarray]:
    """The inputs of both passes, without the sinks."""
    return arrays(case, "q", "k", "v", "dout", "dlse")


def _dtypes(dtype: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((dtype, "float64" if dtype == "float64" else "float32")))


@sweep(_DIMS)
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")

    def check(case: Case) -> None:
        x = _inputs(case)
        truth = judge(case, x)
        for name, got in _results(runner, case, x).items():
            compare(truth, name, got).check()

    first = replace(several_tiles(tile, dtype, dims, causal), sinks=_dtypes(dtype)[-1])
    options = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype], "sinks": _dtypes(dtype)}
    options |= {"values": _VALUES}
    both = (cases(dtype, *dims, **options, windowed=windowed) for windowed in (False, True))
    examples(runner, st.one_of(*both), check, 64, first=first)


@sweep(((40, 40), (128, 128)))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), sinks=dtype)
    options = {"values": ("normal",), "sinks": _dtypes(dtype)}
    drawn = cases(dtype, *dims, causal=causal, tile=tile, **options)
    examples(runner, drawn, check, first=first)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("window", ["", "30:20"])
def test_a_sink_of_minus_infinity_is_none(runner: ApiRunner, dtype: str, window: str) -> None:
    case = Case(2, 4, 2, 150, 200, dtype=dtype, causal=True, window=window, seed=1)
    sunk, runner, x = replace(case, sinks=dtype), ordered(runner), _inputs(case)
    none = np.full(case.heads_q, -np.inf, sunk.dtype_of("sinks"))
    expected, got = _results(runner, case, x), _results(runner, sunk, x, none)
    assert (got.pop("dsinks") == 0).all()
    for name, array in got.items():
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_that_see_no_key_are_their_sink(runner: ApiRunner, dtype: str) -> None:
    """The numbers of such a row have no effect, except dlse, which the sink's gradient needs."""
    case = Case(2, 4, 2, 260, 90, dtype=dtype, window="20:3", q_offset=-70, seed=2)
    case = replace(case, sinks=_dtypes(dtype)[-1])
    dead, x, runner = case.visible() == 0, _inputs(case), ordered(runner)
    assert dead[0]
    assert dead[-1]
    expected, truth = _results(runner, case, x), judge(case, x)
    for name, got in expected.items():
        compare(truth, name, got).check()
    x["q"][:, dead], x["dout"][:, dead] = np.nan, np.inf
    for name, got in _results(runner, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
    assert (expected["out"][:, dead] == 0).all()
    assert (expected["dq"][:, dead] == 0).all()


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sink_that_is_not_finite_comes_out_of_its_head_alone(
    runner: ApiRunner, dtype: str, bad: float
) -> None:
    case = Case(1, 4, 2, 70, 90, dtype=dtype, sinks=_dtypes(dtype)[-1])
    x, sinks = arrays(case, "q", "k", "v"), tensor(case, "sinks")
    sinks[1] = bad
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], sinks=sinks)
    assert np.isnan(out[:, :, 1].astype(np.float64)).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(np.delete(out, 1, axis=2).astype(np.float64)).all()
    assert np.isfinite(np.delete(lse, 1, axis=1)).all()


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_gradient_of_sinks_has_the_same_bits_every_time(runner: ApiRunner, dtype: str) -> None:
    case = Case(3, 4, 2, 500, 300, dtype=dtype, causal=True, sinks=dtype, seed=3)
    x = _inputs(case)
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    first, *others = (runner.backward(case, *given)[3].tobytes() for _ in range(4))
    assert others == [first] * 3


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_weight_of_a_sink_is_as_exact_where_keys_are_alike(algorithm: str) -> None:
    """A single key consists of the common part alone, whose subtraction makes lse large."""
    case = Case(heads_q=2, dtype="float64", values="x8", sinks="float64")
    x = _inputs(case)
    results = _results(ApiRunner("numpy", algorithm), case, x)
    compare(judge(case, x), "dsinks", results["dsinks"]).check()
