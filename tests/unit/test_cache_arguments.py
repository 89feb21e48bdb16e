"""Calls with caches are refused by the name of an argument, before a cache is written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash

from ..kit.caches import CacheCase, build
from .cache_case import (
    INDEXED,
    PAGED,
    PLAIN,
    ROTATING,
    Row,
    T,
    V,
    check,
    entry,
    numbers,
    read_only,
    setting,
    writable_broadcast,
    wrong,
)


def _without_slots(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name][:, :0] for name in ("k_cache", "v_cache")}


#: Calls that both functions refuse.
_BOTH: list[Row] = [
    # Kinds and dtypes.
    (PLAIN, setting(cache_seqlens=None), T, "cache_seqlens: got None"),
    (PLAIN, setting(k_cache=None), T, "k_cache: got builtins.NoneType"),
    (PLAIN, setting(v_cache=None), T, "v_cache: got builtins.NoneType"),
    (PLAIN, setting(cache_seqlens=True), T, "cache_seqlens: got True"),
    (PLAIN, setting(cache_seqlens=3.0), T, "cache_seqlens: got 3.0"),
    (PLAIN, setting(cache_seqlens=[3, 0]), T, "cache_seqlens: got "),
    (PLAIN, setting(cache_seqlens=np.array([3, 0])), T, "cache_seqlens: got dtype int64"),
    (PLAIN, setting(cache_seqlens=numbers(3)), V, "cache_seqlens: got shape (1,)"),
    (
        PLAIN,
        setting(cache_seqlens=np.repeat(numbers(3, 0), 2)[::2]),
        V,
        "cache_seqlens: got strides",
    ),
    (PLAIN, setting(cache_seqlens=np.int32(9)), V, "cache_seqlens: got 9; expected 0 to 8"),
    (PLAIN, setting(cache_seqlens=-1), V, "cache_seqlens: got -1; expected 0 to 8"),
    (PLAIN, setting(cache_seqlens=numbers(-1, 0)), V, "cache_seqlens: got a length of -1"),
    (
        PLAIN,
        setting(cache_seqlens=numbers(0, 9)),
        V,
        "cache_seqlens: got a length of 9; expected 0 to 8",
    ),
    (
        PLAIN,
        wrong("k", lambda k: k.astype(np.float64)),
        T,
        "k: got dtype float64; expected float32",
    ),
    (
        PLAIN,
        wrong("v", lambda v: v.astype(np.float16)),
        T,
        "v: got dtype float16; expected float32",
    ),
    (
        PLAIN,
        wrong("v_cache", lambda v: v.astype(ml_dtypes.bfloat16)),
        T,
        "v_cache: got dtype bfloat16",
    ),
    (PLAIN, wrong("k_cache", lambda k: np.zeros_like(k, np.int8)), T, "k_cache: got dtype int8"),
    # Shapes and strides.
    (PLAIN, wrong("k", lambda k: k[0]), V, "k: got shape (2, 2, 8)"),
    (
        PLAIN,
        wrong("k", lambda k: k[..., :7]),
        V,
        "k: got shape (2, 2, 2, 7); expected (2, 2, 2, 8)",
    ),
    (PLAIN, wrong("k", lambda k: k[:, :, :1]), V, "k: got shape (2, 2, 1, 8)"),
    (PLAIN, wrong("v", lambda v: v[:, :1]), V, "v: got shape (2, 1, 2, 8)"),
    (
        PLAIN,
        wrong("v_cache", lambda v: v[:, :7]),
        V,
        "v_cache: got shape (2, 7, 2, 8); expected (2, 8, 2, 8)",
    ),
    (PLAIN, wrong("k_cache", lambda k: k.reshape(16, 2, 8)), V, "k_cache: got shape (16, 2, 8)"),
    (PLAIN, wrong("k_cache", lambda k: np.repeat(k, 2, -1)[..., ::2]), V, "k_cache: got strides"),
    (PLAIN, wrong("v_cache", lambda v: v[..., ::-1]), V, "v_cache: got strides"),
    (
        PLAIN,
        lambda given: {n: np.repeat(given[n], 2, 0) for n in ("k_cache", "v_cache")},
        V,
        "k_cache: got batch 4; expected 2",
    ),
    (
        PLAIN,
        lambda given: {n: given[n][..., :0] for n in ("q", "k", "k_cache") if n in given},
        V,
        "k_cache: got head_dim 0",
    ),
    # Memory that is written.
    (PLAIN, wrong("v_cache", lambda v: read_only(v)), V, "v_cache: got a read-only array"),
    (
        PLAIN,
        lambda given: {"v_cache": given["k_cache"]},
        V,
        "v_cache: got memory that k_cache uses",
    ),
    (PLAIN, lambda given: {"k": given["k_cache"][:, :2]}, V, "k_cache: got memory that k uses"),
    (PLAIN, wrong("k_cache", lambda k: np.broadcast_to(k[:1], k.shape)), V, "k_cache: got a"),
    (
        PLAIN,
        lambda given: {"k_cache": writable_broadcast(given["k_cache"])},
        V,
        "k_cache: got an array whose elements share memory",
    ),
    (
        PLAIN,
        lambda given: {"overflow": given["cache_seqlens"]},
        V,
        "overflow: got memory that cache_seqlens uses",
    ),
    (PLAIN, setting(overflow=np.zeros(2, np.int64)), T, "overflow: got dtype int64"),
    (PLAIN, setting(overflow=numbers(0)), V, "overflow: got shape (1,)"),
    (PLAIN, setting(backend="cuda"), V, "backend: got 'cuda' for caches in host memory"),
    (PLAIN, setting(backend="rocm"), V, "backend: got 'rocm'"),
    # Room for new tokens.
    (PLAIN, setting(cache_seqlens=numbers(7, 0)), V, "k: got 2 new tokens behind 7 in 8 slots"),
    (PLAIN, setting(cache_seqlens=7), V, "k: got 2 new tokens behind 7 in 8 slots"),
    (PAGED, setting(cache_seqlens=numbers(7, 0)), V, "k: got 2 new tokens behind 7 in 8 slots"),
    (
        PAGED,
        setting(cache_seqlens=numbers(9, 0)),
        V,
        "page_table: got 2 pages of 4 for a length of 9; expected 3 or more",
    ),
    # Tables.
    (
        PAGED,
        wrong("page_table", lambda t: t.astype(np.int64)),
        T,
        "page_table: got dtype int64; expected int32",
    ),
    (PAGED, _without_slots, V, "k_cache: got pages of 0 slots; expected 1 or more"),
    (
        PAGED,
        lambda given: _without_slots(given) | {"page_table": given["page_table"][:, :0]},
        V,
        "k_cache: got pages of 0 slots",
    ),
    (PAGED, wrong("page_table", lambda t: t[0]), V, "page_table: got shape (2,)"),
    (PAGED, wrong("page_table", lambda t: t[:1]), V, "page_table: got shape (1, 2)"),
    (
        PAGED,
        wrong("page_table", lambda t: np.repeat(t, 2, 1)[:, ::2]),
        V,
        "page_table: got strides",
    ),
    (
        PAGED,
        entry("page_table", (0, 1), -1),
        V,
        "page_table: got page -1; expected 0 to 5 where a page is used",
    ),
    (PAGED, entry("page_table", (1, 1), 6), V, "page_table: got page 6"),
    (
        PAGED,
        setting(cache_batch_idx=numbers(0, 1)),
        V,
        "cache_batch_idx: got an array; expected None beside page_table",
    ),
    (INDEXED, entry("cache_batch_idx", 1, 4), V, "cache_batch_idx: got entry 4; expected 0 to 3"),
    (INDEXED, entry("cache_batch_idx", 0, -1), V, "cache_batch_idx: got entry -1"),
    (
        INDEXED,
        setting(cache_batch_idx=np.zeros(2, np.uint32)),
        T,
        "cache_batch_idx: got dtype uint32",
    ),
    # Rotation.
    (
        ROTATING,
        setting(rotary_interleaved=None),
        V,
        "rotary_interleaved: got None beside rotary_cos",
    ),
    (ROTATING, setting(rotary_interleaved=1), T, "rotary_interleaved: got 1"),
    (
        PLAIN,
        setting(rotary_interleaved=False),
        V,
        "rotary_interleaved: got False; expected None without",
    ),
    (ROTATING, setting(rotary_sin=None), V, "rotary_sin: got None beside rotary_cos"),
    (ROTATING, setting(rotary_cos=None), V, "rotary_cos: got None beside rotary_sin"),
    (
        ROTATING,
        wrong("rotary_cos", lambda c: c.astype(np.float16)),
        T,
        "rotary_cos: got dtype float16; expected float32",
    ),
    (
        ROTATING,
        wrong("rotary_sin", lambda s: s.astype(np.float64)),
        T,
        "rotary_sin: got dtype float64",
    ),
    (
        ROTATING,
        wrong("rotary_cos", lambda c: np.repeat(c, 2, 1)),
        V,
        "rotary_cos: got shape (10, 6)",
    ),
    (
        ROTATING,
        wrong("rotary_sin", lambda s: s[:, :2].copy()),
        V,
        "rotary_sin: got shape (10, 2)",
    ),
    (ROTATING, wrong("rotary_cos", lambda c: np.asfortranarray(c)), V, "rotary_cos: got strides"),
    (
        ROTATING,
        lambda given: {n: given[n][:7] for n in ("rotary_cos", "rotary_sin")},
        V,
        "rotary_cos: got 7 positions; expected 8 or more",
    ),
    (
        ROTATING,
        setting(rotary_seqlens=numbers(9, 0)),
        V,
        "rotary_cos: got 10 positions; expected 11 or more",
    ),
    (ROTATING, setting(rotary_seqlens=numbers(0, -1)), V, "rotary_seqlens: got -1"),
    (ROTATING, setting(rotary_seqlens=numbers(0)), V, "rotary_seqlens: got shape (1,)"),
    (
        PLAIN,
        setting(rotary_seqlens=numbers(0, 0)),
        V,
        "rotary_seqlens: got an array; expected None without",
    ),
]


@pytest.mark.parametrize(("case", "change", "kind", "text"), _BOTH, ids=[x[3] for x in _BOTH])
@pytest.mark.parametrize("attends", [False, True])
def test_of_both(case: CacheCase, change: Any, kind: type, text: str, attends: bool) -> None:
    function = cuflash.attention_with_kvcache if attends else cuflash.append_kv
    check(function, case, change, kind, text, attends)


@pytest.mark.parametrize("name", ["k", "v"])
def test_an_append_needs_tokens(name: str) -> None:
    check(
        cuflash.append_kv,
        PLAIN,
        setting(**{name: None}),
        T,
        f"{name}: got builtins.NoneType",
        False,
    )


@pytest.mark.parametrize("name", ["cu_seqlens_k_new", "q_scale"])
def test_what_there_is_not_is_no_keyword(name: str) -> None:
    built = build(PLAIN)
    for function, arrays in (
        (cuflash.append_kv, built.appended),
        (cuflash.attention_with_kvcache, built.arrays),
    ):
        with pytest.raises(TypeError, match="unexpected keyword"):
            function(**built.caches, **arrays, **{name: None})
