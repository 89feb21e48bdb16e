"""With used lengths, the kit accepts rounding and rejects wrong lengths and positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ..kit import checks
from ..kit.case import STORAGE, Case
from ..kit.data import arrays, tensor
from ..kit.plain import plain
from ..kit.poisoned import without
from ..kit.rounded import failing, rounded
from ..kit.runners import RUNNERS

_CASE = Case(3, 4, 2, 90, 120, 16, 16, causal=True, used="90,37,70/120,100,33", seed=1)
_FORMS: list[dict[str, Any]] = [
    {},
    {"causal": False, "window": "40:20", "softcap": 2.0},
    {"causal": False, "alibi": "batch"},
    {"bias": "bhqk", "sinks": "yes"},
    {"bias": "11qk", "mask": "bhqk"},
    {"q_offset": 70, "dropout": "0.3"},
]
_of_dtypes = pytest.mark.parametrize("dtype", STORAGE)


def _of(dtype: str, **changes: Any) -> tuple[Case, dict[str, np.ndarray]]:
    """A case and its inputs."""
    case = replace(_CASE, **{**changes, "sinks": ""}, dtype=dtype)
    if "sinks" in changes:
        case = replace(case, sinks=case.statistics.name)
    return case, arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)


def _results(case: Case, x: dict[str, np.ndarray], **wrong: Any) -> dict[str, np.ndarray]:
    """Right results, which do not depend on rows that do not count; or wrong ones."""
    of_others = any(name in wrong for name in ("seqused_q", "seqused_kv", "q_offset"))
    return rounded(case, x if of_others else without(case, x), **wrong)


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_rounded_results_pass(dtype: str, form: dict[str, Any]) -> None:
    """The contents of rows that do not count do not matter."""
    case, x = _of(dtype, **form)
    assert not failing(case, _results(case, x), x)


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv"])
def test_a_row_more_or_less_fails(dtype: str, form: dict[str, Any], name: str) -> None:
    case, x = _of(dtype, **form)
    for step in (-1, 1):
        lengths = x[name] + np.array([0, step, 0], np.int32)
        failed = failing(case, _results(case, x, **{name: lengths}), x)
        assert failed >= {"out", "lse", "dq"}, step
    for lengths in (np.roll(x[name], 1), x[name] * 0 + 1000):
        assert failing(case, _results(case, x, **{name: lengths}), x) >= {"out", "lse", "dk"}


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS[:3], ids=str)
def test_another_place_of_query_0_fails(dtype: str, form: dict[str, Any]) -> None:
    """Query 0 is placed by the arrays' lengths, at the first key, or one key off."""
    case, x = _of(dtype, **form)
    for q_offset in (30, 0, 64):  # the entries' own offsets are 30, 63 and -37
        wrong = _results(case, x, q_offset=q_offset)
        assert failing(case, wrong, x) >= {"out", "lse", "dq", "dk", "dv"}


@_of_dtypes
def test_a_row_that_does_not_count_has_no_sink(dtype: str) -> None:
    """A row that counts but sees no key has its sink as lse."""
    case, x = _of(dtype, sinks="yes")
    got = _results(case, x)
    queries = ~case.queries_count()
    got["lse"].swapaxes(1, 2)[queries] = x["sinks"].astype(got["lse"].dtype)
    assert failing(case, got, x) == {"lse"}
    got = _results(case, x)
    got["dsinks"] = got["dsinks"] + x["dlse"].swapaxes(1, 2)[queries].sum(axis=0)
    got["dsinks"] = got["dsinks"].astype(case.dtype_of("dsinks"))
    assert failing(case, got, x) == {"dsinks"}


