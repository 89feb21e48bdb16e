"""Windows of keys, on every backend and algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles

#: Two buckets of widths, one of them not filled; v narrower than q and k.
_DIMS = ((40, 40), (64, 64), (128, 128), (192, 128))
_BUDGET = {"float16": 2**18, "bfloat16": 2**18, "float32": 2**18, "float64": 2**15}
_NAMES = ("out", "lse", "dq", "dk", "dv")

#: Pairs of cases with the same bits: bounds that hide nothing, or that equal the mask.
_SAME = (
    (Case(window=":0"), Case(causal=True)),
    (Case(window=":7", causal=True), Case(causal=True)),
    (Case(window=":0", q_offset=-20), Case(causal=True, q_offset=-20)),
    (Case(window="199:", causal=True), Case(causal=True)),
    (Case(window="199:149"), Case()),
    (Case(window="10000:10000"), Case()),
    (Case(window=":0", q_offset=10_000), Case()),
    (Case(window="2:3", q_offset=10_000), Case(window="0:0", q_offset=-10_000)),
    (Case(window="30:0"), Case(window="30:", causal=True)),
)


def results(runner: ApiRunner, case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    return dict(zip(_NAMES, (out, lse, *grads), strict=True))


def inputs(case: Case) -> dict[str, np.ndarray]:
    """The inputs of both passes."""
    return arrays(case, "q", "k", "v", "dout", "dlse")


@sweep(_DIMS)
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")

    def check(case: Case) -> None:
        x = inputs(case)
        truth = judge(case, x)
        for name, got in results(runner, case, x).items():
            compare(truth, name, got).check()

    first = replace(several_tiles(tile, dtype, dims, causal), window=f"{tile[1] + 1}:5")
    drawn = cases(dtype, *dims, causal=causal, tile=tile, budget=_BUDGET[dtype], windowed=True)
    examples(runner, drawn, check, 64, first=first)


@sweep(((40, 40), (128, 128)))
def test_six_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), window=f"{tile[1] - 1}:2")
    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",), windowed=True)
    examples(runner, drawn, check, first=first)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("one", "other"), _SAME, ids=lambda case: case.window or "none")
def test_these_have_the_same_bits(runner: ApiRunner, dtype: str, one: Case, other: Case) -> None:
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 150, "seqlen_kv": 200}
    one, other = (replace(case, **sizes, dtype=dtype, seed=3) for case in (one, other))
    runner, x = ordered(runner), inputs(one)
    expected = results(runner, other, x)
    for name, got in results(runner, one, x).items():
        assert got.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_queries_that_see_no_key_may_hold_anything(runner: ApiRunner, dtype: str) -> None:
    """Queries before the keys, and after them."""
    case = Case(1, 4, 2, 500, 200, dtype=dtype, q_offset=-150, window="20:10", seed=1)
    dead = case.visible() == 0
    assert dead[0]
    assert dead[-1]
    x, runner = inputs(case), ordered(runner)
    expected = results(runner, case, x)
    x["q"][:, dead], x["dout"][:, dead], x["dlse"][:, :, dead] = np.nan, np.inf, np.nan
    for name, got in results(runner, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
    assert (expected["lse"][:, :, dead] == -np.inf).all()
    assert (expected["out"][:, dead] == 0).all()
    assert (expected["dq"][:, dead] == 0).all()


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_keys_in_tiles_that_nobody_sees_may_hold_anything(runner: ApiRunner, dtype: str) -> None:
    """Whole tiles before all windows, and after them."""
    tile = max(tiles(runner, dtype, (64, 64), False, of)[1] for of in ("forward", "backward"))
    case = Case(1, 4, 2, 9, 5 * tile, dtype=dtype, q_offset=2 * tile + 10, window="8:3", seed=2)
    x, runner = inputs(case), ordered(runner)
    expected = results(runner, case, x)
    for unseen in (slice(0, 2 * tile), slice(3 * tile, None)):
        x["k"][:, unseen], x["v"][:, unseen] = np.nan, np.inf
        assert (expected["dk"][:, unseen] == 0).all()
        assert (expected["dv"][:, unseen] == 0).all()
    for name, got in results(runner, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
