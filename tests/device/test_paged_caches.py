"""Caches in pages, in other entries and after padding on the device, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.caches import Built, CacheCase, build, check_close, same_bits

#: Lengths at edges of pages and of tiles, 0, and the whole capacity.
_PAGED = CacheCase(
    "bfloat16", kind="paged", slots=16, pages=128, lengths=(0, 1, 16, 1000, 2047, 2048), queries=1,
    new=None, heads=(16, 4), dims=(128, 128),
)  # fmt: skip
_DECODED = replace(_PAGED, new=1, counts=True, pairs=32, table_rows=2100)
_INDEXED = replace(_PAGED, kind="indexed", slots=1500, pages=1, lengths=(0, 1, 64, 1499, 1500))
_PADDED = replace(_INDEXED, leftpad=(0, 0, 3, 900, 37), queries=3, slopes=True)

_CASES = {
    "pages-of-16": _PAGED,
    "pages-of-8-d64": replace(_PAGED, slots=8, pages=256, dims=(64, 64), dtype="float16"),
    "pages-of-64-queries": replace(_PAGED, slots=64, pages=32, queries=70),
    "pages-of-256-d256": replace(_PAGED, slots=256, pages=8, dims=(256, 256)),
    "pages-of-24": replace(_PAGED, slots=24, pages=86, dims=(96, 96), queries=5),
    "appended": _DECODED,
    "causal": replace(_DECODED, queries=3, new=3, options=(("causal", True),), slopes=True),
    "window": replace(_PAGED, queries=4, options=(("window_size", (400, 0)),), sinks=True),
    "heads-first": replace(_PAGED, strides="hnd"),
    "together": replace(_PAGED, strides="together", poison=float("inf")),
    "entries": _INDEXED,
    "entries-appended": replace(_INDEXED, new=2, lengths=(0, 1498, 1497, 1)),
    "padding": _PADDED,
    "padding-causal": replace(_PADDED, options=(("causal", True),)),
    "padding-of-own-entries": replace(_PADDED, kind="plain", options=(("window_size", (90, 2)),)),
}


def _attended(cp: Any, built: Built, **options: Any) -> tuple[list[Any], Any]:
    raw = [cp.asarray(buffer) for buffer in built.raw]
    arrays = {name: cp.asarray(array) for name, array in built.arrays.items()}
    arrays |= dict(zip(("k_cache", "v_cache"), built.views(raw), strict=True))
    given = {**arrays, **built.keywords, **built.options, **options}
    return raw, cuflash.attention_with_kvcache(**given, return_lse=True)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(cp: Any, case: CacheCase, algorithm: str) -> None:
    built = build(case)
    truth, truth_lse, expected, _ = built.expected()
    raw, (out, lse) = _attended(cp, built, algorithm=algorithm)
    check_close(case, out.get(), truth)
    check_close(case, lse.get(), truth_lse)
    assert all(same_bits(a.get(), b) for a, b in zip(raw, expected, strict=True))


@pytest.mark.parametrize("slots", [16, 64, 128, 512])
@pytest.mark.parametrize("chunk", [None, 0, 512])
def test_pages_have_the_bits_of_one_page(cp: Any, slots: int, chunk: Any) -> None:
    """With equal tiles the bits do not depend on the size or the order of the pages."""
    case = replace(_PAGED, slots=slots, pages=2048 // slots, lengths=(2048, 77, 1300), new=None)
    built = build(case)
    table = built.arrays["page_table"]
    named = np.where((table >= 0) & (table < case.batch * case.pages + 2), table, 0)
    caches = {name: cache[named] for name, cache in built.caches.items()}
    rows = {name: c.reshape(case.batch, -1, *c.shape[3:]) for name, c in caches.items()}
    plain = {name: a for name, a in built.arrays.items() if name != "page_table"} | rows
    options = {"algorithm": "fa3", "blocks": (64, 64), "kv_chunk": chunk, "return_lse": True}
    on_device = {name: cp.asarray(array) for name, array in plain.items()}
    expected = cuflash.attention_with_kvcache(**on_device, **options)
    del options["return_lse"]
    for _ in range(20):
        _, found = _attended(cp, built, **options)
        for one, other in zip(found, expected, strict=True):
            assert same_bits(one.get(), other.get())
