"""With ALiBi, the kit accepts rounding and rejects wrong distances, slopes and orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from cuflash import reference_heads

from ..kit import checks
from ..kit.case import STORAGE, Case
from ..kit.data import arrays, tensor
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.problem import cases
from ..kit.rounded import failing, rounded
from ..kit.runners import ApiRunner

_CASE = Case(2, 4, 2, 70, 90, 16, 16, causal=True, alibi="batch", seed=1)
_FORMS = [
    {},
    {"alibi": "heads"},
    {"softcap": 2.0},
    {"sinks": "float32", "window": "30:"},
    {"causal": False, "q_offset": 300},
]


def _of(dtype: str, **changes: Any) -> tuple[Case, dict[str, np.ndarray]]:
    """A case in which every head has a slope that matters, and its inputs."""
    case = replace(_CASE, **{**changes, "sinks": ""}, dtype=dtype)
    if "sinks" in changes:
        case = replace(case, sinks=case.statistics.name)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    slopes = np.linspace(0.5, 0.05, case.batch * case.heads_q).reshape(case.batch, -1)
    slopes[:, 1] *= -1
    return case, x | {"alibi_slopes": slopes[-1] if case.alibi == "heads" else slopes}


def _all(case: Case) -> set[str]:
    return {"out", "lse", *case.gradients}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_rounded_results_pass(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    assert not failing(case, rounded(case, x), x)
    del x["alibi_slopes"]  # then the case's own slopes are used
    assert not failing(case, rounded(case, x), x)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_another_slope_fails(dtype: str, form: dict[str, Any]) -> None:
    """The slopes are off by 3 % in 16-bit dtypes and by 1e-4 in others, or there are none."""
    case, x = _of(dtype, **form)
    factor = 1.03 if case.storage.itemsize == 2 else 1.0001
    other = {**x, "alibi_slopes": x["alibi_slopes"] * factor}
    assert failing(case, rounded(case, other), x) >= {"out", "lse", "dq", "dk", "dv"}
    none = rounded(replace(case, alibi=""), x) | {
        "dalibi_slopes": np.zeros(case.shape("dalibi_slopes"), case.statistics)
    }
    assert failing(case, none, x) >= _all(case) - {"dsinks"}


#: Wrong distances, as functions of how far key ``j`` is behind query ``i``: ``i + at - j``.
_DISTANCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "of one sign": lambda behind: behind,
    "of keys behind": lambda behind: np.maximum(behind, 0),
    "of keys ahead": lambda behind: np.maximum(-behind, 0),
    "one too far": lambda behind: np.abs(behind + 1),
    "of another offset": lambda behind: np.abs(behind - 20),
    "squared": lambda behind: behind**2,
}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("wrong", _DISTANCES)
def test_wrong_distances_fail(dtype: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are on both sides of a query: a number for all keys of a row would change no weight."""
    case, x = _of(dtype, causal=False)
    with monkeypatch.context() as patched:
        patched.setattr(
            reference_heads, "distances", lambda i, j, at: _DISTANCES[wrong](i + at - j)
        )
        got = rounded(case, x)
    assert failing(case, got, x) == _all(case)


