"""Dead rows on the emulated device; ``tests/property/test_dead_rows.py`` tests them on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.data import arrays
from .build import compiler
from .rows import ROWS, Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_NAMES = ("out", "lse", "dq", "dk", "dv")
_CAUSAL = [
    row
    for row in ROWS
    if row.causal
    and not row.planned
    and (
        row.algorithm == "fa3"
        or (row.architecture, row.dtype, row.dims) == ("90", "float16", (64, 64))
    )
]
#: Rows with one stage of Q and dO, where dQ reads again which rows are dead.
_ONE_STAGE = [r for r in ROWS if r.dtype == "float64" and r.filled]


def _results(row: Row, case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results by name, with heads first."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
    grads = row.runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    named = zip(_NAMES, (out, lse, *grads), strict=True)
    return {name: case.heads_first(name, a).astype(np.float64) for name, a in named}


@pytest.mark.parametrize("row", params(*_CAUSAL))
def test_rows_before_the_mask_may_hold_anything(row: Row) -> None:
    case = Case(1, 2, 1, 70, 100, *row.dims, row.dtype, causal=True, q_offset=-40)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    clean = _results(row, case, x)
    x["q"][:, :40] = np.nan
    x["dout"][:, :40] = np.inf
    x["dlse"][:, :, :40] = np.nan
    for name, got in _results(row, case, x).items():
        assert np.array_equal(got, clean[name]), name
    assert (clean["dq"][:, :, :40] == 0).all()
    assert (clean["lse"][:, :, :40] == -np.inf).all()


@pytest.mark.parametrize("row", params(*_CAUSAL))
def test_keys_that_kill_every_row(row: Row) -> None:
    """Values and queries may be infinite or NaN; zero weights hide them."""
    case = replace(Case(2, 2, 1, 40, 70, *row.dims, row.dtype, causal=True), q_offset=30)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["q"][..., 0] = 1
    x["k"][0, :, :, 0] = -np.inf
    x["v"][0, 20:] = np.inf
    got = _results(row, case, x)
    for name in ("out", "dq", "dk", "dv"):
        assert (got[name][0] == 0).all(), name
        assert np.isfinite(got[name][1]).all(), name
    assert (got["lse"][0] == -np.inf).all()


@pytest.mark.parametrize("row", params(*_CAUSAL, *_ONE_STAGE))
def test_dead_rows_beside_rows_that_see_nan(row: Row) -> None:
    case = Case(1, 2, 1, 100, 90, *row.dims, row.dtype, causal=True, q_offset=-6)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["k"][:, 1], x["v"][:, 1] = np.nan, np.nan  # seen from query 7 on
    got = _results(row, case, x)
    assert np.isnan(got["out"][:, :, 7:]).all()
    assert (got["out"][:, :, :6] == 0).all()
    assert (got["dq"][:, :, :6] == 0).all()
    assert (got["lse"][:, :, :6] == -np.inf).all()


@pytest.mark.parametrize("row", params(*_CAUSAL))
def test_one_dead_query_anywhere(row: Row) -> None:
    """It is the only dead query of its tile or warp, and its numbers reach no other result."""
    case = Case(1, 1, 1, 150, 20, *row.dims, row.dtype, causal=True, q_offset=20)
    for dead in (*range(5, 150, 29), 149):  # in both halves of every unit of rows, and the last row
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
        for name in ("q", "dout", "dlse"):
            case.heads_first(name, x[name])[:, :, dead] = 0
        clean = _results(row, case, x)
        x["q"][:, dead, :, 0] = -np.inf
        x["dout"][:, dead], x["dlse"][..., dead] = np.inf, np.nan
        for name, got in _results(row, case, x).items():
            expected = clean[name]
            if name not in ("dk", "dv"):
                assert (got[:, :, dead] == (-np.inf if name == "lse" else 0)).all(), name
                got, expected = (np.delete(a, dead, axis=2) for a in (got, expected))
            assert np.abs(got - expected).max() < 0.01 * np.abs(expected).max(), (name, dead)
        x["v"][:, 0] = np.inf
        out, _ = row.runner.forward(case, x["q"], x["k"], x["v"])
        assert (out[:, dead] == 0).all(), dead
        assert np.isinf(np.delete(out, dead, axis=1)).all(), dead
