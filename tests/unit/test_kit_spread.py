"""The limit for bias by the number of rows that are not 0: one row may err more than many."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit import data, limits, oracle
from tests.kit.case import Case
from tests.kit.compare import Registry, _size, _spread, compare
from tests.kit.oracle import Truth, judge

pytestmark = pytest.mark.skipif(not oracle.WIDE, reason="longdouble is no wider than float64")

CASE = Case(1, 1, 1, 130, 70, 16, 16, "bfloat16", layout="bhsd", seed=1)


def _truth(rows: int) -> Truth:
    """The truth for a dO that is 0 except in this many rows: only these have a dq."""
    x = data.arrays(CASE, "q", "k", "v", "dout", "dlse")
    x["dlse"][...] = 0
    x["dout"][:, :, rows:] = 0
    return judge(CASE, x)


def _off(truth: Truth, part: float) -> dict[str, float]:
    """The rules' ratios to their limits for a dq in which each row errs in its own direction."""
    expected = truth.results["dq"].astype(np.float64)
    length = np.sqrt((expected**2).sum(-1, keepdims=True))
    along = np.where(length > 0, expected / np.where(length > 0, length, 1), 0)
    error = part * limits.UNIT["bfloat16"] * _size(truth, "dq")[..., None] * along
    got = (expected + error).astype(CASE.storage)
    verdicts = compare(truth, "dq", got, Registry()).verdicts
    return {one.rule: one.ratio / one.limit for one in verdicts if one.limit}


@pytest.mark.parametrize("part", [0.5, 1.5, 1.9, 2.6])
def test_a_single_row_is_judged_as_a_row(part: float) -> None:
    found = _off(_truth(1), part)
    assert found["bias"] == pytest.approx(found["row"], rel=0.02)
    assert found["bias"] == pytest.approx(part / 2, rel=0.2)  # the result is rounded too


def test_many_rows_may_not_err_together() -> None:
    found = _off(_truth(130), 0.5)
    assert found["row"] < 1 < 2 < found["bias"]


def test_what_few_rows_may_have_more_of_falls_to_nothing() -> None:
    rows = np.array([1, 4, 16, 64, 1000])
    dq = limits.bias_scatter("dq", rows)
    np.testing.assert_allclose(dq, [2, 1 + 3 / 7, 1 + 1 / 7, 1, 1])
    np.testing.assert_array_equal(limits.bias_scatter("out", rows), 1)


def test_how_many_rows_hold_the_sum() -> None:
    rows = np.array([[3.0, 3, 3, 3], [1e300, 0, 0, 1], [0, 0, 0, 0], [1e-200, 1e-200, 0, 0]])
    np.testing.assert_allclose(_spread(rows), [4, 1, 1, 2])
