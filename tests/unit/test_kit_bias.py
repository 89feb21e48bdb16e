"""With a bias, the kit accepts rounding and rejects wrong numbers, positions, orders and sums."""

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

_CASE = Case(2, 4, 2, 70, 90, 16, 16, causal=True, bias="bhqk", seed=1)
_FORMS: list[dict[str, Any]] = [
    {},
    {"bias": "1hqk", "softcap": 2.0},
    {"bias": "11qk", "window": "30:"},
    {"bias": "bh1k"},
    {"bias": "k", "sinks": "float32", "causal": False},
    {"bias": "bhq1"},
    {"bias": "b111", "alibi": "heads"},
    {"bias": "b1qk-inf", "causal": False},
]
#: Forms that differ from key to key: a bias that is the same for all keys changes only lse.
_OF_KEYS = [form for form in _FORMS if "k" in form.get("bias", "bhqk")]


def _of(dtype: str, **changes: Any) -> tuple[Case, dict[str, np.ndarray]]:
    """A case and its inputs."""
    case = replace(_CASE, **{**changes, "sinks": ""}, dtype=dtype)
    if "sinks" in changes:
        case = replace(case, sinks=case.statistics.name)
    return case, arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)


def _all(case: Case) -> set[str]:
    return {"out", "lse", *case.gradients}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_rounded_results_pass(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    assert not failing(case, rounded(case, x), x)
    del x["bias"]  # then the case's own bias is used
    assert not failing(case, rounded(case, x), x)


@pytest.mark.parametrize("bias", ["1hqk:float32", "b11k:float32", "q1:float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_bias_of_float32_is_rounded_to_it(dtype: str, bias: str) -> None:
    """The gradient is rounded to float32: little in 16 bits, nearly the whole error in float64."""
    case, x = _of(dtype, bias=bias)
    got = rounded(case, x)
    assert got["dbias"].dtype == np.float32
    assert not failing(case, got, x)
    if dtype == "float64":
        coarse = got | {"dbias": got["dbias"] * np.float32(1 + 2**-20)}
        assert failing(case, coarse, x) == {"dbias"}


#: Wrong ways to read the bias.
_OTHERS: dict[str, Callable[[Case, np.ndarray], np.ndarray]] = {
    "none": lambda case, bias: np.zeros_like(bias),
    "of the other sign": lambda case, bias: -bias,
    "scaled": lambda case, bias: (bias * case.factor).astype(bias.dtype),
    "of the next key": lambda case, bias: np.roll(bias, 1, axis=-1),
    "off": lambda case, bias: bias + np.float32(0.03) * np.arange(bias.shape[-1]).astype("f") / 9,
}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", [one for one in _OF_KEYS if "-inf" not in str(one)], ids=str)
def test_another_bias_fails(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    for name, other in _OTHERS.items():
        wrong = other(case, x["bias"]).astype(x["bias"].dtype)
        failed = failing(case, rounded(case, {**x, "bias": wrong}), x)
        assert failed >= {"out", "lse", "dq", "dk", "dv", "dbias"}, name


@pytest.mark.parametrize("dtype", STORAGE)
def test_numbers_of_others_fail(dtype: str) -> None:
    """The bias is that of the next entry, head or row, or of the kv head.

    Two other wrong ones have rows that are shifted by the offset, or reversed rows.
    """
    case, x = _of(dtype, causal=False, seqlen_q=70, seqlen_kv=90)
    bias = x["bias"]
    of_kv = np.repeat(bias[:, :2], 2, axis=1)
    others = [np.roll(bias, 1, axis=axis) for axis in (0, 1, 2)]
    others += [of_kv, np.roll(bias, -case.offset, axis=2), bias[:, :, ::-1]]
    for other in others:
        assert failing(case, rounded(case, {**x, "bias": other}), x) == _all(case)


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_bias_of_all_keys_that_is_wrong_shows_in_lse(dtype: str) -> None:
    for form in ({"bias": "bhq1"}, {"bias": "b111"}):
        case, x = _of(dtype, **form)
        other = np.roll(x["bias"], 1, axis=0)
        assert "lse" in failing(case, rounded(case, {**x, "bias": other}), x)


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_bias_before_the_cap_fails(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = _of(dtype, softcap=2.0, bias="qk")
    bias = x["bias"].astype(np.longdouble)
    with monkeypatch.context() as patched:
        patched.setattr(reference_heads, "capped", lambda s, cap: cap * np.tanh((s + bias) / cap))
        got = rounded(case, {**x, "bias": np.zeros_like(x["bias"])})
    assert failing(case, got, x) == _all(case)


def _tile(array: np.ndarray, size: int) -> tuple[slice, ...]:
    """The second tile of the last head of the last entry."""
    return (*(slice(-1, None) for _ in array.shape[:-2]), slice(size, 2 * size), slice(0, size))


#: Wrong gradients, as functions of the right one and of a relative error.
_WRONG: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "of the other sign": lambda found, _: -found,
    "off": lambda found, off: found * (1 + off),
    "half as large": lambda found, _: found / 2,
    "none": lambda found, _: np.zeros_like(found),
    "of the next head": lambda found, _: np.roll(found, 1, axis=1),
    "of the next entry": lambda found, _: np.roll(found, 1, axis=0),
    "of the next row": lambda found, _: np.roll(found, 1, axis=-2),
    "of the next key": lambda found, _: np.roll(found, 1, axis=-1),
}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_a_wrong_gradient_fails(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    right = rounded(case, x)
    found, off = right["dbias"], 0.1 if case.storage.itemsize == 2 else 0.002
    for name, wrong in _WRONG.items():
        whole = found.reshape((1,) * (4 - found.ndim) + found.shape)
        shown = wrong(whole, off).astype(found.dtype).reshape(found.shape)
        if np.array_equal(shown, found):
            continue  # the change is along a broadcast axis
        assert failing(case, right | {"dbias": shown}, x) == {"dbias"}, name


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "11qk", "qk"])
def test_one_wrong_number_or_tile_fails(dtype: str, bias: str) -> None:
    """One number of a tile is wrong, or a tile is transposed, left out or added twice."""
    case, x = _of(dtype, causal=False, bias=bias)
    right = rounded(case, x)
    found = right["dbias"]
    tile = _tile(found, 16)
    turned, left_out, twice, one = (found.copy() for _ in range(4))
    turned[tile] = found[tile].swapaxes(-1, -2)
    left_out[tile] = 0
    twice[tile] = 2 * found[tile]
    place = np.unravel_index(np.argmax(np.abs(found[tile])), found[tile].shape)
    one[tile][place] *= np.float32(1.1)
    for wrong in (turned, left_out, twice, one):
        assert failing(case, right | {"dbias": wrong}, x) == {"dbias"}


def _gradient(case: Case, x: dict[str, np.ndarray], with_delta: bool, slopes: bool) -> np.ndarray:
    """The gradient of every pair by whole matrices, with or without delta and the cap's slope."""
    named = {n: case.heads_first(n, x[n]).astype(np.longdouble) for n in x}
    q, dout, dlse = (named[name] for name in ("q", "dout", "dlse"))
    k, v = (np.repeat(named[name], case.group, axis=1).swapaxes(-1, -2) for name in "kv")
    scores = case.factor * (q @ k)
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    p = np.exp(np.where(case.sees(), scores + named["bias"], -np.inf))
    p /= p.sum(axis=-1, keepdims=True)
    delta = (dout * (p @ v.swapaxes(-1, -2))).sum(axis=-1) - dlse
    dz = p * (dout @ v - (delta[..., None] if with_delta else 0))
    return dz * (1 - (scores / case.softcap) ** 2) if slopes else dz


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "bh1k", "b111", "bhq1"])
def test_a_gradient_of_something_else_fails(dtype: str, bias: str) -> None:
    """The gradient lacks delta, has the cap's slope, or is summed over the wrong axes."""
    case, x = _of(dtype, softcap=2.0, bias=bias)
    right, shape = rounded(case, x), case.shape("bias")

    def summed(pairs: np.ndarray) -> np.ndarray:
        over = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return pairs.sum(axis=over, keepdims=True).astype(right["dbias"].dtype)

    good = summed(_gradient(case, x, True, False))
    assert not failing(case, right | {"dbias": good}, x)
    whole = _gradient(case, x, True, False)
    wrong = [_gradient(case, x, False, False), _gradient(case, x, True, True)]
    others = [summed(one) for one in wrong]
    if bias == "1hqk":
        others.append(whole.sum(axis=1, keepdims=True).repeat(4, axis=1).sum(axis=0, keepdims=True))
        others.append(whole[:1])  # of one entry alone
        others.append(whole.mean(axis=0, keepdims=True))
    if bias == "bh1k":
        others.append(whole[:, :, -1:])  # of one row
        others.append(whole[:, :, :64].sum(axis=2, keepdims=True))  # of one tile
        others.append(whole[:, [0, 0, 2, 2]].sum(axis=2, keepdims=True))  # of kv heads
    for other in others:
        got = right | {"dbias": other.astype(right["dbias"].dtype)}
        assert failing(case, got, x) == {"dbias"}


def test_a_case_with_a_bias_is_read_back() -> None:
    for bias in ("bhqk", "1h1k", "qk:float32", "b111-inf", "k:float32-inf", "1"):
        case = replace(_CASE, bias=bias, sinks="float32", alibi="heads")
        assert Case.parse(case.repro) == case
        assert case.repro.endswith(f"bias={bias}")
        assert case.gradients == ("dq", "dk", "dv", "dalibi_slopes", "dbias", "dsinks")
        sizes = {"b": 2, "h": 4, "q": 70, "k": 90, "1": 1}
        shape = tuple(sizes[axis] for axis in case.bias_axes)
        assert case.shape("bias") == case.shape("dbias") == shape
        found = tensor(case, "bias")
        assert (found.shape, found.dtype) == (shape, case.dtype_of("bias"))
        assert (bias.endswith("-inf") and found.size > 9) <= (found == -np.inf).any()
    for wrong in ("qb", "hk", "bhqk1", "qq", "qk:float8"):
        with pytest.raises((ValueError, KeyError)):
            _ = replace(_CASE, bias=wrong).dtype_of("bias")


def test_every_kind_and_all_strides_are_drawn() -> None:
    drawn: list[Case] = []
    kinds = ("", "bhqk", "1h1k", "qk:float32")
    strategy = cases("float16", 8, causal=False, tile=(16, 24), biases=kinds)

    @settings(max_examples=200, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    assert {case.bias for case in drawn} == {*kinds}
    recipes = [replace(_CASE, seed=seed).recipe("bias") for seed in range(100)]
    assert any(recipe.flipped for recipe in recipes)
    assert any(recipe.order not in ((), (0, 1, 2, 3)) for recipe in recipes)
    assert any(any(recipe.gaps) for recipe in recipes)
    assert any(recipe == type(recipe)() for recipe in recipes)


@pytest.mark.parametrize("bias", ["bhqk", "1h1k", "bhq1", "b111"])
@pytest.mark.parametrize("window", ["", "40:20"])
def test_what_is_not_finite_reaches_the_bias_of_its_pairs(bias: str, window: str) -> None:
    case = Case(2, 4, 2, 70, 90, 16, 16, window=window, bias=bias, sinks="float32", seed=1)
    runner = ApiRunner("numpy", "fa2")
    for name, value in SPOILED:
        one = spoiled(case, name, value, 0.5, 64)
        x = one.x
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        got = dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))
        one.check(got)
        got["dbias"] = np.zeros_like(got["dbias"])
        with pytest.raises(AssertionError, match="dbias with"):
            one.check(got)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_checks_pass(dtype: str, form: dict[str, Any]) -> None:
    case, _ = _of(dtype, **form)
    rules = [verdict.rule for verdict in checks.run_checks(ApiRunner("numpy", "fa1"), case)]
    assert rules[0] == "census"
    checks.require(case, checks.run_checks(ApiRunner("numpy", "fa2"), case))
