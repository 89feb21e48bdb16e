"""Caches on the device, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash

from ..kit.caches import Built, CacheCase, build, cases, check_close, same_bits
from .common import own_stream, skip_without

_DTYPES = "float16", "bfloat16", "float32", "float64"
#: More entries and tokens than there are warps, and rows of several tiles.
_LARGE = CacheCase(
    "float16", lengths=tuple(range(0, 960, 30)), slots=1024, queries=64, new=64, pairs=32,
    table_rows=1100, heads=(8, 2), dims=(128, 128), counts=True, options=(("causal", True),),
)  # fmt: skip


def _on_device(cp: Any, built: Built) -> tuple[list[Any], dict[str, Any]]:
    """The buffers of the caches on the device, and all arrays by argument name."""
    raw = [cp.asarray(buffer) for buffer in built.raw]
    arrays = {name: cp.asarray(array) for name, array in built.arrays.items()}
    return raw, arrays | dict(zip(("k_cache", "v_cache"), built.views(raw), strict=True))


def _check_buffers(built: Built, raw: Any, arrays: Any, expected: Any, overflow: Any) -> None:
    assert all(same_bits(a.get(), b) for a, b in zip(raw, expected, strict=True))
    if built.case.counts:
        assert arrays["overflow"].get().tolist() == overflow.tolist()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_appended_bits_are_those_of_the_reference_and_no_other_changes(cp: Any, dtype: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(cases(dtypes=(dtype,), appends=True))
    def check(case: CacheCase) -> None:
        built = build(case)
        expected, overflow = built.expected(attends=False)
        raw, arrays = _on_device(cp, built)
        own = {name: arrays[name] for name in (*built.appended, "k_cache", "v_cache")}
        cuflash.append_kv(**own, **built.keywords)
        _check_buffers(built, raw, arrays, expected, overflow)

    check()


def test_large_caches_of_pages(cp: Any) -> None:
    built = build(replace(_LARGE, kind="paged", slots=16, pages=64, strides="hnd"))
    expected, overflow = built.expected(attends=False)
    raw, arrays = _on_device(cp, built)
    own = {name: arrays[name] for name in (*built.appended, "k_cache", "v_cache")}
    cuflash.append_kv(**own, **built.keywords)
    _check_buffers(built, raw, arrays, expected, overflow)


@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2"])
@pytest.mark.parametrize(
    "case",
    [
        replace(_LARGE, lengths=(0, 3, 960, 1020), queries=3, new=8),
        replace(_LARGE, lengths=(5, 900), queries=1, new=1, interleaved=True, strides="together"),
        replace(_LARGE, lengths=(5, 900), new=None, pairs=0, counts=False, queries=2),
    ],
)
def test_attention_is_that_of_the_reference(cp: Any, case: CacheCase, algorithm: Any) -> None:
    built = build(case)
    truth, truth_lse, expected, overflow = built.expected()
    raw, arrays = _on_device(cp, built)
    out, lse = cuflash.attention_with_kvcache(
        **arrays, **built.keywords, **built.options, algorithm=algorithm, return_lse=True
    )
    check_close(case, out.get(), truth)
    check_close(case, lse.get(), truth_lse)
    _check_buffers(built, raw, arrays, expected, overflow)


def test_a_graph_reads_lengths_when_it_runs(cp: Any) -> None:
    """A graph of one step is replayed 64 times; each replay appends after the token before."""
    tokens, case = 64, replace(_LARGE, lengths=(0, 7), queries=1, new=1)
    built = build(case)
    raw, arrays = _on_device(cp, built)
    step = cp.array(1, cp.int32)
    stream = own_stream(cp)
    with stream:
        call = {**arrays, **built.keywords, **built.options}
        cuflash.attention_with_kvcache(**call)
        arrays["cache_seqlens"].set(np.array(case.lengths, np.int32))
        stream.begin_capture()
        out = cuflash.attention_with_kvcache(**call)
        arrays["cache_seqlens"] += step
        graph = stream.end_capture()
        for _ in range(tokens):
            truth, _, expected, _ = built.expected()
            graph.launch(stream)
            stream.synchronize()
            check_close(case, out.get(), truth)
            for host, buffer in zip(built.raw, expected, strict=True):
                host[...] = buffer
            built.arrays["cache_seqlens"] += 1
    assert all(same_bits(a.get(), b) for a, b in zip(raw, built.raw, strict=True))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"algorithm": "fa1"},
        {"algorithm": "fa2", "kv_chunk": 0},
        {"algorithm": "fa2", "kv_chunk": 256},  # a kernel merges the chunks
        {"algorithm": "fa3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_replayed_step_has_the_bits_of_an_eager_one(cp: Any, more: Any, tokens: int) -> None:
    """Append and attention are captured once, then replayed with other lengths and caches."""
    skip_without(more.get("algorithm", "auto"))
    case = replace(_LARGE, lengths=(0, 7, 500), queries=tokens, new=tokens)
    first = build(case)
    raw, arrays = _on_device(cp, first)
    call = {**arrays, **first.keywords, **first.options, **more}
    stream = own_stream(cp)
    with stream:
        out, lse = cuflash.attention_with_kvcache(**call, return_lse=True)
        call |= {"out": out, "lse_out": lse, "return_lse": True}
        cuflash.attention_with_kvcache(**call)
        stream.begin_capture()
        with pytest.raises(cuflash.ArgumentTypeError, match="5 in a capture"):
            cuflash.attention_with_kvcache(**{**call, "cache_seqlens": 5})
        cuflash.attention_with_kvcache(**call)
        graph = stream.end_capture()
        steps = (lambda: graph.launch(stream), lambda: cuflash.attention_with_kvcache(**call))
        for lengths in ((900, 0, 1024), (1023, 255, 256), (3, 3, 3)):  # some have no room
            built = build(replace(case, lengths=lengths, seed=sum(lengths)))
            replayed, eager = (_after(stream, step, built, raw, call) for step in steps)
            assert all(same_bits(a, b) for a, b in zip(replayed, eager, strict=True))


def _after(stream: Any, step: Any, built: Built, raw: Any, call: Any) -> list[Any]:
    """The content of all memory that a step may write, from given contents before it."""
    for buffer, values in zip(raw, built.raw, strict=True):
        buffer.set(values)
    for name, values in built.arrays.items():
        call[name].set(values)
    written = [*raw, *(call[name] for name in ("overflow", "out", "lse_out"))]
    for result in written[-2:]:
        result.fill(np.nan)
    step()
    stream.synchronize()
    return [array.get() for array in written]


@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2", "fa3"])
def test_a_prepared_step_is_the_call_itself_in_a_graph_too(cp: Any, algorithm: Any) -> None:
    skip_without(algorithm)
    built = build(replace(_LARGE, lengths=(0, 7, 500, 1023), queries=1, new=1))
    raw, arrays = _on_device(cp, built)
    call = {**arrays, **built.keywords, **built.options, "algorithm": algorithm}
    ready = cuflash.prepare(operation="kvcache", **call)
    workspace = cp.empty(ready.workspace_bytes, np.uint8)
    stream = own_stream(cp)
    with stream:
        out, lse = cuflash.attention_with_kvcache(**call, return_lse=True)
        call |= {"out": out, "lse_out": lse, "return_lse": True}
        named = {**arrays, "out": out, "lse": lse}
        pointers = {name: named[name].data.ptr for name in ready.tensors}

        def run() -> None:
            workspace.fill(255)
            ready.run(pointers, workspace=workspace.data.ptr)

        eager = _after(stream, lambda: cuflash.attention_with_kvcache(**call), built, raw, call)
        prepared = _after(stream, run, built, raw, call)
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        replayed = _after(stream, lambda: graph.launch(stream), built, raw, call)
    for found in (prepared, replayed):
        assert all(same_bits(a, b) for a, b in zip(found, eager, strict=True))
