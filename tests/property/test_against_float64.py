"""Every problem, row by row, against float64 (float64 against longdouble)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from ..kit.strides import CONTIGUOUS
from .sweep import (
    BLOCKS,
    SWEPT,
    count,
    examples,
    ordered,
    runners,
    several_tiles,
    skip_unless_served,
    sweep,
    tiles,
)

#: Work of one example: float64 is judged in longdouble, which is slow.
BUDGET = {"float16": 2**19, "bfloat16": 2**19, "float32": 2**19, "float64": 2**16}


@sweep()
def test_forward(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        x = arrays(case, "q", "k", "v")
        truth = judge(case, x)
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        compare(truth, "out", out).check()
        compare(truth, "lse", lse).check()

    drawn = cases(dtype, *dims, causal=causal, tile=tile, budget=BUDGET[dtype])
    examples(runner, drawn, check, SWEPT, first=several_tiles(tile, dtype, dims, causal))


@sweep()
def test_backward(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")

    def check(case: Case) -> None:
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        with_dlse = case.seed % 2 == 1
        if not with_dlse:
            del x["dlse"]
        truth = judge(case, x)
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x.get("dlse"))
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            compare(truth, name, grad).check()

    drawn = cases(dtype, *dims, causal=causal, tile=tile, budget=BUDGET[dtype])
    examples(runner, drawn, check, SWEPT, first=several_tiles(tile, dtype, dims, causal))


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_blocks_give_the_same(runner: ApiRunner, dtype: str) -> None:
    """Small and lopsided tiles: many of them, and edges everywhere."""
    numpy = ((1, 1), (7, 16), (16, 7), (40, 1), (40, 40))
    few = numpy if runner.backend == "numpy" else BLOCKS

    @settings(max_examples=count(runner, 2))
    @given(
        case=cases(dtype, 40, 40, causal=True, tile=(16, 32), budget=2**17),
        blocks=st.sampled_from(few),
    )
    def run(case: Case, blocks: tuple[int, int]) -> None:
        asked = replace(runner, options=(("blocks", blocks),))
        x = arrays(case)
        truth = judge(case, x)
        out, lse = asked.forward(case, x["q"], x["k"], x["v"])
        grads = asked.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse)
        for name, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
            compare(truth, name, got).check()

    run()


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nothing_depends_on_poison(runner: ApiRunner, dtype: str) -> None:
    """The bits do not depend on the old contents of margins, gaps, outputs and workspace."""

    def check(case: Case) -> None:
        x, answers = arrays(case), []
        for poison in ("nan", "huge"):
            poisoned = replace(ordered(runner), poison=poison)
            out, lse = poisoned.forward(case, x["q"], x["k"], x["v"])
            grads = poisoned.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse)
            answers.append([a.tobytes() for a in (out, lse, *grads)])
        assert answers[0] == answers[1], case.repro

    tile = tiles(runner, dtype, (64, 64), True, "forward")
    examples(runner, cases(dtype, 64, causal=True, tile=tile), check, 2)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_library_makes_the_same_results_itself(runner: ApiRunner, dtype: str) -> None:
    """Without destinations the bits are the same, and results are new contiguous arrays."""

    def check(case: Case) -> None:
        if runner.algorithm == "auto":  # strides of destinations can change the choice of "auto"
            made = ("out", "dq", "dk", "dv")
            case = case.with_strides(**dict.fromkeys(made, CONTIGUOUS))
        x = arrays(case)
        one, fresh = ordered(runner), replace(ordered(runner), destinations=False)
        out, lse = one.forward(case, x["q"], x["k"], x["v"])
        mine = fresh.forward(case, x["q"], x["k"], x["v"])
        for a, b in zip((out, lse), mine, strict=True):
            assert a.tobytes() == b.tobytes(), case.repro
            assert b.flags.c_contiguous
        given_to = (x["dout"], x["q"], x["k"], x["v"], out, lse)
        for a, b in zip(
            one.backward(case, *given_to), fresh.backward(case, *given_to), strict=True
        ):
            assert a.tobytes() == b.tobytes(), case.repro

    examples(runner, cases(dtype, 40, causal=True, tile=(64, 64), budget=2**16), check, 4)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_seen_and_not_finite_comes_out(runner: ApiRunner, dtype: str, value: float) -> None:
    """A NaN or infinite score makes the rows that see it NaN, on whichever tile it lies."""
    case = Case(seqlen_q=150, seqlen_kv=700, dtype=dtype, causal=True, q_offset=500)
    x = arrays(case, "q", "k", "v")
    q = np.abs(x["q"]) + np.asarray(0.5, x["q"].dtype)  # so that inf scores are +inf
    for key in (0, 560):
        k = x["k"].copy()
        k[0, key, 0, 0] = value
        out, lse = runner.forward(case, q, k, x["v"])
        first = max(0, key - 500)
        assert np.isnan(out[0, first:]).all()
        assert np.isnan(lse[0, 0, first:]).all()


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_no_tile_visits_never_matters(runner: ApiRunner, dtype: str) -> None:
    """Keys in tiles that the mask hides wholly may hold anything."""
    plain = Case(dtype=dtype, causal=True, q_offset=0)
    block_kv = tiles(runner, dtype, (64, 64), True, "forward")[1]
    block_kv = max(block_kv, tiles(runner, dtype, (64, 64), True, "backward")[1])
    case = replace(plain, seqlen_q=min(100, block_kv), seqlen_kv=3 * block_kv)
    x = arrays(case)
    hidden = {name: x[name].copy() for name in "kv"}
    for array in hidden.values():
        array[0, 2 * block_kv :] = np.nan
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    same, same_lse = runner.forward(case, x["q"], hidden["k"], hidden["v"])
    one = ordered(runner)
    grads = one.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse)
    others = one.backward(case, x["dout"], x["q"], hidden["k"], hidden["v"], out, lse)
    assert np.array_equal(same, out)
    assert np.array_equal(same_lse, lse)
    for grad, other in zip(grads, others, strict=True):
        assert np.array_equal(grad, other)
        assert np.isfinite(grad.astype(np.float64)).all()
    assert (others[1][0, 2 * block_kv :] == 0).all()
