"""Attention with caches in CUDA memory, as a user calls it: append, rotate, attend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.caches import device

from ..kit.caches import Built, CacheCase, build, check_close, same_bits
from .build import compiler
from .host_cupy import HostCupy, host_cupy
from .test_append_kv import on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASE = CacheCase(
    "float16", lengths=(3, 0, 17, 30), slots=32, queries=3, new=3, pairs=5, table_rows=40,
    dims=(16, 16), counts=True, options=(("causal", True),), strides="hnd",
)  # fmt: skip


def _attend(host: HostCupy, arrays: dict[str, Any], built: Built, **more: Any) -> Any:
    given = {**arrays, **built.keywords, **built.options, "algorithm": "fa2", **more}
    return host.call(cuflash.attention_with_kvcache, **given, return_lse=True)


def _check(built: Built, raw: list[Any], arrays: dict[str, Any], results: Any) -> None:
    truth, truth_lse, expected, overflow = built.expected()
    check_close(built.case, results[0].peek(), truth)
    check_close(built.case, results[1].peek(), truth_lse)
    assert all(same_bits(a.peek(), b) for a, b in zip(raw, expected, strict=True))
    if built.case.counts:
        assert arrays["overflow"].peek().tolist() == overflow.tolist()


@pytest.mark.parametrize(
    "case",
    [
        _CASE,
        replace(_CASE, interleaved=True, positions=(0, 5, 9, 1), queries=1),
        replace(_CASE, pairs=0, new=1, strides="together", slopes=True, sinks=True),
        replace(_CASE, options=(("causal", False),), new=2),  # all rows at one position
        replace(_CASE, options=(("causal", False),), positions=(0, 5, 38, 40)),
        replace(_CASE, options=(("window_size", (4, 0)),), strides="gaps"),
        replace(_CASE, new=None, pairs=0, counts=False),
        replace(_CASE, lengths=(32, 32, 31, 30), table_rows=32, dtype="float32"),  # NaN queries
    ],
    ids=["causal", "positions", "features", "full", "tables", "window", "nothing-new", "beyond"],
)
def test_attention_is_that_of_the_reference(case: CacheCase) -> None:
    built = build(case)
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        _check(built, raw, arrays, _attend(host, arrays, built))


def test_a_number_is_the_length_of_all_entries() -> None:
    built = build(replace(_CASE, lengths=(5, 5, 5, 5)))
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        del arrays["cache_seqlens"]
        _check(built, raw, arrays, _attend(host, arrays, built, cache_seqlens=5))


def test_a_graph_reads_lengths_when_it_runs() -> None:
    """It is captured with other lengths and replayed step after step; its memory is not reused."""
    first = build(replace(_CASE, lengths=(1, 1, 1, 1)))
    device._kept_for_graphs.clear()
    with host_cupy() as host, host.runtime.on_stream(77, 0):
        raw, arrays = on_device(host, first)
        with host.runtime.capture(77) as steps:
            with pytest.raises(cuflash.ArgumentTypeError, match="5 in a capture"):
                _attend(host, {**arrays, "cache_seqlens": 5}, first)
            assert not steps
            results = _attend(host, arrays, first)
        for lengths in (_CASE.lengths, (32, 29, 0, 8), _CASE.lengths):
            built = build(replace(_CASE, lengths=lengths, seed=sum(lengths)))
            for buffer, values in zip(raw, built.raw, strict=True):
                buffer.set(values)
            for name, values in built.arrays.items():
                arrays[name].set(values)
            for step in steps:
                step()
            _check(built, raw, arrays, results)
    device._kept_for_graphs.clear()


@pytest.mark.parametrize("name", ["page_table", "cache_batch_idx", "cache_leftpad"])
def test_what_fa1_does_not_take_is_refused_before_a_cache_is_written(name: str) -> None:
    kind = {"page_table": "paged", "cache_batch_idx": "indexed"}.get(name, "plain")
    case = CacheCase("float16", kind=kind, leftpad=(1, 0) if kind == "plain" else None)
    built = build(case)
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        with pytest.raises(cuflash.UnsupportedError, match=r"^fa1 does not take page_table"):
            _attend(host, arrays, built, algorithm="fa1")
        assert all(same_bits(a.peek(), b) for a, b in zip(raw, built.raw, strict=True))


@pytest.mark.parametrize("columns", [0, 2])
def test_pages_of_no_slots_are_refused(columns: int) -> None:
    """Pages of 0 slots are refused for any table: the kernels could not read them."""
    built = build(CacheCase("float16", kind="paged", slots=4, pages=2, counts=True))
    with host_cupy() as host:
        _, arrays = on_device(host, built)
        arrays |= {name: arrays[name][:, :0] for name in ("k_cache", "v_cache")}
        arrays["page_table"] = arrays["page_table"][:, :columns]
        with pytest.raises(cuflash.ArgumentValueError, match=r"^k_cache: got pages of 0 slots"):
            _attend(host, arrays, built)


def test_errors_of_attention_come_before_a_cache_is_written() -> None:
    built = build(CacheCase("float16", counts=True))
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        for more in ({"algorithm": "fa4"}, {"blocks": (7, 7)}, {"window_size": (-1, 0)}):
            with pytest.raises(cuflash.CuflashError):
                _attend(host, arrays, built, **more)
        with pytest.raises(cuflash.ArgumentValueError, match=r"^backend: got 'numpy'"):
            _attend(host, arrays, built, backend="numpy")
        lengths = np.array([3, 0], np.int32)
        with pytest.raises(cuflash.ArgumentValueError, match=r"^cache_seqlens: .*host memory"):
            _attend(host, {**arrays, "cache_seqlens": lengths}, built)
        assert all(same_bits(a.peek(), b) for a, b in zip(raw, built.raw, strict=True))


def test_what_a_batch_of_the_usual_size_refuses_comes_before_a_cache_is_written() -> None:
    """A grid has enough blocks for the chunks of one entry, but not for those of eight."""
    slots, pages, columns = 2**16, 2**14 - 1, 8
    with host_cupy() as host:
        zeros = np.zeros((1, slots, 32, columns), np.float16)
        ones = np.ones((1, 1, 32, columns), np.float16)
        caches = {"k_cache": host.array(zeros), "v_cache": host.array(zeros)}
        arrays = {"q": host.array(np.ones((1, 2, 32, columns), np.float16)), **caches}
        arrays |= {"k": host.array(ones), "v": host.array(ones)}
        arrays["cache_seqlens"] = host.array(np.zeros(1, np.int32))
        arrays["page_table"] = host.array(np.zeros((1, pages), np.int32))
        said = "splitting keys would need 4,294,"  # 2^32 less the blocks of one page
        with pytest.raises(cuflash.UnsupportedError, match=said):
            host.call(cuflash.attention_with_kvcache, **arrays, algorithm="fa2", kv_chunk=64)
        assert not any(cache.peek().any() for cache in caches.values())


def test_room_that_the_host_knows_of_is_checked() -> None:
    built = build(CacheCase("float16"))
    with host_cupy() as host:
        _, arrays = on_device(host, built)
        del arrays["cache_seqlens"]
        with pytest.raises(cuflash.ArgumentValueError, match=r"^k: got 2 new tokens behind 7"):
            _attend(host, arrays, built, cache_seqlens=7)


def test_what_is_read_may_have_any_strides() -> None:
    built = build(_CASE)
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        for name in "qkv":
            twice = np.repeat(built.arrays[name], 2, axis=-1)
            arrays[name] = host.array(twice)[..., ::2]
        _check(built, raw, arrays, _attend(host, arrays, built))
