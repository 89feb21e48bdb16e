"""``explain`` names the kernels that a call with caches then launches, in their order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.planning.plan import Plan

from ..kit.caches import CacheCase, build
from ..unit.told_calls import no_kernel
from .host_cupy import HostCupy, host_cupy
from .host_cupy.runtime import Launch
from .test_append_kv import on_device

_CASE = CacheCase(
    "float16", lengths=(3, 0, 17, 28), slots=32, queries=3, new=3, pairs=5, table_rows=40,
    dims=(16, 16), counts=True, options=(("causal", True),),
)  # fmt: skip
_PAGED = replace(_CASE, kind="paged", slots=16, pages=2)
_CASES: dict[str, tuple[CacheCase, dict[str, Any]]] = {
    "rotated": (_CASE, {}),
    "fa1": (_CASE, {"algorithm": "fa1"}),
    "fa3": (_CASE, {"algorithm": "fa3"}),
    "chunks": (_CASE, {"algorithm": "fa2", "kv_chunk": 16}),
    "features": (replace(_CASE, pairs=0, slopes=True, sinks=True), {}),
    "nothing new": (replace(_CASE, new=None, pairs=0, counts=False), {}),
    "entries": (replace(_CASE, kind="indexed"), {}),
    "padding": (replace(_CASE, leftpad=(1, 0, 17, 20)), {}),
    "pages": (_PAGED, {}),
    "float8": (replace(_PAGED, float8="numbers"), {}),
    "scales": (replace(_CASE, float8="each"), {"algorithm": "fa3"}),
}


def _launched(host: HostCupy, function: Any, given: dict[str, Any]) -> tuple[list[Any], list[Plan]]:
    """The launches of a call as ``explain`` reports them, and the plans that it ran."""
    launches: list[Launch] = []
    plans: list[Plan] = []
    audit = host.runtime.audit
    host.runtime.audit = lambda launch: (launches.append(launch), audit(launch))
    with dispatch.observe(plans.append):
        host.call(function, **given)
    host.runtime.audit = audit
    reports = [
        cuflash.explained.KernelReport(
            f"{one.config.generation}/{one.config.kernel}",
            one.config.architecture,
            one.grid,
            one.config.threads,
            one.config.shared_bytes,
        )
        for one in launches
    ]
    return reports, plans


def _check(host: HostCupy, operation: Any, given: dict[str, Any]) -> cuflash.Explanation:
    host.runtime.queue.clear()
    said = cuflash.explain(operation=operation, **given)
    assert not host.runtime.queue
    function = {"kvcache": cuflash.attention_with_kvcache, "append": cuflash.append_kv}[operation]
    launches, plans = _launched(host, function, given)
    assert [*said.kernels] == launches
    assert launches
    assert said.problem == plans[-1].problem
    assert (said.reason, said.not_taken) == (plans[-1].reason, plans[-1].rejected)
    tile = plans[-1].tile
    assert (said.block_q, said.block_kv) == (tile.block_q, tile.block_kv)
    return said


@pytest.mark.parametrize(("case", "options"), _CASES.values(), ids=_CASES)
def test_attention_launches_what_is_explained(case: CacheCase, options: dict[str, Any]) -> None:
    built = build(case)
    with host_cupy(make=no_kernel) as host:
        _, arrays = on_device(host, built)
        said = _check(host, "kvcache", {**arrays, **built.keywords, **built.options, **options})
    names = [kernel.name for kernel in said.kernels]
    assert (names[0] == "steps/append_kv") == (case.new is not None)
    assert (names[-1] == "steps/merge") == ("kv_chunk" in options)
    # The rows of the table on the device have gaps.
    assert said.copies == (("page_table",) if case.kind == "paged" else ())


@pytest.mark.parametrize("case", [_CASE, _PAGED, replace(_CASE, float8="each")])
def test_an_append_launches_what_is_explained(case: CacheCase) -> None:
    built = build(case)
    with host_cupy(make=no_kernel) as host:
        _, arrays = on_device(host, built)
        own = {name: arrays[name] for name in (*built.appended, "k_cache", "v_cache")}
        said = _check(host, "append", {**own, **built.keywords})
    assert [kernel.name for kernel in said.kernels] == ["steps/append_kv"]
    assert said.algorithm is None


@pytest.mark.parametrize("pairs", [0, 5], ids=["plain", "rotated"])
def test_what_the_call_copies_is_named(pairs: int) -> None:
    built = build(replace(_CASE, pairs=pairs))
    with host_cupy(make=no_kernel) as host:
        _, arrays = on_device(host, built)
        for name in "qkv":
            arrays[name] = host.array(np.repeat(built.arrays[name], 2, axis=-1))[..., ::2]
        given = {**arrays, **built.keywords, **built.options}
        said = _check(host, "kvcache", given)
        copies = [queued for queued in host.runtime.queue if queued.launch is None]
    assert said.copies == ("q", "k", "v")
    assert len(copies) >= 3


def test_packed_queries_and_a_length_for_all_are_explained() -> None:
    with host_cupy(make=no_kernel) as host:
        halves = {name: host.array(np.ones((7, 4 if name == "q" else 2, 16), np.float16))
                  for name in "qkv"}  # fmt: skip
        caches = {f"{name}_cache": host.array(np.ones((3, 32, 2, 16), np.float16)) for name in "kv"}
        offsets = host.array(np.array([0, 4, 5, 7], np.int32))
        packed = {"cu_seqlens_q": offsets, "max_seqlen_q": 4}
        said = _check(host, "kvcache", {**halves, **caches, **packed, "cache_seqlens": 5})
        more = {**packed, "max_seqlen_q": 300}
        other = _check(host, "kvcache", {**halves, **caches, **more, "cache_seqlens": 5})
    assert said.problem != other.problem


@pytest.mark.parametrize("appends", [False, True])
def test_caches_are_explained_where_they_are(
    appends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is not the current device; the variable is about arrays in host memory."""
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    operation, shapes = "append" if appends else "kvcache", {"k": (2, 3, 2, 16)}
    shapes |= {} if appends else {"q": (2, 3, 4, 16)}
    shapes |= {"v": shapes["k"], **dict.fromkeys(("k_cache", "v_cache"), (2, 32, 2, 16))}
    with host_cupy(make=no_kernel) as host:
        ones = {name: np.ones(shape, np.float16) for name, shape in shapes.items()}
        arrays = {name: host.array(one, device=1) for name, one in ones.items()}
        said = _check(host, operation, {**arrays, "cache_seqlens": 5})
        described = {"k": shapes["k"], "v": shapes["v"], "dtype": "float16"}
        more: Any = {**arrays, **described, "cache_seqlens": "int32", "operation": operation}
        assert cuflash.explain(**more) == said
        with pytest.raises(cuflash.ArgumentValueError, match=r"^backend: got 'numpy' for arrays"):
            cuflash.explain(**more, backend="numpy")
