"""Packed queries over caches in CUDA memory, as a user calls them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash

from ..kit.caches import Built, CacheCase, same_bits
from ..kit.packed_queries import PackedCase, build_packed, packed_cases
from .build import compiler
from .host_cupy import host_cupy
from .test_append_kv import on_device
from .test_paged_caches import attended, check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Entries without queries, without keys, with fewer keys than queries, and with few and many rows.
_PLAIN = CacheCase(
    "float16", lengths=(65, 0, 7, 200, 129, 200), slots=200, new=None, heads=(4, 2), dims=(64, 64),
    options=(("causal", True),),
)  # fmt: skip
_COUNTS = 1, 3, 9, 0, 70, 2
_PAGED = replace(_PLAIN, kind="paged", slots=16, pages=13)
_INDEXED = replace(_PLAIN, kind="indexed", leftpad=(60, 0, 3, 5, 0, 199))
_FLOAT8 = replace(_PLAIN, float8="each", dtype="bfloat16", dims=(128, 128))
_CASES = {
    "plain": _PLAIN,
    "full": replace(_PLAIN, options=()),
    "pages": _PAGED,
    "pages-of-64": replace(_PAGED, slots=64, pages=4, dims=(128, 128), dtype="bfloat16"),
    "entries": replace(_INDEXED, leftpad=None),
    "padding": _INDEXED,
    "slopes": replace(_PLAIN, slopes=True, sinks=True),
    "slopes-padding": replace(_INDEXED, slopes=True, options=()),
    "window": replace(_PLAIN, options=(("window_size", (20, 3)),), sinks=True),
    "left-window": replace(_PAGED, options=(("window_size", (20, None)),)),
    "endless-window": replace(_INDEXED, options=(("window_size", (2**31 - 1, 10**20)),)),
    "softcap": replace(_PAGED, options=(("softcap", 2.0), ("causal", True), ("scale", 0.3))),
    "infinite": replace(_PAGED, poison=float("inf")),
    "heads-first": replace(_PAGED, strides="hnd"),
    "together": replace(_PLAIN, strides="together"),
}  # fmt: skip
_NEW = replace(
    _PLAIN, new=1, pairs=8, table_rows=300, lengths=(65, 0, 7, 130, 129, 190), counts=True
)
_APPENDED = {
    "appended": _NEW,
    "appended-full": replace(_NEW, options=(), positions=(0, 3, 5, 7, 9, 299)),
    "appended-plain": replace(_NEW, pairs=0, slopes=True, sinks=True),
    "appended-pages": replace(_NEW, kind="paged", slots=16, pages=13, interleaved=True),
    "appended-entries": replace(_NEW, kind="indexed", leftpad=(60, 0, 3, 5, 0, 189)),
    "appended-without-room": replace(_NEW, lengths=(200, 198, 196, 3, 170, 199)),
}
_OF_FA3 = {
    "float8-appended": replace(_NEW, float8="each", dtype="bfloat16"),
    "float8": _FLOAT8,
    "float8-pages": replace(_PAGED, float8="mixed", sinks=True),
    "float8-slopes": replace(_FLOAT8, slopes=True, float8="each", dims=(64, 64)),
}


def _attended(built: Built, algorithm: str, **more: Any) -> tuple[Any, Any, Any]:
    more = {"max_seqlen_q": int(np.diff(built.arrays["cu_seqlens_q"]).max()), **more}
    with host_cupy() as host:
        raw, arrays, results = attended(host, built, algorithm, **more)
        check(built, raw, arrays, results)
        return [array.peek() for array in results]


@pytest.mark.in_turns(by="case", days=4)
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("case", (_CASES | _APPENDED).values(), ids=_CASES | _APPENDED)
def test_attention_is_that_of_the_reference(case: CacheCase, algorithm: str) -> None:
    _attended(build_packed(case, _COUNTS, 5), algorithm)


@pytest.mark.parametrize("case", _OF_FA3.values(), ids=_OF_FA3)
def test_attention_over_float8_caches_is_that_of_the_reference(case: CacheCase) -> None:
    _attended(build_packed(case, _COUNTS, 5), "fa3")


@pytest.mark.in_turns(by="name", days=3)
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("name", ["plain", "padding", "pages-of-64", "window", "slopes"])
def test_keys_in_chunks(name: str, algorithm: str) -> None:
    """Every row merges the parts of its own entry's chunks."""
    _attended(build_packed(_CASES[name], _COUNTS, 5), algorithm, kv_chunk=128, blocks=(64, 64))


