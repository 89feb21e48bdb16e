"""Dead rows add to no gradient and have gradient zero, whatever they or the keys hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash import reference

from ..kit.case import Case
from ..kit.data import arrays
from ..kit.runners import ApiRunner
from .sweep import DTYPES, ordered, runners, skip_unless_served

TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-10}

pytestmark = [
    pytest.mark.parametrize("runner", runners()),
    pytest.mark.parametrize("dtype", DTYPES),
]


def _both(runner: ApiRunner, case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every result by name, as float64, heads first."""
    skip_unless_served(runner, case.dtype, (case.head_dim, case.head_dim_v))
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    named = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
    return {name: case.heads_first(name, a).astype(np.float64) for name, a in named}


def _reference(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options: dict[str, Any] = {**case.options, "dtype": np.float64}
    q, k, v = (x[name] for name in "qkv")
    out, lse = reference.attention(q, k, v, **options)
    grads = reference.attention_backward(x["dout"], q, k, v, dlse=x["dlse"], **options)
    named = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
    return {name: case.heads_first(name, a) for name, a in named}


def _draw(case: Case) -> dict[str, np.ndarray]:
    return arrays(case, "q", "k", "v", "dout", "dlse")


def test_rows_before_the_mask_may_hold_anything(runner: ApiRunner, dtype: str) -> None:
    case = Case(1, 4, 2, 150, 200, 64, 64, dtype, causal=True, q_offset=-40)
    x, runner = _draw(case), ordered(runner)
    clean = _both(runner, case, x)
    x["q"][:, :40] = np.nan
    x["dout"][:, :40] = np.inf
    x["dlse"][:, :, :40] = np.nan
    got = _both(runner, case, x)
    for name, array in clean.items():
        assert np.array_equal(got[name], array), name
    assert (got["out"][:, :, :40] == 0).all()
    assert (got["dq"][:, :, :40] == 0).all()
    assert (got["lse"][:, :, :40] == -np.inf).all()


def test_dead_rows_beside_rows_that_see_nan(runner: ApiRunner, dtype: str) -> None:
    case = Case(1, 2, 2, 100, 90, 64, 64, dtype, causal=True, q_offset=-6)
    x = _draw(case)
    x["k"][:, 1], x["v"][:, 1] = np.nan, np.nan  # seen from query 7 on
    got = _both(runner, case, x)
    assert np.isnan(got["out"][:, :, 7:]).all()
    assert (got["out"][:, :, :6] == 0).all()
    assert (got["dq"][:, :, :6] == 0).all()
    assert (got["lse"][:, :, :6] == -np.inf).all()


def test_keys_of_minus_infinity_kill_every_row(runner: ApiRunner, dtype: str) -> None:
    case = Case(2, 2, 2, 100, 150, 64, 64, dtype)
    x = _draw(case)
    x["q"][..., 0] = 1
    x["k"][0, :, :, 0] = -np.inf
    x["v"][0, 70:] = np.inf
    got = _both(runner, case, x)
    for name in ("out", "dq", "dk", "dv"):
        assert (got[name][0] == 0).all(), name
        assert np.isfinite(got[name][1]).all(), name
    assert (got["lse"][0] == -np.inf).all()


@pytest.mark.parametrize("rows", [slice(3, 4), slice(60, 100)])
def test_queries_of_minus_infinity_are_dead(runner: ApiRunner, dtype: str, rows: slice) -> None:
    case = Case(1, 4, 2, 100, 150, 40, 64, dtype)
    x = _draw(case)
    x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
    x["q"][:, rows] = 0
    x["q"][:, rows, :, 0] = -np.inf
    got, expected = _both(runner, case, x), _reference(case, x)
    assert (expected["lse"][:, :, rows] == -np.inf).all()
    for name, array in expected.items():
        finite = np.isfinite(array)
        assert np.array_equal(np.isfinite(got[name]), finite), name
        error = np.abs(np.where(finite, got[name], 0) - np.where(finite, array, 0)).max()
        assert error < TOLERANCE[dtype] * max(1, np.abs(array[finite]).max()), name
    assert (got["dq"][:, :, rows] == 0).all()
