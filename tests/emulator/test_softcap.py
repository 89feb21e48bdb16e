"""Soft caps on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import CAPPED
from .rows import Row, params
from .test_windows import results

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


@pytest.mark.parametrize("row", params(*CAPPED))
def test_against_float64(row: Row) -> None:
    for case in row.cases():
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        truth = judge(case, x)
        for name, got in results(row, case, x).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*CAPPED))
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*CAPPED))
def test_caps_of_any_size(row: Row) -> None:
    """The largest accepted cap changes nothing; the smallest makes all scores equal."""
    exponent = 890 if row.dtype == "float64" else 96
    for cap in (2.0**exponent, 2.0**-exponent):
        case = replace(row.cases()[1], softcap=cap)
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        truth = judge(case, x)
        for name, got in results(row, case, x).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*(row for row in CAPPED if not row.window)))
def test_references_rise(row: Row) -> None:
    """Kernels that begin at the last keys meet the largest scores late."""
    case = Case(1, 2, 1, 70, 600, *row.dims, row.dtype, causal=row.causal, softcap=50.0, seed=4)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["k"][:, :400] *= np.asarray(24, x["k"].dtype)
    truth = judge(case, x)
    for name, got in results(row, case, x).items():
        compare(truth, name, got).check()


#: Rows with small tiles, or whose mask hides nothing.
_TELLING = tuple(row for row in CAPPED if not row.filled or not (row.causal or row.window))


@pytest.mark.parametrize("row", params(*_TELLING))
@pytest.mark.parametrize("place", [0.1, 0.7])
def test_one_element_that_is_not_finite(row: Row, place: float) -> None:
    case = Case(1, 2, 1, 170, 260, *row.dims, row.dtype, causal=row.causal, softcap=3.0, seed=1)
    if row.window:
        case = row.windowed(replace(case, causal=False, q_offset=-20), 40, 20)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, 64)
        one.check(results(row, case, one.x))


@pytest.mark.parametrize("row", params(*CAPPED))
def test_dead_rows_may_hold_anything(row: Row) -> None:
    if not row.causal and not row.window:
        pytest.skip("every query sees a key without a mask")
    case = replace(row.cases()[2], strides=Case().strides)
    dead = case.visible() == 0
    assert dead.any()
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    expected = results(row, case, x)
    for name in ("q", "dout"):
        case.heads_first(name, x[name])[:, :, dead] = np.nan
    for name, got in results(row, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
