"""Appending to caches by the kernel, as a user calls it."""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.arrays.spec import TensorSpec
from cuflash.caches.device import planned_append

from ..kit.caches import Built, CacheCase, build, cases, same_bits
from .build import compiler, last_blocks_first
from .device import emulated_device
from .host_cupy import HostCupy, host_cupy

__all__ = ["on_device"]

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_DTYPES = "float16", "bfloat16", "float32", "float64"


def on_device(host: HostCupy, built: Built, device: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """The buffers of the caches on a device, and all arrays by argument name."""
    raw = [host.array(buffer, device) for buffer in built.raw]
    given = {name: host.array(array, device) for name, array in built.arrays.items()}
    if "page_table" in given:  # a table with gaps between its rows
        table = built.arrays["page_table"]
        wide = np.full((table.shape[0], table.shape[1] + 1), 2**30, np.int32)
        wide[:, :-1] = table
        given["page_table"] = host.array(wide, device)[:, :-1]
    for name in {"rotary_cos", "rotary_sin"} & set(
        given
    ):  # tables with numbers after their last row
        table = built.arrays[name]
        longer = np.concatenate([table, np.ones((60, table.shape[1]), table.dtype)])
        given[name] = host.array(longer, device)[: len(table)]
    return raw, given | dict(zip(("k_cache", "v_cache"), built.views(raw), strict=True))


def _append(built: Built, **changed: Any) -> tuple[list[np.ndarray], list[int]]:
    """The buffers, and the numbers of tokens that did not fit."""
    with host_cupy() as host:
        buffers, arrays = on_device(host, built)
        own = {name: arrays[name] for name in (*built.appended, "k_cache", "v_cache")}
        own |= {name: host.array(array) for name, array in changed.items()}
        own.setdefault("overflow", host.array(np.full(built.case.batch, -7, np.int32)))
        host.call(cuflash.append_kv, **own, **built.keywords)
        return [buffer.peek() for buffer in buffers], own["overflow"].peek().tolist()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_appended_bits_are_those_of_the_reference_and_no_other_changes(dtype: str) -> None:
    @settings(max_examples=60)
    @given(cases(dtypes=(dtype,), appends=True))
    def check(case: CacheCase) -> None:
        built = build(case)
        raw, overflow = built.expected(attends=False)
        found, missing = _append(built)
        assert all(same_bits(a, b) for a, b in zip(found, raw, strict=True))
        assert missing == overflow.tolist()

    check()


_PAGED = CacheCase(kind="paged", lengths=(3, 4), slots=4, pages=3, new=6, counts=True)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_a_page_that_is_not_there_is_not_written(page: int) -> None:
    """Its tokens are counted; tokens of other pages and other entries are written."""
    built = build(_PAGED)
    raw, _ = built.expected(attends=False)
    table = built.arrays["page_table"].copy()
    lost = table[0, 1]  # slots 4 to 7 of entry 0
    before = [view.copy() for view in built.views(built.raw)]
    table[0, 1] = page
    found, missing = _append(built, page_table=table)
    assert missing == [4, 0]
    for view, old in zip(built.views(raw), before, strict=True):
        view[lost] = old[lost]
    assert all(same_bits(a, b) for a, b in zip(found, raw, strict=True))


@pytest.mark.parametrize(("page", "missing"), [(0, 2), (31, 3), (32, 3), (38, 3), (39, 2)])
def test_tokens_of_many_pages_are_counted(page: int, missing: int) -> None:
    """There are more pages than lanes; new tokens fill a part of the first and of the last page."""
    built = build(CacheCase(kind="paged", lengths=(1,), slots=3, pages=40, new=118, counts=True))
    table = built.arrays["page_table"].copy()
    table[0, page] = -1
    assert _append(built, page_table=table)[1] == [missing]


@pytest.mark.parametrize("row", [-1, 4, 2**31 - 1])
def test_an_entry_that_is_not_there_is_not_written(row: int) -> None:
    built = build(CacheCase(kind="indexed", lengths=(3, 4), new=2, counts=True))
    raw, _ = built.expected(attends=False)
    rows = built.arrays["cache_batch_idx"].copy()
    lost, rows[0] = rows[0], row
    before = [view.copy() for view in built.views(built.raw)]
    found, missing = _append(built, cache_batch_idx=rows)
    assert missing == [2, 0]
    for view, old in zip(built.views(raw), before, strict=True):
        view[lost] = old[lost]
    assert all(same_bits(a, b) for a, b in zip(found, raw, strict=True))


@pytest.mark.parametrize(
    ("lengths", "counted", "missing"),
    [((-1, -(2**31)), (0, 0), [0, 0]), ((9, 2**31 - 1), (8, 8), [2, 2]), ((7, 8), (7, 8), [1, 2])],
)
def test_lengths_are_clamped(lengths: Any, counted: Any, missing: list[int]) -> None:
    built = build(CacheCase(lengths=counted, new=2, counts=True))
    raw, _ = built.expected(attends=False)
    found = _append(built, cache_seqlens=np.array(lengths, np.int32))
    assert all(same_bits(a, b) for a, b in zip(found[0], raw, strict=True))
    assert found[1] == missing


@pytest.mark.parametrize("positions", [(-1, 0), (-(2**31), 0), (2**31 - 1, 0), (5, 0)])
def test_a_token_without_angles_is_not_written(positions: tuple[int, int]) -> None:
    """An entry whose first position is before the tables gets no tokens."""
    fits = 0 if positions[0] != 5 else 1
    case = CacheCase(lengths=(1, 1), new=3, pairs=2, positions=positions, table_rows=6)
    built = build(replace(case, counts=True))
    raw, overflow = built.expected(attends=False)
    found, missing = _append(built)
    assert missing == [3 - fits, 0] == overflow.tolist()
    assert all(same_bits(a, b) for a, b in zip(found, raw, strict=True))


def test_the_order_of_blocks_does_not_matter() -> None:
    case = replace(_PAGED, lengths=tuple(range(9)), new=3, heads=(2, 2), strides="hnd")
    built = build(case)
    first = _append(built)
    with last_blocks_first():
        second = _append(build(case))
    assert all(same_bits(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1] == second[1]


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_new_is_counted_too(batch: int) -> None:
    built = build(CacheCase(lengths=(3,) * batch, new=0, counts=True))
    assert _append(built)[1] == [0] * batch


@pytest.mark.parametrize("paged", [False, True])
def test_offsets_have_64_bits(paged: bool) -> None:
    """A cache whose entries lie more than 2^31 elements apart, in a file with holes."""
    step, width, slots = 2**31 + 2**13, 16, 4
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * (3 * step + slots * width))
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0), np.float16)
        strides = 2 * step, 2 * width, 2 * width, 2
        cache = np.lib.stride_tricks.as_strided(whole, (4, slots, 1, width), strides)
        new = np.arange(1, width + 1, dtype=np.float16).reshape(1, 1, 1, width)
        arrays = {"k": new, "v": new, "k_cache": cache, "v_cache": cache}
        arrays["cache_seqlens"] = np.array([2], np.int32)
        place = "page_table" if paged else "cache_batch_idx"
        arrays[place] = np.array([[3]] if paged else [3], np.int32)
        _run(arrays, {"capacity": slots, "page_size": slots * paged, "table_stride": 1})
        assert (cache[3, 2] == new[0, 0]).all()
        assert not cache[3, 1].any()
        assert not cache[0].any()


def _run(arrays: dict[str, np.ndarray], numbers: dict[str, int]) -> None:
    """Run the kernel on the memory of NumPy's arrays."""
    specs = tuple(
        (name, TensorSpec(a.shape, a.dtype.name, tuple(s // a.itemsize for s in a.strides),
                          a.itemsize, 0))
        for name, a in arrays.items()
    )  # fmt: skip
    numbers = {"rotary_interleaved": 0, "queries_advance": 0, **numbers}
    with emulated_device("90"):
        ready = planned_append(specs, tuple(numbers.items()), 0).launcher
        ready.run(tuple(a.ctypes.data for a in arrays.values()), 0, 0)
