"""Soft caps on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .rows import CAPPED, Row, params
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
