"""Prepared calls with caches do what the calls themselves do, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.caches import Built, CacheCase, build, same_bits
from .build import compiler
from .host_cupy import HostCupy, host_cupy
from .test_append_kv import on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASE = CacheCase(
    "float16", lengths=(3, 0, 17, 31), slots=32, queries=3, new=3, pairs=5, table_rows=40,
    dims=(16, 16), counts=True, options=(("causal", True),),
)  # fmt: skip
_CASES = {
    "rotated": _CASE,
    "positions": replace(_CASE, positions=(0, 5, 9, 1), queries=1, strides="hnd"),
    "plain": replace(_CASE, pairs=0, slopes=True, sinks=True),
    "together": replace(_CASE, options=(("window_size", (4, 0)),), strides="together"),
    "nothing new": replace(_CASE, new=None, pairs=0, counts=False),
    "full rows": replace(_CASE, options=(("causal", False),)),
}


def _run(host: HostCupy, ready: cuflash.Prepared, arrays: dict[str, Any]) -> None:
    """Run with a workspace that holds no zeros; the audit expects no array inside it."""
    host.runtime.audit = lambda launch: None
    workspace = host.array(np.full(ready.workspace_bytes, 255, np.uint8))
    pointers = {name: arrays[name].data.ptr for name in ready.tensors}
    ready.run(pointers, workspace=workspace.data.ptr)


def _in_order(host: HostCupy, built: Built) -> tuple[list[Any], dict[str, Any]]:
    """``on_device`` with a table without gaps: prepared calls copy nothing."""
    raw, arrays = on_device(host, built)
    if "page_table" in arrays:
        arrays["page_table"] = host.array(np.ascontiguousarray(built.arrays["page_table"]))
    return raw, arrays


def _shapes(built: Built) -> dict[str, Any]:
    """What describes the arrays to ``prepare``: shapes, shapes with a dtype, or a dtype alone."""
    given: dict[str, Any] = {n: a.shape for n, a in {**built.arrays, **built.caches}.items()}
    if built.case.sinks:
        given |= {"sinks": (given["sinks"], "float32"), "alibi_slopes": "float32"}
    return given | {"cache_seqlens": "int32", "dtype": built.case.dtype}


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("way", ["arrays", "shapes"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_the_call_itself(case: CacheCase, way: str, algorithm: Any) -> None:
    _check(replace(case, strides="nhd") if way == "shapes" else case, way, {"algorithm": algorithm})


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("way", ["arrays", "shapes"])
@pytest.mark.parametrize(
    "case",
    [
        replace(_CASE, kind="paged", slots=16, pages=2),
        replace(_CASE, kind="paged", slots=16, pages=2, pairs=0, slopes=True, sinks=True),
        replace(_CASE, kind="indexed", pairs=0, slopes=True),
        replace(_CASE, leftpad=(1, 0, 17, 20)),
    ],
    ids=["pages", "pages-slopes", "entries", "padding"],
)
def test_keys_lie_where_the_call_finds_them(case: CacheCase, way: str, algorithm: Any) -> None:
    _check(case, way, {"algorithm": algorithm})


@pytest.mark.parametrize("way", ["arrays", "shapes"])
@pytest.mark.parametrize("scales", ["numbers", "each"])
def test_float8_caches_are_prepared_too(scales: str, way: str) -> None:
    case = replace(_CASE, float8=scales, strides="nhd")
    _check(case, way, {"algorithm": "fa3"})
    _check(replace(case, kind="paged", slots=16, pages=2, slopes=True, pairs=0), way, {})


@pytest.mark.parametrize("case", [_CASE, _CASES["plain"]], ids=["rotated", "plain"])
def test_parts_lie_beside_what_the_append_leaves(case: CacheCase) -> None:
    _check(case, "arrays", {"algorithm": "fa2", "kv_chunk": 16})


def _check(case: CacheCase, way: str, options: dict[str, Any]) -> None:
    built = build(case)
    with host_cupy() as host:
        raw, arrays = _in_order(host, built)
        keywords = {**built.keywords, **built.options, **options}
        described = arrays if way == "arrays" else _shapes(built)
        ready = cuflash.prepare(operation="kvcache", **described, **keywords)
        assert {*ready.tensors} == {*arrays, "out", "lse"}
        given = {**arrays, **keywords, "return_lse": True}
        out, lse = host.call(cuflash.attention_with_kvcache, **given)
        again, mine = _in_order(host, built)
        mine |= {"out": host.array(np.full_like(out.peek(), np.nan))}
        mine |= {"lse": host.array(np.full_like(lse.peek(), np.nan))}
        _run(host, ready, mine)
        pairs = [(out, mine["out"]), (lse, mine["lse"]), *zip(raw, again, strict=True)]
        pairs += [(arrays[name], mine[name]) for name in {"overflow"} & {*arrays}]
        assert all(same_bits(a.peek(), b.peek()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["plain", "indexed", "paged"])
def test_an_append_is_the_call_itself(kind: str) -> None:
    built = build(replace(_CASE, kind=kind, slots=16, pages=2, lengths=(3, 0, 15, 14)))
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        names = (*built.appended, "k_cache", "v_cache")
        own = {name: arrays[name] for name in names}
        ready = cuflash.prepare(operation="append", **own, **built.keywords)
        assert {*ready.tensors} == {*own}
        assert ready.workspace_bytes == 0
        host.call(cuflash.append_kv, **own, **built.keywords)
        again, mine = on_device(host, built)
        pointers = {name: mine[name].data.ptr for name in names}
        host.runtime.audit = lambda launch: None
        ready.run(pointers)
        pairs = [*zip(raw, again, strict=True), (arrays["overflow"], mine["overflow"])]
        assert all(same_bits(a.peek(), b.peek()) for a, b in pairs)
