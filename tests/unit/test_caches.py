"""Calls with caches on the host that must give equal results, many of them bit for bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cuflash

from .foreign import Tensor, library

__all__ = ["library"]

_HEADS, _HEADS_KV, _DIM = 4, 2, 8


def _normal(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _angles(positions: int, pairs: int, dtype: Any = np.float32) -> dict[str, Any]:
    angles = np.outer(np.arange(positions), 0.5 ** np.arange(pairs))
    return {"rotary_cos": np.cos(angles).astype(dtype), "rotary_sin": np.sin(angles).astype(dtype)}


def _caches(slots: int, entries: int = 1, dtype: Any = np.float32) -> dict[str, Any]:
    """Caches full of NaN, which must not reach a result."""
    shape = entries, slots, _HEADS_KV, _DIM
    return {name: np.full(shape, np.nan, dtype) for name in ("k_cache", "v_cache")}


def _int32(*values: Any) -> Any:
    return np.array(values, np.int32)


def _kv(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return (_normal(seed + i, *shape, _HEADS_KV, _DIM, dtype=dtype) for i in range(2))


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("page", [0, 1, 3, 4])
def test_tokens_one_by_one_are_the_rows_of_one_pass(page: int, rotates: bool, window: Any) -> None:
    tokens, dtype = 13, np.float64
    q = _normal(2, 1, tokens, _HEADS, _DIM, dtype=dtype)
    k, v = _kv(0, 1, tokens, dtype=dtype)
    rotary: dict[str, Any] = _angles(80, 3, dtype) if rotates else {}
    turned = [q, k]
    if rotates:
        rotary["rotary_interleaved"] = False
        turned = [_rotated(x, rotary) for x in turned]
    options: dict[str, Any] = {"causal": True, "window_size": window}
    whole, whole_lse = cuflash.attention(*turned, v, return_lse=True, backend="numpy", **options)
    place, caches = {}, _caches(20, dtype=dtype)
    if page:
        place = {"page_table": np.random.default_rng(3).permutation(20)[None].astype(np.int32)}
        caches = _caches(page, 20, dtype)
    given = {**caches, **place, **rotary, **options}
    for t in range(tokens):
        new = (x[:, t : t + 1] for x in (q, k, v))
        row, keys, values = new
        out, lse = cuflash.attention_with_kvcache(
            row, **given, k=keys, v=values, cache_seqlens=_int32(t), return_lse=True
        )
        assert abs(out - whole[:, t : t + 1]).max() < 1e-13
        assert abs(lse - whole_lse[..., t : t + 1]).max() < 1e-13


def _rotated(x: Any, rotary: dict[str, Any], first: int = 0) -> Any:
    """The rows, rotated as complex numbers."""
    pairs = rotary["rotary_cos"].shape[1]
    angles = (rotary["rotary_cos"] + 1j * rotary["rotary_sin"])[first : first + x.shape[1], None]
    turned = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * angles
    return np.concatenate([turned.real, turned.imag, x[..., 2 * pairs :]], -1)


@pytest.mark.parametrize("page", [1, 2, 3, 5, 16])
def test_pages_are_a_contiguous_cache(page: int) -> None:
    """Lengths go up to three pages and one slot. Table entries of unused pages are invalid."""
    lengths = _int32(*range(3 * page + 2))
    batch, pages = len(lengths), 4
    q = _normal(2, batch, 2, _HEADS, _DIM)
    caches, paged = _caches(pages * page, batch), _caches(page, batch * pages)
    table = np.random.default_rng(1).permutation(batch * pages).reshape(batch, pages)
    for name, values in zip(caches, _kv(0, batch, pages * page), strict=True):
        for b, length in enumerate(lengths):
            caches[name][b, :length] = values[b, :length]
            for slot in range(length):
                paged[name][table[b, slot // page], slot % page] = values[b, slot]
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = (-1, 2**31 - 1)[b % 2]
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "return_lse": True}
    expected = cuflash.attention_with_kvcache(q, **caches, **options)
    table = table.astype(np.int32)
    found = cuflash.attention_with_kvcache(q, **paged, page_table=table, **options)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_the_capacity_and_the_other_entries_change_no_bit() -> None:
    lengths, batch = _int32(9, 0, 4), 3
    q = _normal(2, batch, 2, _HEADS, _DIM)
    results = []
    for slots in (9, 10, 64):
        caches = _caches(slots, batch)
        for name, values in zip(caches, _kv(0, batch, 9), strict=True):
            for b, length in enumerate(lengths):
                caches[name][b, :length] = values[b, :length]
        results.append(cuflash.attention_with_kvcache(q, **caches, cache_seqlens=lengths))
        alone = [
            cuflash.attention_with_kvcache(
                q[b : b + 1],
                **{name: cache[b : b + 1] for name, cache in caches.items()},
                cache_seqlens=int(length),
            )
            for b, length in enumerate(lengths)
        ]
        results.append(np.concatenate(alone))
    assert all((out == results[0]).all() for out in results)


def test_neighbours_are_halves_in_another_order() -> None:
    """The cached keys are equal bit for bit. The rotated queries show only in the output."""
    order = [0, 2, 4, 1, 3, 5, 6, 7]
    k, v = _kv(0, 1, 5)
    q = _normal(2, 1, 5, _HEADS, _DIM)
    found = []
    for interleaved, columns in ((True, list(range(8))), (False, order)):
        caches = _caches(8)
        out = cuflash.attention_with_kvcache(
            q[..., columns], **caches, k=k[..., columns], v=v, cache_seqlens=0, causal=True,
            rotary_interleaved=interleaved, **_angles(8, 3),
        )  # fmt: skip
        found.append((caches["k_cache"][:, :5], out))
    assert (found[0][0][..., order] == found[1][0]).all()
    assert abs(found[0][1] - found[1][1]).max() < 1e-6


def test_rotation_depends_on_differences_of_positions() -> None:
    q = _normal(2, 1, 3, _HEADS, _DIM, dtype=np.float64)
    k, v = _kv(0, 1, 3, dtype=np.float64)
    outs = [
        cuflash.attention_with_kvcache(
            q, **_caches(8, dtype=np.float64), k=k, v=v, cache_seqlens=0, causal=True,
            rotary_interleaved=True, rotary_seqlens=_int32(first), **_angles(50, 4, np.float64),
        )
        for first in (0, 1, 40)
    ]  # fmt: skip
    assert max(abs(out - outs[0]).max() for out in outs) < 1e-12


def test_queries_without_a_mask_are_all_at_the_first_new_position() -> None:
    """Without a mask, the rows of a step are not a sequence, as in flash-attn."""
    q = np.repeat(_normal(2, 1, 1, _HEADS, _DIM), 3, 1)
    k, v = _kv(0, 1, 3)
    given = {**_caches(8), "k": k, "v": v, "cache_seqlens": 0, "rotary_interleaved": False}
    for window, same in ((None, True), ((None, None), True), ((9, None), False)):
        out = cuflash.attention_with_kvcache(q, **given, **_angles(8, 4), window_size=window)
        assert (out[:, 0] == out[:, 2]).all() == same


def test_padding_on_the_left_is_a_cache_that_begins_later() -> None:
    q = _normal(2, 2, 2, _HEADS, _DIM)
    k, v = _kv(0, 2, 9)
    padding, lengths = _int32(3, 0), _int32(7, 9)
    slopes = _normal(5, _HEADS)
    options: dict[str, Any] = {"window_size": (4, 0), "alibi_slopes": slopes}
    caches = {"k_cache": k.copy(), "v_cache": v.copy()}
    for cache in caches.values():
        cache[0, :3] = np.nan
    out = cuflash.attention_with_kvcache(
        q, **caches, cache_seqlens=lengths, cache_leftpad=padding, **options
    )
    for b, (first, end) in enumerate(zip(padding, lengths, strict=True)):
        rows = (x[b : b + 1, first:end] for x in (k, v))
        assert (out[b] == cuflash.attention(q[b : b + 1], *rows, backend="numpy", **options)).all()


def test_padding_is_part_of_positions() -> None:
    """Padding shifts the positions that rotate an entry, but does not change its output."""
    q = _normal(2, 1, 2, _HEADS, _DIM, dtype=np.float64)
    k, v = _kv(0, 1, 6, dtype=np.float64)
    found = []
    for padding in (0, 5):
        caches = _caches(16, dtype=np.float64)
        given = {**caches, **_angles(16, 4, np.float64), "rotary_interleaved": False}
        cuflash.append_kv(k[:, :4], v[:, :4], **given, cache_seqlens=padding)
        out = cuflash.attention_with_kvcache(
            q, **given, k=k[:, 4:], v=v[:, 4:], cache_seqlens=padding + 4,
            cache_leftpad=_int32(padding), causal=True,
        )  # fmt: skip
        found.append(out)
    assert abs(found[0] - found[1]).max() < 1e-12


def test_rows_without_a_key_are_written() -> None:
    q = _normal(2, 2, 3, _HEADS, _DIM)
    caches = _caches(4, 2)
    for cache in caches.values():
        cache[1, :2] = 1
    out, lse = np.full((2, 3, _HEADS, _DIM), np.nan, np.float32), np.full((2, 4, 3), np.nan)
    lse = lse.astype(np.float32)
    cuflash.attention_with_kvcache(
        q, **caches, cache_seqlens=_int32(0, 2), causal=True, out=out, lse_out=lse
    )
    assert not out[0].any()
    assert (lse[0] == -np.inf).all()
    assert not out[1, 0].any()
    assert (lse[1, :, 0] == -np.inf).all()
    assert (out[1, 1:] == 1).all()


@pytest.mark.parametrize("length", [1, 3, 7, 8])
def test_without_scores_the_output_is_the_mean_of_what_counts(length: int) -> None:
    """A key too many or too few changes the denominator of the mean."""
    caches = _caches(9)
    caches["k_cache"][:, :length] = 1
    caches["v_cache"][:, :length] = np.arange(1, length + 1)[None, :, None, None]
    q = np.zeros((1, 1, _HEADS, _DIM), np.float32)
    out = cuflash.attention_with_kvcache(q, **caches, cache_seqlens=length)
    assert abs(out - (length + 1) / 2).max() < 1e-6


def test_an_entry_of_no_length_may_be_nowhere() -> None:
    """A server may pad a batch with entries that have no length."""
    q = _normal(2, 2, 1, _HEADS, _DIM)
    k, v = _kv(0, 1, 3)
    given: dict[str, Any] = {"cache_seqlens": _int32(3, 0), "cache_batch_idx": _int32(0, -1)}
    out = cuflash.attention_with_kvcache(q, k, v, **given)
    assert out[0].any()
    assert not out[1].any()


def test_pages_may_be_shared_and_stand_twice() -> None:
    k, v = _kv(0, 2, 3)
    q = _normal(2, 2, 1, _HEADS, _DIM)
    table = np.array([[1, 1], [1, 0]], np.int32)
    out = cuflash.attention_with_kvcache(q, k, v, cache_seqlens=_int32(6, 5), page_table=table)
    for b, length in enumerate((6, 5)):
        rows = (np.concatenate(x[table[b]])[None, :length] for x in (k, v))
        expected = cuflash.attention(q[b : b + 1], *rows, backend="numpy")
        assert (out[b] == expected).all()


def test_arrays_of_other_libraries_are_written_and_answered(library: ModuleType) -> None:
    q = _normal(2, 1, 1, _HEADS, _DIM)
    k, v = _kv(0, 1, 2)
    caches = _caches(4)
    foreign = {name: Tensor(cache) for name, cache in caches.items()}
    out = cuflash.attention_with_kvcache(Tensor(q), **foreign, k=k, v=v, cache_seqlens=0)
    assert type(out) is library.Tensor
    assert (caches["v_cache"][:, :2] == v).all()
    assert (caches["k_cache"][:, :2] == k).all()


def test_an_append_returns_nothing() -> None:
    k, v = _kv(0, 1, 2)
    assert cuflash.append_kv(k, v, **_caches(4), cache_seqlens=1) is None
