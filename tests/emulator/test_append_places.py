"""Appending wherever arrays lie: on another device, at any byte, in a graph, and in many rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.caches import device as on_stream

from ..kit.caches import Built, CacheCase, build, check_close, same_bits
from .build import compiler
from .host_cupy import HostCupy, host_cupy
from .test_append_kv import on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASE = CacheCase(
    "float16", lengths=(3, 0, 17), slots=24, queries=3, new=3, pairs=5, table_rows=40,
    dims=(16, 16), counts=True, options=(("causal", True),),
)  # fmt: skip
_EQUAL = replace(_CASE, lengths=(5, 5, 5))


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    on_stream._kept_for_graphs.clear()
    yield
    on_stream._kept_for_graphs.clear()


def _called(host: HostCupy, built: Built, arrays: dict[str, Any], attends: bool) -> Any:
    """Out and lse of attention, or None of an append alone."""
    if attends:
        given = {**arrays, **built.keywords, **built.options, "algorithm": "fa2"}
        return host.call(cuflash.attention_with_kvcache, **given, return_lse=True)
    names = {*built.appended, "k_cache", "v_cache"} & {*arrays}
    given = {name: arrays[name] for name in names} | built.keywords
    return host.call(cuflash.append_kv, **given)


def _check(built: Built, raw: list[Any], arrays: dict[str, Any], results: Any) -> None:
    *truth, expected, overflow = built.expected(attends=results is not None)
    for got, wanted in zip(results or (), truth, strict=True):
        check_close(built.case, got.peek(), wanted)
    assert all(same_bits(a.peek(), b) for a, b in zip(raw, expected, strict=True))
    assert arrays["overflow"].peek().tolist() == overflow.tolist()


def _with_gaps(host: HostCupy, array: np.ndarray, device: int = 0) -> Any:
    """A device array whose last axis has gaps, which the kernel cannot read."""
    return host.array(np.repeat(array, 2, axis=-1), device)[..., ::2]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("attends", [False, True])
def test_arrays_of_a_device_that_is_not_the_current_one(
    attends: bool, number: bool, gaps: bool
) -> None:
    """All allocations and launches are on their device, on its current stream."""
    built = build(_EQUAL if number else _CASE)
    with host_cupy() as host, host.runtime.on_stream(77, 1):
        raw, arrays = on_device(host, built, device=1)
        if number:
            arrays["cache_seqlens"] = 5
        for name in "qkv" * gaps:
            arrays[name] = _with_gaps(host, built.arrays[name], device=1)
        assert host.runtime.device == 0
        results = _called(host, built, arrays, attends)
        assert {array.data.device_id for array in results or ()} <= {1}
        _check(built, raw, arrays, results)


def test_a_capture_is_that_of_the_stream_of_the_arrays() -> None:
    """Whether the current device's stream captures makes no difference."""
    built = build(_EQUAL)
    for captured, device in ((77, 1), (78, 0)):
        with (
            host_cupy() as host,
            host.runtime.on_stream(77, 1),
            host.runtime.on_stream(78, 0),
        ):
            raw, arrays = on_device(host, built, device=1)
            arrays["cache_seqlens"] = 5
            with host.runtime.capture(captured) as steps:
                if device == 1:
                    with pytest.raises(cuflash.ArgumentTypeError, match="5 in a capture"):
                        _called(host, built, arrays, False)
                else:
                    _called(host, built, arrays, False)
                    _check(built, raw, arrays, None)
            assert not steps


def _at_odd_bytes(host: HostCupy, array: np.ndarray) -> Any:
    """The same elements without gaps, one byte after an aligned address."""
    held = np.concatenate([np.zeros(1, np.uint8), array.reshape(-1).view(np.uint8)])
    return host.array(held)[1:].view(array.dtype).reshape(array.shape)


def _at_odd_strides(host: HostCupy, array: np.ndarray) -> Any:
    """The same elements in rows without gaps; every other row begins at an odd byte."""
    rows = array.reshape(-1, array.shape[-1]).view(np.uint8)
    held = np.concatenate([rows, np.zeros((len(rows), 1), np.uint8)], axis=1).reshape(-1)
    size, each = array.itemsize, rows.shape[1] + 1
    strides = tuple(each * int(np.prod(array.shape[axis + 1 : -1], dtype=int)) for axis in range(3))
    whole = host.array(np.append(held, np.zeros(-len(held) % size, np.uint8)))
    return host.cupy.ndarray(array.shape, array.dtype, whole.data, (*strides, size))


@pytest.mark.parametrize("place", [_at_odd_bytes, _at_odd_strides])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_elements_that_are_not_aligned_are_copied(dtype: str, name: str, place: Any) -> None:
    """The kernel reads no unaligned element, which would be an error on a GPU."""
    built = build(replace(_CASE, dtype=dtype))
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        arrays[name] = place(host, built.arrays[name])
        _check(built, raw, arrays, _called(host, built, arrays, True))


def _others_take_the_memory(host: HostCupy, stream: int) -> list[Any]:
    """New arrays of every size in use on the stream, full of NaN: free blocks are taken."""
    gc.collect()
    sizes = {block.nbytes for block in host.runtime.memory.blocks if block.stream == stream}
    return [host.cupy.empty(size, np.uint8) for size in sizes for _ in range(4)]


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("gaps", ["k", "v", "qkv"])
def test_a_graph_keeps_copies_of_what_it_appends(gaps: str, attends: bool) -> None:
    """Their memory is not reused after the call; a replay appends the values of its time."""
    case = _CASE
    with host_cupy() as host, host.runtime.on_stream(77, 0):
        first = build(case)
        raw, arrays = on_device(host, first)
        for name in gaps:
            arrays[name] = _with_gaps(host, first.arrays[name])
        with host.runtime.capture(77) as steps:
            results = _called(host, first, arrays, attends)
        taken = _others_take_the_memory(host, 77)
        for seed in (1, 2):
            built = build(replace(case, seed=seed))
            for buffer, values in zip(raw, built.raw, strict=True):
                buffer.set(values)
            for name, values in built.arrays.items():
                arrays[name].set(values)
            for step in steps:
                step()
            _check(built, raw, arrays, results)
        del taken


@pytest.mark.parametrize("new", [0, 1])
def test_few_warps_take_all_rows_and_entries_in_turns(new: int) -> None:
    """A multiprocessor has eight blocks of eight warps; a warp takes several rows and entries."""
    lengths = tuple(i % 9 for i in range(150))  # the last ones have no room
    built = build(CacheCase("float16", lengths=lengths, new=new, heads=(2, 1), counts=True))
    rotated = build(replace(built.case, queries=2, pairs=2, table_rows=8, positions=lengths))
    for one, attends in ((built, False), (rotated, True)):
        with host_cupy("90", 1) as host:
            raw, arrays = on_device(host, one)
            _check(one, raw, arrays, _called(host, one, arrays, attends))
