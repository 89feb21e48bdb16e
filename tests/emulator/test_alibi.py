"""ALiBi on the emulated device."""

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
from .featured_rows import ALIBI
from .rows import Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(
    row: Row, case: Case, x: dict[str, np.ndarray], **alibi: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes, by name."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], **alibi)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = row.runner.backward(case, *given, **alibi)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _inputs(case: Case) -> dict[str, np.ndarray]:
    return arrays(case, "q", "k", "v", "dout", "dlse")


@pytest.mark.parametrize("row", params(*ALIBI))
def test_against_float64(row: Row) -> None:
    far = replace(row.cases()[1], q_offset=2000 if row.causal or row.window else -2000)
    for case in (*row.cases(), far):
        x = _inputs(case)
        truth = judge(case, x)
        for name, got in _results(row, case, x).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*ALIBI))
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*ALIBI))
@pytest.mark.parametrize("slope", [3.0, -3.0])
def test_references_rise(row: Row, slope: float) -> None:
    """Scores rise by hundreds towards the diagonal, or away from it."""
    sizes = (1, 2, 1, 333, 600, *row.dims, row.dtype)
    for offset in (-20, 130) if not row.window else (130,):
        case = Case(*sizes, causal=row.causal, q_offset=offset, alibi=row.alibi, seed=4)
        case = replace(case, softcap=row.softcap, sinks=row.sinks)
        if row.window:
            case = row.windowed(replace(case, causal=False), 250, 100)
        x = _inputs(case)
        slopes = np.full(case.shape("alibi_slopes"), slope, case.statistics)
        slopes[..., 0] *= 0.3
        truth = judge(case, {**x, "alibi_slopes": slopes})
        for name, got in _results(row, case, x, alibi_slopes=slopes).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*ALIBI))
def test_slopes_of_zero_change_nothing(row: Row) -> None:
    """Slopes of zero change results only where the feature changes the order of roundings."""
    case = row.cases()[0]
    x = _inputs(case)
    none = np.zeros(case.shape("alibi_slopes"), case.statistics)
    truth = judge(replace(case, alibi=""), x)
    got = _results(row, case, x, alibi_slopes=none)
    assert np.isfinite(got.pop("dalibi_slopes")).all()
    for name, array in got.items():
        compare(truth, name, array).check()


@pytest.mark.parametrize("row", params(*ALIBI))
def test_the_gradient_of_slopes_is_the_same_every_time(row: Row) -> None:
    """Without slopes in ``wrt``, other gradients that are summed in order do not change."""
    case = row.cases()[0]
    x = _inputs(case)
    first, second = (_results(row, case, x)["dalibi_slopes"] for _ in range(2))
    assert first.tobytes() == second.tobytes()


#: Rows with small tiles, or whose mask hides nothing.
_TELLING = tuple(row for row in ALIBI if not row.filled or not (row.causal or row.window))


@pytest.mark.parametrize("row", params(*_TELLING))
@pytest.mark.parametrize("place", [0.1, 0.7])
def test_one_element_that_is_not_finite(row: Row, place: float) -> None:
    case = Case(1, 2, 1, 170, 260, *row.dims, row.dtype, causal=row.causal, seed=1)
    case = replace(case, alibi=row.alibi, softcap=row.softcap, sinks=row.sinks)
    if row.window:
        case = row.windowed(replace(case, causal=False, q_offset=-20), 40, 20)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, 64)
        one.check(_results(row, case, one.x))


@pytest.mark.parametrize("row", params(*ALIBI))
def test_dead_rows_may_hold_anything(row: Row) -> None:
    if not row.causal and not row.window:
        pytest.skip("every query sees a key without a mask")
    case = replace(row.cases()[2], strides=Case().strides)
    dead = case.visible() == 0
    assert dead.any()
    x = _inputs(case)
    expected = _results(row, case, x)
    for name in ("q", "dout"):
        case.heads_first(name, x[name])[:, :, dead] = np.nan
    for name, got in _results(row, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
