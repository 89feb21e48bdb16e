"""The six checks that need no reference, on every backend and algorithm."""

from __future__ import annotations

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, several_tiles, skip_unless_served, sweep, tiles

_DIMS = ((8, 8), (40, 40), (64, 64), (128, 128), (192, 128))


@sweep(_DIMS)
def test_six_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",))
    examples(runner, drawn, check, first=several_tiles(tile, dtype, dims, causal))