@settings(max_examples=40)
@given(packed_cases(dtypes=("float16", "bfloat16")))
def test_drawn_problems(drawn: PackedCase) -> None:
    case, counts, behind = drawn
    built = build_packed(case, counts, behind)
    most = max(counts)
    with host_cupy() as host:
        check(built, *attended(host, built, "auto", max_seqlen_q=most))


@pytest.mark.parametrize("chunk", [0, 128])
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_an_entry_has_its_bits_alone_and_among_others(algorithm: str, chunk: int) -> None:
    """A call without packing, with the same tile and chunk, gives these bits too."""
    case = replace(_PAGED, sinks=True, slopes=True)
    every = build_packed(case, _COUNTS, 2)
    more = {"kv_chunk": chunk, "blocks": (64, 64), "max_seqlen_q": 70}
    out, lse = _attended(every, algorithm, **more)
    at = every.arrays["cu_seqlens_q"]
    for b in (2, 4, 5):
        own = _of_entry(every, b)
        rows = slice(at[b], at[b + 1])
        alone = _attended(own, algorithm, **more)
        assert same_bits(alone[0], out[rows])
        assert same_bits(alone[1], np.ascontiguousarray(lse[:, rows]))


def _of_entry(built: Built, b: int) -> Built:
    """One entry's queries over the same pages."""
    at = built.arrays["cu_seqlens_q"]
    found = {"q": built.arrays["q"][at[b] : at[b + 1]], "cu_seqlens_q": at[[b, b + 1]] - at[b]}
    for name in ("cache_seqlens", "page_table", "alibi_slopes"):
        found[name] = built.arrays[name][b : b + 1]
    return replace(built, arrays=built.arrays | found)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("way", ["arrays", "shapes"])
@pytest.mark.parametrize("name", ["plain", "slopes", "padding", "appended"])
def test_a_prepared_call_does_what_the_call_does(name: str, way: str, algorithm: Any) -> None:
    """It runs over other lengths and offsets than those that it was prepared with."""
    case, counts = (_CASES | _APPENDED)[name], (2, 0, 70, 3, 1, 9)
    prepared_with, built = build_packed(case, _COUNTS, 2), build_packed(case, counts, 2)
    options = {"algorithm": algorithm, "max_seqlen_q": 70, **built.options, **built.keywords}
    with host_cupy() as host:
        _, arrays = on_device(host, built)
        out, lse = host.call(cuflash.attention_with_kvcache, **arrays, **options, return_lse=True)
        given: dict[str, Any] = on_device(host, prepared_with)[1]
        if way == "shapes":
            given = {name: array.shape for name, array in given.items()} | {"dtype": "float16"}
            given |= {"sinks": "float32"} if case.sinks else {}
        ready = cuflash.prepare(operation="kvcache", **given, **options)
        assert ready.tensors["out"].shape == out.shape
        assert ready.tensors["lse"].shape == lse.shape
        made = {"out": host.array(np.full(out.shape, np.nan, np.float16))}
        made["lse"] = host.array(np.full(lse.shape, np.nan, np.float32))
        arrays = on_device(host, built)[1]  # to which nothing is appended yet
        host.runtime.audit = lambda launch: None
        workspace = host.array(np.full(ready.workspace_bytes, 255, np.uint8))
        pointers = {n: (arrays | made)[n].data.ptr for n in ready.tensors}
        ready.run(pointers, workspace=workspace.data.ptr)
        assert same_bits(made["out"].peek(), out.peek())
        assert same_bits(made["lse"].peek(), lse.peek())
