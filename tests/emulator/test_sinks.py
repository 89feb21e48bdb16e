"""Attention sinks on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays, tensor
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import SUNK
from .rows import Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(
    row: Row, case: Case, x: dict[str, np.ndarray], **sinks: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes, by name; by default with the sinks of the case."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], **sinks)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = row.runner.backward(case, *given, **sinks)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


@pytest.mark.parametrize("row", params(*SUNK))
def test_against_float64(row: Row) -> None:
    # A block of the sinks' gradient has 1024 threads, and each thread takes several rows at a time.
    tall = Case(2, 2, 1, 1030, 70, *row.dims, row.dtype, causal=row.causal, sinks=row.sinks)
    for case in (*row.cases(), tall):
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        truth = judge(case, x)
        for name, got in _results(row, case, x).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*SUNK))
def test_a_sink_far_above_the_scores(row: Row) -> None:
    """The sink leaves a small factor of each row."""
    case = replace(row.cases()[0], values="positive_v")
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    sinks = np.full(case.heads_q, 20, case.dtype_of("sinks"))
    truth = judge(case, {**x, "sinks": sinks})
    for name, got in _results(row, case, x, sinks=sinks).items():
        compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*SUNK))
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*SUNK))
def test_a_sink_of_minus_infinity_is_none(row: Row) -> None:
    """Results have the same bits as without sinks; so have gradients that are summed in order."""
    case = row.cases()[0]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    none = np.full(case.heads_q, -np.inf, case.dtype_of("sinks"))
    expected = _results(row, replace(case, sinks=""), x)
    got = _results(row, case, x, sinks=none)
    assert (got.pop("dsinks") == 0).all()
    for name, array in got.items():
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("row", params(*(row for row in SUNK if row.causal or row.window)))
def test_rows_that_see_no_key_are_their_sink(row: Row) -> None:
    """Their inputs reach no gradient, except their dlse, which reaches the gradient of sinks."""
    case = replace(row.cases()[0], strides=Case().strides)
    case = replace(case, q_offset=case.seqlen_kv - 40 if row.window == "left" else -60)
    dead = case.visible() == 0
    assert dead.any()
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    expected, truth = _results(row, case, x), judge(case, x)
    x["q"][:, dead], x["dout"][:, dead] = np.nan, np.inf
    for name, got in _results(row, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
    assert (expected["out"][:, dead] == 0).all()
    assert (expected["dq"][:, dead] == 0).all()
    compare(truth, "lse", expected["lse"]).check()


@pytest.mark.parametrize("row", params(*SUNK))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sink_that_is_not_finite_comes_out_of_its_head_alone(row: Row, bad: float) -> None:
    case = replace(row.cases()[0], strides=Case().strides)
    x = arrays(case, "q", "k", "v")
    sinks = tensor(case, "sinks")
    sinks[1] = bad
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], sinks=sinks)
    seen = case.visible() > 0
    assert np.isnan(out[:, seen, 1].astype(np.float64)).all()
    assert (out[:, ~seen] == 0).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(np.delete(out, 1, axis=2).astype(np.float64)).all()
    assert not np.isnan(np.delete(lse, 1, axis=1)).any()


@pytest.mark.parametrize("row", params(*(row for row in SUNK if not row.window)))
def test_one_query_that_is_not_finite_comes_out(row: Row) -> None:
    """A score of NaN does not exceed the reference; still the row is not dead."""
    sizes = (1, 2, 1, 70, 100, *row.dims, row.dtype)
    case = Case(*sizes, causal=row.causal, q_offset=0, sinks=row.sinks, seed=1)
    for name, value in SPOILED:
        if name in ("q", "v"):
            one = spoiled(case, name, value, 0.5, 256)
            one.check(_results(row, case, one.x))
