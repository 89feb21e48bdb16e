"""Functions of scores, on every backend and algorithm: texts equivalent to features."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import results

_DIMS = ((40, 40), (64, 64), (128, 128), (192, 128), (100, 256))
_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}

#: The features to write: each is a text, and a kernel to compile.
_TEXTS = (
    {"softcap": 3.0},
    {"softcap": 3.0, "alibi": "batch"},
    {"alibi": "heads", "bias": "qk", "mask": "b11k"},
)


@sweep(_DIMS)
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    texts = _TEXTS if dims == (64, 64) else _TEXTS[2:]

    def check(case: Case) -> None:
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        truth = judge(case, x)
        for name, got in results(runner, case, x).items():
            compare(truth, name, got).check()

    first = replace(several_tiles(tile, dtype, dims, causal), written=True, **texts[-1])
    options = {"tile": tile, "budget": _BUDGET[dtype]}
    drawn = st.builds(
        lambda case, text: replace(case, written=True, **text),
        cases(dtype, *dims, causal=causal, **options),
        st.sampled_from(texts),
    )
    examples(runner, drawn, check, 60, first=first)


@sweep(((64, 64), (128, 128)))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), softcap=3.0, written=True)
    options = {"values": ("normal",), "softcaps": (3.0,)}
    drawn = cases(dtype, *dims, causal=causal, tile=tile, **options)
    examples(runner, drawn.map(lambda case: replace(case, written=True)), check, first=first)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_case_is_written_in_its_line(dtype: str) -> None:
    case = Case(dtype=dtype, softcap=2.0, written=True)
    assert Case.parse(case.repro) == case
    assert "written=yes" in case.repro