@_of_dtypes
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dbias"])
def test_what_is_left_in_a_row_that_does_not_count_fails(dtype: str, name: str) -> None:
    case, x = _of(dtype, bias="bhqk")
    right = _results(case, x)
    for left in (np.nan, 1e-3):
        got = {**right, name: right[name].copy()}
        place = (1, 2, 89, 119) if name == "dbias" else (1, -1, 0, 3)
        got[name][place] = left
        assert failing(case, got, x) == {name}


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_what_one_writes_in_numpy_has_the_lengths(form: dict[str, Any], step: int) -> None:
    case, x = _of("float64", **{n: v for n, v in form.items() if n != "sinks"})
    found = plain(case, x, step)
    exact = _results(case, x, dtype=np.float64)
    for name in ("out", "lse", "dq", "dk", "dv"):
        got = case.heads_first(name, exact[name])
        np.testing.assert_allclose(found[name], got, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_poison_is_where_nothing_counts(layout: str) -> None:
    case = replace(_CASE, layout=layout, bias="1hqk", mask="b11k", sinks="float32")
    x = arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)
    changed = without(case, x)
    for name, rows in {"q": (90, 37, 70), "dout": (90, 37, 70), "k": (120, 100, 33)}.items():
        found = np.isnan(case.heads_first(name, changed[name]))
        for entry, count in enumerate(rows):
            assert not found[entry, :, :count].any()
            assert found[entry, :, count:].all()
    assert np.isnan(changed["dlse"][1, :, 37:]).all()
    assert not np.isnan(changed["bias"]).any()  # every pair counts in the first entry
    assert changed["mask"][2, :, :, 33:].all()
    assert changed["sinks"] is x["sinks"]
    few = replace(case, used="30,37,20/40,100,33")
    hidden = np.isnan(without(few, x)["bias"])
    assert hidden[0, 0, 36].sum() == 20
    assert hidden[0, 0, 25].sum() == 20
    assert hidden[0, 0, 37].all()


class _Wrong:
    """A backend that computes the position of query 0 from the lengths of the arrays."""

    backend = "numpy"

    def forward(self, case: Case, *x: np.ndarray, **beside: np.ndarray) -> Any:
        return RUNNERS["numpy", "fa2"].forward(self._of(case), *x, **beside)

    def backward(self, case: Case, *x: np.ndarray, **beside: np.ndarray) -> Any:
        return RUNNERS["numpy", "fa2"].backward(self._of(case), *x, **beside)

    def _of(self, case: Case) -> Case:
        return replace(case, q_offset=case.seqlen_kv - case.seqlen_q)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_checks_without_a_reference_see_another_place(dtype: str) -> None:
    case, _ = _of(dtype)
    assert all(v.passed for v in checks.run_checks(RUNNERS["numpy", "fa2"], case))
    failed = {v.rule for v in checks.run_checks(_Wrong(), case) if not v.passed}
    assert failed >= {"census", "one_hot"}


def test_a_case_with_lengths_is_read_back() -> None:
    for used in ("q", "k", "qk", "1,2,-3/", "/1,2,3", "1,2,3/4,5,2147483647"):
        case = replace(_CASE, used=used, sinks="float32")
        assert Case.parse(case.repro) == case
        names = [name for name in case.operands if name != "sinks"]
        assert names == ["seqused_q"] * (used[0] != "k" and used[0] != "/") + ["seqused_kv"] * (
            used[-1] == "k" or (used[-1] != "/" and "/" in used)
        )
        assert case.gradients == ("dq", "dk", "dv", "dsinks")
        for name in names:
            found = tensor(case, name)
            assert (case.shape(name), found.shape, found.dtype) == ((3,), (3,), np.int32)
    for wrong in ("kq", "b", "1,2/", "/1,2,3,4", "1,2,3", "1,2,3/4,5,6/7"):
        with pytest.raises(ValueError, match=r"no such|zip|invalid"):
            replace(_CASE, used=wrong)


def test_lengths_are_of_every_kind() -> None:
    """Lengths of many entries are negative, 0, the whole array, more than that, and in between."""
    case = Case(200, 1, 1, 90, 120, used="qk", seed=0)
    for name, rows in (("seqused_q", 90), ("seqused_kv", 120)):
        found = tensor(case, name)
        for kind in (
            found < 0,
            found == 0,
            found == rows,
            found > rows,
            (found > 0) & (found < rows),
        ):
            assert kind.sum() >= 5
