"""Caches in pages, in other entries and behind padding, in CUDA memory as a user calls them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.dispatch import observe

from ..kit.caches import Built, CacheCase, build, cases, check_close, same_bits
from .build import compiler
from .host_cupy import HostCupy, host_cupy
from .test_append_kv import on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Lengths at edges of pages and of tiles, none, and all that there is room for.
_PAGED = CacheCase(
    "float16", kind="paged", slots=16, pages=12, lengths=(0, 1, 16, 65, 127, 192), queries=1,
    new=None, heads=(4, 2), dims=(64, 64),
)  # fmt: skip
_DECODED = replace(_PAGED, new=1, counts=True, pairs=8, table_rows=200, lengths=(3, 191, 192, 64))
_INDEXED = replace(_PAGED, kind="indexed", slots=100, pages=1, lengths=(0, 1, 64, 99, 100))
_PADDED = replace(_INDEXED, leftpad=(0, 0, 3, 99, 37), queries=3, slopes=True)


def attended(
    host: HostCupy, built: Built, algorithm: str, **more: Any
) -> tuple[list[Any], dict[str, Any], Any]:
    """The caches' buffers, all arrays and the results of a call."""
    raw, arrays = on_device(host, built)
    given = {**arrays, **built.rotary, **built.options, "algorithm": algorithm, **more}
    return raw, arrays, host.call(cuflash.attention_with_kvcache, **given, return_lse=True)


def check(built: Built, raw: list[Any], arrays: dict[str, Any], results: Any) -> None:
    """Hold results and caches to the reference."""
    truth, truth_lse, expected, overflow = built.expected()
    check_close(built.case, results[0].peek(), truth)
    check_close(built.case, results[1].peek(), truth_lse)
    assert all(same_bits(a.peek(), b) for a, b in zip(raw, expected, strict=True))
    if built.case.counts:
        assert arrays["overflow"].peek().tolist() == overflow.tolist()


_CASES = {
    "pages-of-16": _PAGED,
    "pages-of-8": replace(_PAGED, slots=8, pages=24),
    "pages-of-64": replace(_PAGED, slots=64, pages=3, queries=2),
    "pages-of-128": replace(_PAGED, slots=128, pages=2, dims=(128, 128), dtype="bfloat16"),
    "appended": _DECODED,
    "causal": replace(_DECODED, queries=3, new=3, options=(("causal", True),), slopes=True),
    "window": replace(_PAGED, queries=4, options=(("window_size", (20, 0)),), sinks=True),
    "heads-first": replace(_PAGED, strides="hnd"),
    "together": replace(_PAGED, strides="together"),
    "infinite": replace(_PAGED, poison=float("inf")),
    "entries": _INDEXED,
    "entries-appended": replace(_INDEXED, new=2, lengths=(0, 98, 97, 1)),
    "padding": _PADDED,
    "padding-causal": replace(_PADDED, options=(("causal", True),)),
    "padding-of-own-entries": replace(_PADDED, kind="plain", options=(("window_size", (9, 2)),)),
}


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(case: CacheCase, algorithm: str) -> None:
    built, plans = build(case), []
    with host_cupy() as host, observe(plans.append):
        check(built, *attended(host, built, algorithm))
    assert [plan.algorithm for plan in plans if "k" in plan.problem.shapes][-1] == algorithm


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("slots", [8, 16, 32, 64, 128, 256])
def test_pages_have_the_bits_of_rows_that_follow_each_other(slots: int, algorithm: str) -> None:
    """In the same tile, with keys split and whole."""
    case = replace(
        _PAGED, slots=slots, pages=512 // slots, lengths=(0, 1, 300, 511, 512), queries=3
    )
    built = build(case)
    rows = [_in_rows(built, cache) for cache in built.caches.values()]
    for chunk in (0, 128):
        with host_cupy() as host:
            more = {"blocks": (64, 64), "kv_chunk": chunk}
            _, arrays, results = attended(host, built, algorithm, **more)
            del arrays["page_table"]
            arrays |= dict(zip(("k_cache", "v_cache"), map(host.array, rows), strict=True))
            given = {**arrays, **built.options, "algorithm": algorithm, **more}
            others = host.call(cuflash.attention_with_kvcache, **given, return_lse=True)
            for one, other in zip(results, others, strict=True):
                assert same_bits(one.peek(), other.peek())


def _in_rows(built: Built, cache: np.ndarray) -> np.ndarray:
    """An entry's pages one behind another; NaN in place of those that its table does not name."""
    table = built.arrays["page_table"]
    there = (table >= 0) & (table < len(cache))
    pages = np.where(there[..., None, None, None], cache[np.where(there, table, 0)], np.nan)
    return pages.astype(cache.dtype).reshape(len(table), -1, *cache.shape[2:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_any_caches(dtype: str) -> None:
    @settings(max_examples=40)
    @given(cases(dtypes=(dtype,)))
    def holds(case: CacheCase) -> None:
        built = build(case)
        with host_cupy() as host:
            check(built, *attended(host, built, "auto"))

    holds()
