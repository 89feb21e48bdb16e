"""With dropout, the kit accepts rounding and rejects wrong pairs, factors and positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cuflash import reference_heads

from ..kit import checks
from ..kit.case import STORAGE, Case
from ..kit.compare import Registry, compare
from ..kit.data import arrays
from ..kit.dropped import left_of
from ..kit.limits import UNIT
from ..kit.oracle import judge
from ..kit.plain import plain
from ..kit.rounded import failing, rounded
from ..kit.runners import ApiRunner

_CASE = Case(2, 4, 2, 90, 90, 16, 16, dropout="0.3", seed=1)
_FORMS: list[dict[str, Any]] = [
    {},
    {"dropout": "0.5:4", "softcap": 2.0},
    {"dropout": "0.9:2", "window": "60:20"},
    {"dropout": "0.1", "causal": True, "sinks": "float32"},
    {"bias": "1hqk", "alibi": "heads", "mask": "b1qk"},
]
_of_dtypes = pytest.mark.parametrize("dtype", STORAGE)
_OF_WEIGHTS = {"out", "dq", "dk", "dv"}


def _of(dtype: str, **changes: Any) -> tuple[Case, dict[str, np.ndarray]]:
    """A case and its inputs."""
    case = replace(_CASE, **{**changes, "sinks": ""}, dtype=dtype)
    if "sinks" in changes:
        case = replace(case, sinks=case.statistics.name)
    return case, arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_rounded_results_pass(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    assert not failing(case, rounded(case, x), x)
    x.pop("dropout_seed", None)  # then the case's own seed is used
    assert not failing(case, rounded(case, x), x)


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_other_pairs_fail(dtype: str, form: dict[str, Any]) -> None:
    """Pairs are dropped by another seed, or none are dropped; lse does not show another seed."""
    case, x = _of(dtype, **form)
    words = np.array([1, 2, 3, 4], np.uint32)
    failed = failing(case, rounded(case, x, dropout_seed=words), x)
    assert failed >= _OF_WEIGHTS
    assert "lse" not in failed
    none = {"dropout_p": None, "dropout_seed": None}
    assert failing(case, rounded(case, x, **none), x) >= _OF_WEIGHTS


@_of_dtypes
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_passes_that_drop_different_pairs_fail(dtype: str, part: str) -> None:
    """One pass drops nothing, and the results of the other pass are right."""
    case, x = _of(dtype)
    right = rounded(case, x)
    wrong = rounded(case, x, dropout_p=None, dropout_seed=None)
    names = {"out"} if part == "forward" else {"dq", "dk", "dv"}
    got = {name: wrong[name] if name in names else right[name] for name in right}
    assert failing(case, got, x) == names


def _changed(case: Case, x: dict[str, np.ndarray], change: Any) -> set[str]:
    """The results that fail after ``change`` is applied to the factors of the weights."""
    own = reference_heads.dropped

    def dropped(p: float, seed: Any, head: int, *sizes: Any) -> np.ndarray:
        return np.asarray(change(own(p, seed, head, *sizes)))

    with mock.patch.object(reference_heads, "dropped", dropped):
        got = rounded(case, x)
    return failing(case, got, x)


@_of_dtypes
def test_a_share_that_is_wrong_fails(dtype: str) -> None:
    """Weights are divided by 1, by the dropped share, or by a share that is off or not rounded."""
    case, x = _of(dtype)
    for factor in (0.7, 0.7 / 0.3, 1.02):
        failed = _changed(case, x, lambda left, factor=factor: left * factor)
        assert failed >= {"out", "dv"}, factor
    if dtype in ("float32", "float64"):
        failed = _changed(case, x, lambda left: (left != 0) / 0.7)
        assert failed >= {"out", "dv"}


@_of_dtypes
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("step", [1, 2, 8, 16])
def test_pairs_of_a_neighbour_fail(dtype: str, axis: int, step: int) -> None:
    case, x = _of(dtype)
    assert _changed(case, x, lambda left: np.roll(left, step, axis=axis)) >= _OF_WEIGHTS


@_of_dtypes
def test_pairs_turned_about_fail(dtype: str) -> None:
    """Rows and columns are exchanged, for all pairs or within one block."""
    case, x = _of(dtype)
    assert _changed(case, x, np.transpose) >= _OF_WEIGHTS

    def turned(left: np.ndarray) -> np.ndarray:
        left[16:32, 32:48] = left[16:32, 32:48].T
        return left

    assert _changed(case, x, turned) >= _OF_WEIGHTS


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_what_one_writes_in_numpy_drops(form: dict[str, Any], step: int) -> None:
    """The NumPy code that sets the allowed errors drops the right pairs, in both of its orders."""
    case, x = _of("float64", **form)
    found = plain(case, {name: x[name] for name in x}, step)
    exact = rounded(case, x)
    for name in ("out", "lse", "dq", "dk", "dv"):
        got = case.heads_first(name, exact[name])
        np.testing.assert_allclose(found[name], got, rtol=1e-9, atol=1e-10)


def test_a_case_that_drops_is_read_back() -> None:
    for dropout in ("0.1", "0.5:2", "0.25:4"):
        case = replace(_CASE, dropout=dropout, sinks="float32")
        assert Case.parse(case.repro) == case
        assert case.repro.endswith(f"dropout={dropout}")
        assert case.gradients == ("dq", "dk", "dv", "dsinks")
        assert case.dropout_p == float(dropout[:4].removesuffix(":"))
        words = dropout.partition(":")[2]
        assert ("dropout_seed" in case.operands) == bool(words)
        assert ("dropout_seed" in case.options) != bool(words)
        if words:
            assert case.dropout_seed.shape == case.shape("dropout_seed") == (int(words),)
            assert case.dropout_seed.dtype == case.dtype_of("dropout_seed") == np.uint32
        else:
            assert 2**32 < case.dropout_seed < 2**64
    assert replace(_CASE, seed=2).dropout_seed != _CASE.dropout_seed


def test_a_seed_among_the_inputs_takes_the_place_of_the_case() -> None:
    case = replace(_CASE, dropout="0.3:2")
    own = left_of(case, {}, 1, 2)
    np.testing.assert_array_equal(left_of(case, {"dropout_seed": case.dropout_seed}, 1, 2), own)
    other = left_of(case, {"dropout_seed": case.dropout_seed + np.uint32(1)}, 1, 2)
    assert not np.array_equal(other, own)
    assert (left_of(replace(case, dropout=""), {}, 1, 2) == 1).all()


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_checks_pass(dtype: str, form: dict[str, Any]) -> None:
    case, _ = _of(dtype, **form)
    for algorithm in ("fa1", "fa2"):
        verdicts = checks.run_checks(ApiRunner("numpy", algorithm), case)
        rules = [verdict.rule for verdict in verdicts]
        assert rules[0] == "census"
        assert "one_hot" not in rules
        assert "sum_dv" not in rules
        checks.require(case, verdicts)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_census_tells_pairs_of_another_seed(dtype: str) -> None:
    case, _ = _of(dtype)

    class Other(ApiRunner):
        def forward(self, case: Case, *arrays: np.ndarray, **beside: Any) -> Any:
            return super().forward(replace(case, seed=case.seed + 1), *arrays, **beside)

    assert checks.census(ApiRunner("numpy", "fa2"), case).passed
    assert not checks.census(Other("numpy", "fa2"), case).passed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_of_one_key_no_error_has_a_side(dtype: str) -> None:
    """With one key, dS is 0. Float64 leaves a remainder, and a rounded output a larger one."""
    sizes = []
    for seed in range(12):
        case = Case(1, 1, 1, 1, 1, 64, 64, dtype, dropout="0.1", seed=seed)
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        x["dlse"][:] = 0
        truth, key = judge(case, x), x["k"].astype(np.float64)
        along = key / np.linalg.norm(key) * truth.model["dq"].item() * UNIT[dtype]
        if left_of(case, x, 0, 0) == 0:
            continue
        sizes.append(np.abs(truth.results["dq"]).max() / np.abs(along).max())
        for share in (1.5, -1.5, 2.5):
            got = (share * along).astype(case.storage)
            assert compare(truth, "dq", got, Registry()).passed == (abs(share) < 2)
    assert 0 < max(sizes) < 1e-9


def test_columns_of_one_number_are_rounded_alike() -> None:
    """If all columns of an output are equal, delta has the error of one times their number."""
    case = Case(1, 1, 1, 1, 31, 64, 64, "float16", layout="sd", values="equal", dropout="0.1")
    x, runner = arrays(case, "q", "k", "v", "dout"), ApiRunner("numpy", "fa1")
    truth = judge(case, x)
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    _, dk, _ = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse)
    assert compare(truth, "dk", dk, Registry()).passed
    assert not compare(truth, "dk", (1.05 * dk).astype(dk.dtype), Registry()).passed


@pytest.mark.parametrize(
    "problem", [(1, 1, 1, 1, 8000, 64, 64, "float16"), (1, 1, 1, 303, 1, 64, 64, "float16")]
)
def test_sums_of_dk_are_off_by_what_rows_have_in_common(problem: Any) -> None:
    """float16 loses part of dS under dropout; with one key, all rows have the same output."""
    for seed in range(0, 24, 3):
        case = Case(*problem, dropout="0.5:4" if problem[3] == 1 else "0.1", seed=seed)
        verdicts = checks.run_checks(ApiRunner("numpy", "fa1"), case)
        assert all(verdict.passed for verdict in verdicts)
        off = next(verdict for verdict in verdicts if verdict.rule == "sum_dk")
        assert off.ratio < 0.5
