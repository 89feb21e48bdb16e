"""Caches in pages, in other entries and after padding, in CUDA memory, called as a user does."""

from __future__ import annotations

import ctypes
import mmap
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
from .host_cupy.array import Pointer
from .host_cupy.memory import MARGIN, Block
from .test_append_kv import on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Lengths at edges of pages and of tiles, 0, and the whole capacity.
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
    given = {**arrays, **built.keywords, **built.options, "algorithm": algorithm, **more}
    return raw, arrays, host.call(cuflash.attention_with_kvcache, **given, return_lse=True)


def check(built: Built, raw: list[Any], arrays: dict[str, Any], results: Any) -> None:
    """Compare results and caches with the reference."""
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
    "many-queries": replace(_PAGED, queries=17, options=(("causal", True),)),
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


@pytest.mark.in_turns(by="case", days=4)
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(case: CacheCase, algorithm: str) -> None:
    built = build(case)
    plans: list[Any] = []
    with host_cupy() as host, observe(plans.append):
        check(built, *attended(host, built, algorithm))
    assert [plan.algorithm for plan in plans if "k" in plan.problem.shapes][-1] == algorithm


@pytest.mark.in_turns(by="slots", days=3)
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("slots", [8, 16, 32, 64, 128, 256])
def test_pages_have_the_bits_of_rows_that_follow_each_other(slots: int, algorithm: str) -> None:
    """Both calls have the same tile. Keys are split, or not."""
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
    """The pages of every entry in order; NaN where its table names no page."""
    table = built.arrays["page_table"]
    there = (table >= 0) & (table < len(cache))
    pages = np.where(there[..., None, None, None], cache[np.where(there, table, 0)], np.nan)
    return pages.astype(cache.dtype).reshape(len(table), -1, *cache.shape[2:])


@pytest.mark.in_turns(by="dtype", days=4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_any_caches(dtype: str) -> None:
    @settings(max_examples=40)
    @given(cases(dtypes=(dtype,)))
    def holds(case: CacheCase) -> None:
        built = build(case)
        with host_cupy() as host:
            check(built, *attended(host, built, "auto"))

    holds()


class _Walled(Block):
    """A block directly before memory that the process may not read."""

    def check(self) -> None:
        """There is nothing to check: no write after the block is possible."""


def _before_a_wall(host: HostCupy, values: np.ndarray) -> Any:
    """A device array that ends directly before memory that the process may not read."""
    page = mmap.PAGESIZE
    size = -(-(MARGIN + values.nbytes) // page) * page
    held = np.frombuffer(mmap.mmap(-1, size + page), np.uint8)
    wall = ctypes.c_void_p(held.ctypes.data + size)
    assert ctypes.CDLL(None, use_errno=True).mprotect(wall, page, 0) == 0
    start = size - values.nbytes
    place = held.ctypes.data + start
    block = _Walled(held[start - MARGIN :], place, values.nbytes, 0, 0)
    host.runtime.memory.blocks.append(block)
    pointer = Pointer(place, 0, held, block)
    array = host.cupy.ndarray(values.shape, values.dtype, pointer)
    array.set(values)
    return array


@pytest.mark.parametrize("lengths", [(48, 48), (48, 17), (3, 33), (48, 1), (16, 0)])
def test_a_table_is_read_where_keys_count(lengths: tuple[int, ...]) -> None:
    """A block reaches beyond all pages, and the memory after the table must not be read."""
    built = build(replace(_PAGED, pages=3, lengths=lengths))
    table = np.ascontiguousarray(built.arrays["page_table"])
    for algorithm in ("fa2", "fa3"):
        with host_cupy() as host:
            raw, arrays = on_device(host, built)
            arrays["page_table"] = _before_a_wall(host, table)
            given = {**arrays, "algorithm": algorithm, "return_lse": True}
            results = host.call(cuflash.attention_with_kvcache, **given)
            check(built, raw, arrays, results)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("page", [-1, 14, 2**31 - 1, -(2**31)])
def test_a_page_that_is_not_there_is_not_read(page: int, algorithm: str) -> None:
    """Other entries are right, and a wrong page number reads no memory outside of the cache."""
    built = build(replace(_PAGED, pages=6, lengths=(96, 70)))
    table = built.arrays["page_table"].copy()
    table[0, 3] = page
    wrong = replace(built, arrays=built.arrays | {"page_table": table})
    with host_cupy() as host:
        _, _, results = attended(host, wrong, algorithm)
        truth, truth_lse, *_ = built.expected()
        check_close(built.case, results[0].peek()[1:], truth[1:])
        check_close(built.case, results[1].peek()[1:], truth_lse[1:])


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_tail_behind_the_last_page_is_cleared(algorithm: str) -> None:
    """The tail repeats another page. Its infinite values times weights of 0 would be NaN."""
    built = build(replace(_PAGED, pages=3, lengths=(48, 48)))
    page = built.arrays["page_table"][0, 2]
    built.caches["v_cache"][page, 5, :, 7] = np.inf
    with host_cupy() as host:
        raw, arrays, results = attended(host, built, algorithm)
        assert np.isinf(results[0].peek()[0, ..., 7]).all()
        check(built, raw, arrays, results)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_padding_is_clamped(algorithm: str) -> None:
    """Padding is clamped to 0 and to the length."""
    clamped = (0, 64, 1, 100)
    built = build(replace(_PADDED, lengths=(64, 64, 1, 100), leftpad=clamped))
    given = np.array([-(2**31), 2**31 - 1, 2, 101], np.int32)
    wrong = replace(built, arrays=built.arrays | {"cache_leftpad": given})
    with host_cupy() as host:
        raw, arrays, results = attended(host, wrong, algorithm)
        check(built, raw, arrays, results)


@pytest.mark.parametrize("slots", [24, 48, 192, 320])
def test_tiles_go_with_pages(slots: int) -> None:
    """Page sizes need not be powers of two."""
    case = replace(_PAGED, slots=slots, pages=3, lengths=(0, slots, 3 * slots - 1), queries=3)
    built = build(case)
    plans: list[Any] = []
    with host_cupy() as host, observe(plans.append):
        check(built, *attended(host, built, "fa3"))
    (tile,) = {plan.tile.block_kv for plan in plans}
    assert tile % slots == 0 or slots % tile == 0


@pytest.mark.parametrize(
    ("slots", "leftpad", "said"),
    [
        (12, None, "fa3 takes pages of a multiple of 8 keys, not of 12"),
        (72, None, "fa3 has no tile for head_dim 64/64 and pages of 72 keys"),
        (16, (1, 0), "fa3 takes no cache_leftpad beside a page_table"),
    ],
)
def test_what_fa3_does_not_take_fa2_does(slots: int, leftpad: Any, said: str) -> None:
    case = replace(_PAGED, slots=slots, pages=3, lengths=(30, 1), leftpad=leftpad, queries=17)
    built = build(case)
    with host_cupy() as host:
        with pytest.raises(cuflash.UnsupportedError, match=said):
            attended(host, built, "fa3")
        plans: list[Any] = []
        with observe(plans.append):
            check(built, *attended(host, built, "auto"))
    assert plans[-1].algorithm == "fa2"
    assert said in dict(plans[-1].rejected)["fa3"]
