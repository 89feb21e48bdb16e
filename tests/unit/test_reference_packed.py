"""Packed sequences of the reference: each equals a separate call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference

from .packed_case import LENGTHS, arrays, compare, int32, looped, pulled

_NAMES = "cu_seqlens_q", "cu_seqlens_kv"


def _call(**more: Any) -> dict[str, Any]:
    return {name: value for name, value in arrays().items() if name != "backend"} | more


def _both(call: dict[str, Any]) -> dict[str, Any]:
    """The results of both passes."""
    out, lse = reference.attention(**call)
    grads = reference.attention_backward(**pulled(out, lse), **call)
    more = [f"d{name}" for name in ("alibi_slopes", "sinks") if name in call]
    return dict(zip(("out", "lse", "dq", "dk", "dv", *more), (out, lse, *grads), strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (6, 3), "q_offset": -2}], ids=str
)
def test_each_is_a_call_of_its_own(options: dict[str, Any]) -> None:
    random = np.random.default_rng(2)
    features = {"alibi_slopes": random.standard_normal(4), "sinks": random.standard_normal(4)}
    for call in (_call(**options), _call(**options, **features)):
        compare(_both(call), looped(call))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((5, -9, 2**31 - 1), (-4, 0, 99)),
        ((5, 30, 12, 40), (-4, 9, 30, 200)),
        ((-1, 3, 9, 46), (8, 20, 4, 60)),
    ],
    ids=str,
)
def test_offsets_are_clamped(queries: Any, keys: Any) -> None:
    """The first sequence begins at row 0, every other one at the largest offset so far."""
    call = {name: np.nan_to_num(a) if name in "qkv" else a for name, a in _call().items()}
    call |= {"cu_seqlens_q": int32(*queries), "cu_seqlens_kv": int32(*keys)}
    compare(_both(call), looped(call))


def test_draws_are_by_sequence() -> None:
    """A sequence has the draws of the batch entry with its number: here those of entry 5."""
    call = _call(dropout_p=0.4, dropout_seed=7)
    out, _ = reference.attention(**call)
    rows, keys = (slice(*map(int, call[name][5:7])) for name in _NAMES)
    assert LENGTHS[5] == (rows.stop - rows.start, keys.stop - keys.start)
    kept = cuflash.dropout_mask((6, 4, *LENGTHS[5]), dropout_p=0.4, dropout_seed=7)[5]
    share = kept * (2**14 / round(2**14 * 0.6))
    q, k, v = (call[n][at].swapaxes(0, 1) for n, at in (("q", rows), ("k", keys), ("v", keys)))
    scores = q @ k.repeat(2, 0).swapaxes(1, 2) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = (weights * share) @ v.repeat(2, 0)
    np.testing.assert_allclose(out[rows], expected.swapaxes(0, 1), atol=1e-12)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    "value", [None, [0, 3], np.ones(8), np.ones(8, bool), int32(), np.ones((8, 1), int), int32(0)]
)
def test_what_is_no_offsets_is_refused(name: str, value: Any) -> None:
    given = _call(**{name: value})
    for function in (reference.attention, lambda **x: reference.attention_backward(x["q"], **x)):
        with pytest.raises(cuflash.CuflashError, match=r"^cu_seqlens_(q|kv): got"):
            function(**given)


@pytest.mark.parametrize("name", ["bias", "mask", "block_mask", "seqused_q", "seqused_kv"])
def test_what_does_not_go_with_them_is_refused(name: str) -> None:
    with pytest.raises(cuflash.ArgumentValueError, match=f"^{name}: got an array"):
        reference.attention(**_call(**{name: np.ones(1)}))


@pytest.mark.parametrize("layout", ["hsd", "bshd", None])
def test_rows_stand_before_heads(layout: str | None) -> None:
    with pytest.raises(cuflash.ArgumentValueError, match=r"^layout: got"):
        reference.attention(**_call(layout=layout))
