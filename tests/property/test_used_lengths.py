"""Used lengths, on every backend and algorithm.

The kit's runners put NaN or infinity into all rows that do not count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from ..kit.case import VALUES, Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import tensor
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from ..kit.seen import LENGTHS
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import inputs

_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}
_USED = ("q", "k", "qk", "qk")
#: With sinks; see ``test_sinks``.
_VALUES = tuple(values for values in VALUES if values != "equal")

_of_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
_of_runners = pytest.mark.parametrize("runner", runners())


def _results(runner: ApiRunner, case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _check(runner: ApiRunner, case: Case) -> dict[str, np.ndarray]:
    """Judge the results of both passes, and return them."""
    x = inputs(case)
    truth, found = judge(case, x), _results(runner, case, x)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


def _beside(dims: tuple[int, int], causal: bool, dtype: str) -> list[dict[str, Any]]:
    """Features beside lengths; another feature is another kernel to compile."""
    if dims == (40, 40):
        sunk = "float64" if dtype == "float64" else "float32"
        return [{}, {"sinks": (sunk,), "values": _VALUES}]
    if dims == (64, 64):
        return [{"alibis": ("heads", "batch"), "windowed": True}, {"windowed": not causal}]
    others = [{"masks": ("bhqk", "b11k")}, {"softcaps": (3.0,), "dropouts": ("0.3:4",)}]
    return [{"biases": ("bhqk", "11qk", "b1qk:float32", "k")}, others[causal]]


@sweep(((40, 40), (64, 64), (128, 128)))
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    options: dict[str, Any] = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype]}
    some = [
        cases(dtype, *dims, **options, **more, used=_USED) for more in _beside(dims, causal, dtype)
    ]
    first = replace(several_tiles(tile, dtype, dims, causal), batch=3, used="qk")

    def check(case: Case) -> None:
        _check(runner, case)

    examples(runner, st.one_of(*some), check, 48, first=first)


@sweep(((40, 40), (128, 128)))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), batch=3, used="qk")
    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",), used=_USED)
    examples(runner, drawn, check, first=first)


def _entry(case: Case, x: dict[str, np.ndarray], entry: int) -> tuple[Case, dict[str, np.ndarray]]:
    """The case and the arrays of a separate call for the rows of an entry that count."""
    queries, keys = case.counted(entry)
    alone = replace(case, batch=1, seqlen_q=queries, seqlen_kv=keys, used="")
    named = {**x, **{name: tensor(case, name) for name in case.operands if name not in LENGTHS}}
    return alone, {name: _part(case, name, array, entry) for name, array in named.items()}


def _part(case: Case, name: str, array: np.ndarray, entry: int) -> np.ndarray:
    """The part of an array or a result for an entry."""
    queries, keys = case.counted(entry)
    if name == "sinks":
        return array
    one = array[entry : entry + 1]
    if name == "alibi_slopes":
        return one
    if name in ("bias", "dbias"):
        return one[:, :, :queries, :keys]
    if name in ("lse", "dlse"):
        return one[:, :, :queries]
    return one[:, : keys if name in ("k", "v", "dk", "dv") else queries]


#: Lengths for 150 queries and 200 keys: 0, 1, an end of a tile with its neighbours, all, too many.
_ENDS = (
    "0,1,63,64,65,127,128,129,149,150,151,-1"
    "/200,64,65,0,1,127,128,199,129,-2147483648,63,2147483647"
)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": "40:10"}], ids=str)
@pytest.mark.parametrize("q_offset", [None, 20])
def test_an_entry_is_a_call_of_its_own(
    runner: ApiRunner, dtype: str, more: dict[str, Any], q_offset: int | None
) -> None:
    """Any number of rows that count. Slopes use the positions of queries."""
    case = Case(
        *(12, 2, 1, 150, 200, 40, 40),
        dtype=dtype,
        q_offset=q_offset,
        used=_ENDS,
        alibi="batch",
        bias="bhqk",
        **more,
    )
    x = inputs(case)
    found = _results(ordered(runner), case, x)
    del found["dalibi_slopes"]
    for entry in range(case.batch):
        truth = judge(*_entry(case, x, entry))
        for name, got in found.items():
            compare(truth, name, _part(case, name, got, entry)).check()
    queries, keys = ~case.queries_count(), ~case.keys_count()
    assert (found["lse"].swapaxes(1, 2)[queries] == -np.inf).all()
    nothing = [found[name][queries] for name in ("out", "dq")]
    nothing += [found[name][keys] for name in ("dk", "dv")]
    nothing += [found["dbias"].swapaxes(1, 2)[queries], found["dbias"].swapaxes(1, 3)[keys]]
    assert not any(part.any() for part in nothing)


@_of_runners
@_of_dtypes
def test_lengths_of_all_rows_are_none(runner: ApiRunner, dtype: str) -> None:
    plain = Case(3, 4, 2, 150, 200, dtype=dtype, causal=True, sinks=_statistics(dtype), seed=2)
    x, truth = inputs(plain), judge(plain, inputs(plain))
    for used in ("150,150,150/", "/200,200,200", "150,151,2147483647/200,201,2147483647"):
        for name, got in _results(runner, replace(plain, used=used), x).items():
            compare(truth, name, got).check()


@_of_runners
@_of_dtypes
def test_lengths_of_no_rows_leave_nothing(runner: ApiRunner, dtype: str) -> None:
    """Without queries nothing is left; without keys, only the sink's lse and gradient."""
    case = Case(2, 4, 2, 150, 200, dtype=dtype, sinks=_statistics(dtype), bias="qk", seed=2)
    for used in ("0,-7/", "0,-7/-1,0"):
        found = _results(runner, replace(case, used=used), inputs(case))
        assert (found.pop("lse") == -np.inf).all()
        for name, got in found.items():
            assert (got == 0).all(), name
    case = replace(case, used="/-2147483648,0")
    found = _check(runner, case)
    assert found.pop("lse").any()
    assert found.pop("dsinks").any()
    for name, got in found.items():
        assert (got == 0).all(), name


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("used", ["150,70,3/200,90,141", "150,70,3/", "/200,90,141"])
def test_lengths_beyond_the_rows_are_those_of_the_array(
    runner: ApiRunner, dtype: str, used: str
) -> None:
    """Full lengths of queries or keys give the same bits as no such lengths."""
    case = Case(3, 4, 2, 150, 200, dtype=dtype, causal=True, mask="bhqk", seed=3, used=used)
    x, runner = inputs(case), ordered(runner)
    expected = _results(runner, case, x)
    queries, keys = used.split("/")
    other = f"{queries or '150,150,150'}/{keys or '200,200,200'}"
    for same in (other, other.replace("150,", "7000,").replace("200,", "2147483647,")):
        for name, got in _results(runner, replace(case, used=same), x).items():
            assert got.tobytes() == expected[name].tobytes(), (same, name)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize(
    "more", [{}, {"alibi": "heads", "window": "50:"}, {"bias": "1hqk"}, {"dropout": "0.3"}], ids=str
)
def test_what_does_not_count_may_hold_anything(
    runner: ApiRunner, dtype: str, more: dict[str, Any]
) -> None:
    """NaN and infinity in unused rows give the same bits; in a used key they would not."""
    case = Case(3, 4, 2, 150, 200, dtype=dtype, seed=4, used="150,70,3/141,0,90", **more)
    case, x, runner = replace(case, sinks=_statistics(dtype)), inputs(case), ordered(runner)
    expected = _results(runner, case, x)
    assert all(np.isfinite(got).all() for name, got in expected.items() if name != "lse")
    for name, got in _results(replace(runner, poison="huge"), case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
    x["v"][2, 89] = np.nan
    assert np.isnan(_results(runner, case, x)["out"]).any()


@_of_runners
@_of_dtypes
def test_a_length_reaches_its_entry_alone(runner: ApiRunner, dtype: str) -> None:
    case = Case(3, 4, 2, 150, 200, dtype=dtype, causal=True, seed=5, used="150,70,30/200,90,141")
    x, runner = inputs(case), ordered(runner)
    expected = _results(runner, case, x)
    for used in ("150,71,30/200,90,141", "150,70,30/200,89,141"):
        for name, got in _results(runner, replace(case, used=used), x).items():
            equal = [np.array_equal(a, b) for a, b in zip(got, expected[name], strict=True)]
            assert equal == [True, False, True], (used, name)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("bias", ["11qk", "b1qk", "h1k", "q1"])
def test_entries_add_up_in_gradients_that_they_share(
    runner: ApiRunner, dtype: str, bias: str
) -> None:
    case = Case(3, 4, 2, 90, 136, dtype=dtype, bias=bias, used="90,40,3/136,20,77", seed=6)
    case = replace(case, alibi="heads", sinks=_statistics(dtype))
    _check(runner, case)


@_of_runners
@_of_dtypes
def test_functions_of_scores_know_where_queries_stand(runner: ApiRunner, dtype: str) -> None:
    """A text of slopes and a bias: every entry has its own offset."""
    case = Case(3, 4, 2, 90, 136, dtype=dtype, used="90,40,3/136,20,77", causal=True, seed=7)
    for q_offset in (None, 11):
        _check(runner, replace(case, alibi="batch", bias="bhqk", q_offset=q_offset, written=True))


def _statistics(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"
