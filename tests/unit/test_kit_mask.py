"""With a boolean mask, the kit accepts rounding and rejects wrong positions and senses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from cuflash import reference

from ..kit import checks
from ..kit.case import STORAGE, Case
from ..kit.data import arrays, tensor
from ..kit.plain import plain
from ..kit.problem import cases
from ..kit.rounded import failing, rounded
from ..kit.runners import ApiRunner

#: As many queries as keys, so that a mask can be transposed.
_CASE = Case(2, 4, 2, 90, 90, 16, 16, mask="bhqk", seed=1)
_FORMS: list[dict[str, Any]] = [
    {},
    {"mask": "1hqk", "softcap": 2.0},
    {"mask": "11qk-blocks", "window": "60:20"},
    {"mask": "bh1k", "causal": True},
    {"mask": "k", "sinks": "float32"},
    {"mask": "b1qk", "bias": "1hqk"},
    {"mask": "hq1", "alibi": "heads"},
]
#: Masks that differ from key to key: others only hide entire rows.
_OF_KEYS = [form for form in _FORMS if "k" in form.get("mask", "bhqk")]
_of_dtypes = pytest.mark.parametrize("dtype", STORAGE)


def _of(dtype: str, **changes: Any) -> tuple[Case, dict[str, np.ndarray]]:
    """A case and its inputs."""
    case = replace(_CASE, **{**changes, "sinks": ""}, dtype=dtype)
    if "sinks" in changes:
        case = replace(case, sinks=case.statistics.name)
    return case, arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)


def _all(case: Case) -> set[str]:
    return {"out", "lse", *case.gradients}


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_rounded_results_pass(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    assert not failing(case, rounded(case, x), x)
    del x["mask"]  # then the case's own mask is used
    assert not failing(case, rounded(case, x), x)


#: Wrong ways to read the mask.
_OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.ones_like,
    "of the other sense": np.logical_not,
    "of the next key": lambda mask: np.roll(mask, 1, axis=-1),
    "of the key before": lambda mask: np.roll(mask, -1, axis=-1),
    "of keys eight on": lambda mask: np.roll(mask, 8, axis=-1),
    "backwards": lambda mask: mask[..., ::-1],
}


@_of_dtypes
@pytest.mark.parametrize("form", _OF_KEYS, ids=str)
def test_another_mask_fails(dtype: str, form: dict[str, Any]) -> None:
    case, x = _of(dtype, **form)
    for name, other in _OTHERS.items():
        wrong = other(x["mask"])
        assert not np.array_equal(wrong, x["mask"])
        failed = failing(case, rounded(case, {**x, "mask": wrong}), x)
        assert failed >= {"out", "lse", "dq", "dk", "dv"}, name


@_of_dtypes
def test_a_mask_of_others_fails(dtype: str) -> None:
    """The mask is that of the next entry, head or row, the kv head, or the first entry or head.

    Two other wrong ones are transposed, or have reversed rows.
    """
    case, x = _of(dtype)
    mask = x["mask"]
    others = [np.roll(mask, 1, axis=axis) for axis in (0, 1, 2)]
    others += [np.repeat(mask[:, :2], 2, axis=1), mask.swapaxes(2, 3), mask[:, :, ::-1]]
    others += [np.broadcast_to(mask[:1], mask.shape), np.broadcast_to(mask[:, :1], mask.shape)]
    for other in others:
        assert failing(case, rounded(case, {**x, "mask": other}), x) == _all(case)


@_of_dtypes
@pytest.mark.parametrize("mask", ["bhqk", "1hqk", "qk"])
def test_one_pair_or_tile_that_is_wrong_fails(dtype: str, mask: str) -> None:
    """One pair is shown or hidden, or a tile is transposed or shown."""
    case, x = _of(dtype, mask=mask)
    seen = x["mask"]
    first = (0,) * (seen.ndim - 2)
    row, weight = _likely_pair(case, x)
    tile = (*first, slice(16, 32), slice(32, 48))
    one, turned, shown = seen.copy(), seen.copy(), seen.copy()
    one[(*first, row, weight)] ^= True
    turned[tile] = seen[tile].swapaxes(-1, -2)
    shown[tile] = True
    for wrong in (one, turned, shown):
        assert not np.array_equal(wrong, seen)
        failed = failing(case, rounded(case, {**x, "mask": wrong}), x)
        assert failed >= {"out", "lse", "dq"}


def _likely_pair(case: Case, x: dict[str, np.ndarray]) -> tuple[int, int]:
    """The query and key of the first head with the largest score, in rows that see over 8 keys."""
    q, k = (case.heads_first(n, x[n])[0, 0].astype(np.float64) for n in "qk")
    own = np.broadcast_to(x["mask"], (case.batch, case.heads_q, 90, 90))[0, 0]
    scores = np.where(own.sum(axis=1, keepdims=True) > 8, q @ k.T, -np.inf)
    row, key = np.unravel_index(np.argmax(scores), scores.shape)
    return int(row), int(key)


@_of_dtypes
def test_a_mask_of_rows_that_is_wrong_shows(dtype: str) -> None:
    """A row that should see no key sees all, or the reverse."""
    case, x = _of(dtype, mask="bhq1")
    for axis in (0, 1, 2):
        other = np.roll(x["mask"], 1, axis=axis)
        assert failing(case, rounded(case, {**x, "mask": other}), x) == _all(case)


@_of_dtypes
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_pass_that_ignores_the_mask_fails(dtype: str, part: str) -> None:
    """One pass ignores the mask, and the results of the other pass are right."""
    case, x = _of(dtype)
    right = rounded(case, x)
    wrong = rounded(case, {**x, "mask": np.ones_like(x["mask"])})
    names = {"out", "lse"} if part == "forward" else {*case.gradients}
    got = {name: wrong[name] if name in names else right[name] for name in right}
    assert failing(case, got, x) == names


@_of_dtypes
def test_a_sentinel_in_place_of_minus_infinity_fails(dtype: str) -> None:
    """With a large negative number instead, a row that should see no key sees all keys."""
    case, x = _of(dtype)
    seen = np.where(x["mask"], 0, -5e4).astype(np.float64)
    options = {**case.options, "dtype": np.longdouble}
    out, lse = reference.attention(*(x[name] for name in "qkv"), bias=seen, **options)
    dead = ~x["mask"].any(axis=-1)
    assert dead.any()
    got = rounded(case, x)
    got |= {"out": out.astype(case.storage), "lse": lse.astype(case.statistics)}
    assert failing(case, got, x) == {"out", "lse"}


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_what_one_writes_in_numpy_has_the_mask(form: dict[str, Any], step: int) -> None:
    """The NumPy code that sets the allowed errors applies the mask, in both of its orders."""
    case, x = _of("float64", **form)
    found = plain(case, {name: x[name] for name in x}, step)
    exact = rounded(case, x)
    for name in ("out", "lse", "dq", "dk", "dv"):
        got = case.heads_first(name, exact[name])
        np.testing.assert_allclose(found[name], got, rtol=1e-9, atol=1e-10)


def test_a_case_with_a_mask_is_read_back() -> None:
    for mask in ("bhqk", "1h1k", "qk", "b111", "11qk-blocks", "k-blocks", "1"):
        case = replace(_CASE, mask=mask, sinks="float32", alibi="heads", bias="1hqk")
        assert Case.parse(case.repro) == case
        assert case.repro.endswith(f"mask={mask}")
        assert case.operands == ("alibi_slopes", "bias", "mask", "sinks")
        assert case.gradients == ("dq", "dk", "dv", "dalibi_slopes", "dbias", "dsinks")
        sizes = {"b": 2, "h": 4, "q": 90, "k": 90, "1": 1}
        shape = tuple(sizes[axis] for axis in case.mask_axes)
        found = tensor(case, "mask")
        assert (case.shape("mask"), found.shape, found.dtype) == (shape, shape, bool)
    for wrong in ("qb", "hk", "bhqk1", "qq", "qk:bool", "qk-inf"):
        with pytest.raises(ValueError, match=r"no such case|zip"):
            replace(_CASE, mask=wrong)


def test_masks_have_dead_rows_hidden_keys_and_whole_blocks() -> None:
    """The kit's own masks hide rows, keys and blocks, but most rows see a key."""
    seen = tensor(_CASE, "mask")
    assert 0.02 < (~seen.any(axis=-1)).mean() < 0.3
    assert (~seen.any(axis=-2)).any()
    assert 0.4 < seen.mean() < 0.7
    case = replace(_CASE, seqlen_q=256, seqlen_kv=256, mask="bhqk-blocks")
    blocks = tensor(case, "mask").reshape(2, 4, 4, 64, 4, 64).mean(axis=(3, 5))
    assert 0.1 < (blocks == 0).mean() < 0.6
    assert 0.1 < (blocks == 1).mean() < 0.6
    assert ((blocks > 0.5) & (blocks < 0.8)).any()


def test_every_kind_and_all_strides_are_drawn() -> None:
    drawn: list[Case] = []
    kinds = ("", "bhqk", "1h1k", "qk-blocks")
    strategy = cases("float16", 8, causal=False, tile=(16, 24), masks=kinds)

    @settings(max_examples=200, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    assert {case.mask for case in drawn} == {*kinds}
    recipes = [replace(_CASE, seed=seed).recipe("mask") for seed in range(100)]
    assert any(recipe.flipped for recipe in recipes)
    assert any(recipe.order not in ((), (0, 1, 2, 3)) for recipe in recipes)
    assert any(any(recipe.gaps) for recipe in recipes)
    assert any(recipe == type(recipe)() for recipe in recipes)


@_of_dtypes
@pytest.mark.parametrize("form", _FORMS, ids=str)
def test_checks_pass(dtype: str, form: dict[str, Any]) -> None:
    case, _ = _of(dtype, **form)
    rules = [verdict.rule for verdict in checks.run_checks(ApiRunner("numpy", "fa1"), case)]
    assert rules[0] == "census"
    checks.require(case, checks.run_checks(ApiRunner("numpy", "fa2"), case))
