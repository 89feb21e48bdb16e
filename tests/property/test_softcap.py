"""Soft caps, on every backend and algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import inputs, results

_DIMS = ((40, 40), (64, 64), (128, 128), (192, 128), (100, 256))
_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}
#: One that saturates most scores, one that bends them, and one that hardly does.
_CAPS = (0.5, 3.0, 50.0)


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

    first = replace(several_tiles(tile, dtype, dims, causal), softcap=3.0)
    options = {"tile": tile, "budget": _BUDGET[dtype], "softcaps": _CAPS}
    # Each kind of window is a kernel to compile; models with caps have windows and causal masks.
    drawn = cases(dtype, *dims, causal=causal, windowed=causal, **options)
    examples(runner, drawn, check, 80, first=first)


@sweep(((40, 40), (128, 128)))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), softcap=3.0)
    options = {"values": ("normal",), "softcaps": _CAPS}
    drawn = cases(dtype, *dims, causal=causal, tile=tile, **options)
    examples(runner, drawn, check, first=first)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_size_of_the_cap_matters(runner: ApiRunner, dtype: str) -> None:
    """One kernel serves all caps; they give different results, also from no cap."""
    plain = Case(2, 4, 2, 150, 200, dtype=dtype, causal=True, values="x8", seed=1)
    runner, x = ordered(runner), inputs(plain)
    every = [results(runner, replace(plain, softcap=cap), x) for cap in (None, 0.5, 3.0)]
    for name in every[0]:
        assert len({one[name].tobytes() for one in every}) == len(every), name
        assert all(np.isfinite(one[name].astype(np.float64)).all() for one in every), name