@pytest.mark.parametrize("dtype", STORAGE)
def test_distances_before_the_cap_fail(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = _of(dtype, softcap=2.0, alibi="heads")
    x["alibi_slopes"][:] = 0.25
    away = 0.25 * case.distances()
    with monkeypatch.context() as patched:
        patched.setattr(reference_heads, "distances", lambda i, j, at: np.zeros_like(i + j))
        patched.setattr(reference_heads, "capped", lambda s, cap: cap * np.tanh((s - away) / cap))
        got = rounded(case, x)
    assert failing(case, got, x) == _all(case)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("alibi", ["heads", "batch"])
def test_slopes_of_others_fail(dtype: str, alibi: str) -> None:
    """The slopes are those of the next head, of the kv head, or of the next batch entry."""
    case, x = _of(dtype, alibi=alibi)
    slopes = x["alibi_slopes"]
    others = [np.roll(slopes, 1, axis=-1), np.repeat(slopes[..., ::2], 2, axis=-1)]
    others += [np.roll(slopes, 1, axis=0)] * (alibi == "batch")
    for other in others:
        got = rounded(case, {**x, "alibi_slopes": other})
        assert failing(case, got, x) == _all(case)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_wrong_gradients_of_slopes_fail(dtype: str, form: dict[str, Any]) -> None:
    """The gradient has the wrong sign, is off, is the next head's, is 0, or lacks the last row."""
    case, x = _of(dtype, **form)
    right = rounded(case, x)
    found = right["dalibi_slopes"]
    short = replace(case, seqlen_q=case.seqlen_q - 1, q_offset=case.offset)
    fewer = {n: a[:, :-1] if n in ("q", "dout") else a for n, a in x.items()}
    fewer["dlse"] = x["dlse"][:, :, :-1]
    factor = 1.1 if case.storage.itemsize == 2 else 1.002
    wrong = [-found, factor * found, np.roll(found, 1, axis=-1), np.zeros_like(found)]
    wrong.append(rounded(short, fewer)["dalibi_slopes"])
    for one in wrong:
        got = right | {"dalibi_slopes": one.astype(found.dtype)}
        assert failing(case, got, x) == {"dalibi_slopes"}


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_gradient_behind_the_slope_of_the_cap_fails(dtype: str) -> None:
    """Gradients of q and k include the cap's slope; the gradient of the ALiBi slopes does not."""
    case, x = _of(dtype, softcap=2.0)
    right = rounded(case, x)
    for behind in (False, True):
        wrong = _gradient(case, x, behind).astype(right["dalibi_slopes"].dtype)
        failed = failing(case, right | {"dalibi_slopes": wrong}, x)
        assert failed == ({"dalibi_slopes"} if behind else set())


def _gradient(case: Case, x: dict[str, np.ndarray], behind: bool) -> np.ndarray:
    """The gradient of the slopes by whole matrices, with the cap's slope or without it."""
    named = {name: case.heads_first(name, x[name]).astype(np.longdouble) for name in x}
    q, dout, dlse = (named[name] for name in ("q", "dout", "dlse"))
    k, v = (np.repeat(named[name], case.group, axis=1).swapaxes(-1, -2) for name in "kv")
    scores, away = case.softcap * np.tanh(case.factor * (q @ k) / case.softcap), case.distances()
    lost = named["alibi_slopes"][..., None, None] * away
    p = np.exp(np.where(case.sees(), scores - lost, -np.inf))
    p /= p.sum(axis=-1, keepdims=True)
    delta = (dout * (p @ v.swapaxes(-1, -2))).sum(axis=-1) - dlse
    dz = p * (dout @ v - delta[..., None])
    slopes = 1 - (scores / case.softcap) ** 2 if behind else 1
    return -(away * dz * slopes).sum(axis=(2, 3))


def test_a_case_with_slopes_is_read_back() -> None:
    for alibi in ("heads", "batch"):
        case = replace(_CASE, alibi=alibi, sinks="float32")
        assert Case.parse(case.repro) == case
        assert case.repro.endswith(f"alibi={alibi}")
        assert case.gradients == ("dq", "dk", "dv", "dalibi_slopes", "dsinks")
        shape = {"heads": (4,), "batch": (2, 4)}[alibi]
        assert case.shape("alibi_slopes") == case.shape("dalibi_slopes") == shape
        assert tensor(case, "alibi_slopes").shape == shape
    with pytest.raises(ValueError, match="no such case"):
        replace(_CASE, alibi="yes")


def test_every_kind_is_drawn() -> None:
    drawn: list[Case] = []
    strategy = cases("float16", 8, causal=False, tile=(16, 24), alibis=("", "heads", "batch"))

    @settings(max_examples=400, database=None, derandomize=True, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    assert {case.alibi for case in drawn} == {"", "heads", "batch"}
    far = [case for case in drawn if abs(case.offset) > case.seqlen_q + case.seqlen_kv + 1]
    assert far
    assert all(case.alibi for case in far)


def test_slopes_are_of_every_kind() -> None:
    slopes = tensor(Case(batch=20, heads_q=20, heads_kv=20, alibi="batch"), "alibi_slopes")
    assert slopes.dtype == np.float32
    for kind in (slopes == 0, slopes < 0, slopes == 4, (slopes > 0) & (slopes < 0.01)):
        assert 0 < kind.sum() < slopes.size / 2


@pytest.mark.parametrize("alibi", ["heads", "batch"])
@pytest.mark.parametrize("window", ["", "40:20"])
def test_what_is_not_finite_reaches_the_slopes_of_its_heads(alibi: str, window: str) -> None:
    case = Case(2, 4, 2, 70, 90, 16, 16, window=window, alibi=alibi, sinks="float32", seed=1)
    runner = ApiRunner("numpy", "fa2")
    for name, value in SPOILED:
        one = spoiled(case, name, value, 0.5, 64)
        x = one.x
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        got = dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))
        one.check(got)
        got["dalibi_slopes"] = np.zeros_like(got["dalibi_slopes"])
        with pytest.raises(AssertionError, match="dalibi_slopes with"):
            one.check(got)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_checks_pass(dtype: str, form: dict[str, Any]) -> None:
    case, _ = _of(dtype, **form)
    rules = [verdict.rule for verdict in checks.run_checks(ApiRunner("numpy", "fa1"), case)]
    assert rules[0] == "census"
    assert ("one_hot" in rules) == (not case.sinks and not case.softcap)
    checks.require(case, checks.run_checks(ApiRunner("numpy", "fa2"), case))
