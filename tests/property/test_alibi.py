"""ALiBi, on every backend and algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from ..kit.case import VALUES, Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import inputs

_DIMS = ((40, 40), (64, 64), (128, 128), (192, 128))
_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}
_BOTH = ("heads", "batch")
#: Values of cases with sinks; ``test_sinks`` says why.
_VALUES = tuple(values for values in VALUES if values != "equal")

_of_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
_of_runners = pytest.mark.parametrize("runner", runners())


def _results(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], slopes: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], alibi_slopes=slopes)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = runner.backward(case, *given, alibi_slopes=slopes)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _check(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], slopes: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Judge the results of both passes, and return them."""
    truth = judge(case, x if slopes is None else {**x, "alibi_slopes": slopes})
    found = _results(runner, case, x, slopes)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


@sweep(_DIMS)
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    """Another feature or kind of window is another kernel to compile: few are drawn together."""
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    sunk = "float64" if dtype == "float64" else "float32"
    options = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype], "alibis": _BOTH}
    some = [
        cases(dtype, *dims, **options),
        cases(dtype, *dims, **options, softcaps=(0.5, 3.0)),
        cases(dtype, *dims, **options, sinks=(sunk,), values=_VALUES),
    ]
    if causal:  # models with slopes are causal, and have windows
        some.append(cases(dtype, *dims, **options, windowed=True))
    first = replace(several_tiles(tile, dtype, dims, causal), alibi="heads")

    def check(case: Case) -> None:
        _check(runner, case, inputs(case))

    examples(runner, st.one_of(*some), check, 64, first=first)


@sweep(((40, 40), (128, 128)))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), alibi="batch")
    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",), alibis=_BOTH)
    examples(runner, drawn, check, first=first)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("q_offset", [None, 75, 1000, -1000, 100_000])
def test_slopes_of_either_sign_and_queries_far_off(
    runner: ApiRunner, dtype: str, q_offset: int | None
) -> None:
    """The sign changes from head to head, and near each key with the query's position."""
    case = Case(2, 4, 2, 150, 200, dtype=dtype, q_offset=q_offset, alibi="heads", seed=1)
    slopes = np.array([0.5, -0.5, 2.0**-8, -(2.0**-5)], case.statistics)
    _check(runner, case, inputs(case), slopes)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("alibi", _BOTH)
def test_slopes_of_zero_are_none(runner: ApiRunner, dtype: str, alibi: str) -> None:
    plain = Case(2, 4, 2, 150, 200, dtype=dtype, causal=True, seed=2)
    case, x = replace(plain, alibi=alibi), inputs(plain)
    found = _check(runner, case, x, np.zeros(case.shape("alibi_slopes"), case.statistics))
    truth = judge(plain, x)
    for name in truth.results:
        compare(truth, name, found[name]).check()


@_of_runners
@_of_dtypes
def test_slopes_of_each_entry_of_the_batch(runner: ApiRunner, dtype: str) -> None:
    """Equal slopes give the same bits as shared ones; other slopes reach only their entry."""
    one = Case(3, 4, 2, 150, 200, dtype=dtype, causal=True, alibi="heads", seed=3)
    each, x, runner = replace(one, alibi="batch"), inputs(one), ordered(runner)
    slopes = np.array([0.5, -0.01, 0.0, 2.0**-6], one.statistics)
    expected, same = _results(runner, one, x, slopes), np.tile(slopes, (3, 1))
    found = _results(runner, each, x, same)
    summed = found.pop("dalibi_slopes").astype(np.float64).sum(axis=0).astype(one.statistics)
    truth = judge(one, {**x, "alibi_slopes": slopes})
    compare(truth, "dalibi_slopes", summed).check()
    for name, got in found.items():
        assert got.tobytes() == expected[name].tobytes(), name
    same[1] *= 2
    for name, got in _check(runner, each, x, same).items():
        if name != "dalibi_slopes":
            equal = [np.array_equal(a, b) for a, b in zip(got, expected[name], strict=True)]
            assert equal == [True, False, True], name


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_queries_that_see_no_key_may_hold_anything(runner: ApiRunner, dtype: str) -> None:
    """Some of these queries are before all keys, others after them."""
    case = Case(1, 4, 2, 500, 200, dtype=dtype, q_offset=-150, window="20:10", alibi="heads")
    dead, x, runner = case.visible() == 0, inputs(case), ordered(runner)
    assert dead[0]
    assert dead[-1]
    expected = _check(runner, case, x)
    x["q"][:, dead], x["dout"][:, dead], x["dlse"][:, :, dead] = np.nan, np.inf, np.nan
    for name, got in _results(runner, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_gradient_of_slopes_has_the_same_bits_every_time(runner: ApiRunner, dtype: str) -> None:
    case = Case(3, 4, 2, 500, 300, dtype=dtype, causal=True, alibi="heads", seed=3)
    x, runner = inputs(case), ordered(runner)
    first, *others = (_results(runner, case, x)["dalibi_slopes"].tobytes() for _ in range(3))
    assert others == [first] * 2
