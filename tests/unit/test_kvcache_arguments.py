"""Further refusals of attention with caches, before a cache is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.caches import CacheCase
from .cache_case import (
    NOTHING_NEW,
    PLAIN,
    ROTATING,
    Row,
    T,
    U,
    V,
    check,
    numbers,
    setting,
    wrong,
)

#: Each row has a call, the change that makes it wrong, the error, and the message's beginning.
_ATTENDING: list[Row] = [
    (PLAIN, setting(q=None), T, "q: got builtins.NoneType"),
    (PLAIN, setting(v=None), V, "v: got None beside k"),
    (PLAIN, setting(k=None), V, "k: got None beside v"),
    (NOTHING_NEW, setting(overflow=numbers(0, 0)), V, "overflow: got an array and no new tokens"),
    (ROTATING, setting(k=None, v=None), V, "rotary_cos: got an array and no new tokens"),
    (PLAIN, wrong("q", lambda q: q[:, :, :3]), V, "k_cache: got 2 heads beside 3 of q"),
    (PLAIN, wrong("q", lambda q: q[..., :7]), V, "k_cache: got head_dim 8; expected 7"),
    (PLAIN, wrong("q", lambda q: q[:1]), V, "k: got shape (2, 2, 2, 8)"),
    (NOTHING_NEW, wrong("q", lambda q: q[:1]), V, "k_cache: got batch 2; expected 1, as q has"),
    (PLAIN, wrong("q", lambda q: q[0]), V, "q: got shape (2, 4, 8)"),
    (
        PLAIN,
        wrong("q", lambda q: q.astype(np.float64)),
        T,
        "k_cache: got dtype float32; expected float64",
    ),
    (PLAIN, setting(cache_leftpad=numbers(-1, 0)), V, "cache_leftpad: got -1"),
    (PLAIN, setting(cache_leftpad=np.zeros(2)), T, "cache_leftpad: got dtype float64"),
    (
        PLAIN,
        setting(window_size=(-1, 0)),
        V,
        "window_size: got (-1, 0); expected (left, right), each a number of keys, or None for "
        "no bound (-1 in flash-attn)",
    ),
    (PLAIN, setting(causal=1), T, "causal: got 1"),
    (PLAIN, setting(return_lse=1), T, "return_lse: got 1"),
    (PLAIN, setting(scale=0.0), V, "scale: got 0.0"),
    (PLAIN, setting(softcap=-1.0), V, "softcap: got -1.0"),
    (PLAIN, setting(alibi_slopes=np.zeros(3, np.float32)), V, "alibi_slopes: got shape (3,)"),
    (PLAIN, setting(sinks=np.zeros(4, np.int32)), T, "sinks: got dtype int32"),
    (
        PLAIN,
        setting(kv_chunk=64),
        U,
        "the NumPy backend walks all keys of a row: it has no kv_chunk",
    ),
    (PLAIN, setting(kv_chunk=False), T, "kv_chunk: got False"),
    (PLAIN, setting(kv_chunk=-64), V, "kv_chunk: got -64"),
    (PLAIN, setting(algorithm="fa4"), V, "algorithm: got 'fa4'"),
    (PLAIN, setting(algorithm="fa3"), U, ""),
    (PLAIN, setting(out=np.zeros((2, 2, 4, 7), np.float32)), V, "out: got shape (2, 2, 4, 7)"),
    (PLAIN, setting(out=np.zeros((2, 2, 4, 8))), T, "out: got float64"),
    (PLAIN, setting(lse_out=np.zeros((2, 4, 3), np.float32)), V, "lse_out: got shape (2, 4, 3)"),
    (PLAIN, lambda given: {"out": given["q"]}, V, "out: got memory that q uses"),
    (
        PLAIN,
        lambda given: {"out": given["k_cache"].reshape(2, 2, 4, 16)[..., :8]},
        V,
        "out: got memory that k_cache uses",
    ),
    (
        ROTATING,
        lambda given: {"q": np.repeat(given["q"], 4, 1), "causal": True},
        V,
        "rotary_cos: got 10 positions; expected 11",
    ),
]


@pytest.mark.parametrize(
    ("case", "change", "kind", "text"), _ATTENDING, ids=[x[3] for x in _ATTENDING]
)
def test_of_attention(case: CacheCase, change: Any, kind: type, text: str) -> None:
    check(cuflash.attention_with_kvcache, case, change, kind, text, True)
