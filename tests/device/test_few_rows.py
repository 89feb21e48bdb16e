"""FlashAttention-2's kernel for few queries on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.dispatch import observe

from ..kit.caches import Built, CacheCase, build, check_close, same_bits
from ..kit.case import Case
from ..kit.data import arrays
from ..kit.few_rows import WAYS, few_rows
from ..kit.packed_queries import build_packed
from .common import own_stream, skip_without

#: Lengths at edges of tiles and of chunks of 1024 keys, 0, and the whole capacity.
_PLAIN = CacheCase(
    "bfloat16", lengths=(0, 1, 127, 1024, 1025, 4000, 4096), slots=4096, queries=1, new=None,
    heads=(16, 4), dims=(128, 128),
)  # fmt: skip
_PAGED = replace(_PLAIN, kind="paged", slots=16, pages=256)
_CAUSAL = (("causal", True),)
_CASES = {
    "decode": _PLAIN,
    "float16": replace(_PLAIN, dtype="float16"),
    "d64": replace(_PLAIN, dims=(64, 64)),
    "d192-d128": replace(_PLAIN, dims=(192, 128)),
    "d256": replace(_PLAIN, dims=(256, 256), heads=(16, 2)),
    "one-head-of-keys": replace(_PLAIN, heads=(16, 1)),
    "queries": replace(_PLAIN, queries=16, heads=(4, 2), options=_CAUSAL),
    "features": replace(_PLAIN, queries=5, slopes=True, sinks=True, options=_CAUSAL),
    "window": replace(_PLAIN, options=(("window_size", (1500, 0)), ("softcap", 3.0))),
    "drafts": replace(_PLAIN, queries=8, options=_CAUSAL),
    "drafts-of-three-heads": replace(_PLAIN, queries=7, heads=(6, 2), sinks=True, options=_CAUSAL),
    "drafts-of-two-parts": replace(_PLAIN, queries=16, options=(("window_size", (1500, 2)),)),
    "drafts-of-forty-heads": replace(_PLAIN, queries=3, heads=(40, 1), options=_CAUSAL),
    "drafts-float8": replace(_PLAIN, queries=6, float8="each", options=_CAUSAL),
    "drafts-in-pages": replace(_PAGED, queries=5, sinks=True, options=_CAUSAL),
    "pages-of-16": _PAGED,
    "pages-of-9": replace(_PAGED, slots=9, pages=456),
    "pages-of-64-d64": replace(_PAGED, slots=64, pages=64, dims=(64, 64), strides="hnd"),
    "pages-of-256-d256": replace(_PAGED, slots=256, pages=16, dims=(256, 256)),
    "pages-of-padding": replace(_PAGED, leftpad=(0, 0, 3, 17, 999, 5, 64)),
    "appended": replace(_PAGED, new=1, counts=True, pairs=32, table_rows=4200),
    "float8": replace(_PLAIN, float8="each"),
    "float8-d64": replace(_PAGED, float8="mixed", dims=(64, 64), dtype="float16"),
    "float8-d256": replace(_PAGED, float8="ones", dims=(256, 256)),
}  # fmt: skip


def _attended(cp: Any, built: Built, **options: Any) -> tuple[list[Any], Any]:
    raw = [cp.asarray(buffer) for buffer in built.raw]
    arrays = {name: cp.asarray(array) for name, array in built.arrays.items()}
    arrays |= dict(zip(("k_cache", "v_cache"), built.views(raw), strict=True))
    given = {**arrays, **built.keywords, **built.options, **options}
    return raw, cuflash.attention_with_kvcache(**given, return_lse=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(cp: Any, case: CacheCase, way: str) -> None:
    """Rows that do not count, free pages and places after the lengths hold NaN."""
    skip_without("fa2")
    built, plans = build(case), []
    truth, truth_lse, expected, _ = built.expected()
    with few_rows(way, 1024), observe(plans.append):
        raw, (out, lse) = _attended(cp, built)
    assert "cuflash_fa2_forward_few" in [x.config.entry for p in plans for x in p.launches]
    check_close(case, out.get(), truth)
    check_close(case, lse.get(), truth_lse)
    assert all(same_bits(a.get(), b) for a, b in zip(raw, expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [(6, 2), (40, 1)])
def test_packed_queries_of_heads_that_share_keys(cp: Any, heads: Any, way: str) -> None:
    """A tile ends inside the queries of a block, and an entry has several tiles."""
    skip_without("fa2")
    case = replace(_PLAIN, heads=heads, options=_CAUSAL, lengths=(650, 0, 7, 3000))
    built = build_packed(case, (1, 35, 0, 30), 19)
    truth, truth_lse, _, _ = built.expected()
    with few_rows(way, 256):
        _, (out, lse) = _attended(cp, built, max_seqlen_q=4)
    check_close(case, out.get(), truth)
    check_close(case, lse.get(), truth_lse)


def test_heads_that_share_keys_have_their_own_sinks_where_keys_are_whole(cp: Any) -> None:
    skip_without("fa2")
    x = arrays(Case(2, 6, 2, 5, 300, 64, 64, "float16", seed=9), "q", "k", "v")
    x["sinks"] = np.linspace(-3, 9, 6, dtype=np.float32)
    truth, truth_lse = cuflash.reference.attention(**x, causal=True)[:2]
    given = {name: cp.asarray(array) for name, array in x.items()}
    out, lse = cuflash.attention(**given, causal=True, kv_chunk=0, return_lse=True)
    check_close(_CASES["float16"], out.get(), truth)
    check_close(_CASES["float16"], lse.get(), truth_lse)


@pytest.mark.parametrize("name", ["decode", "d64", "d256", "one-head-of-keys", "float8", "queries",
                                  "drafts", "drafts-float8", "drafts-of-two-parts"])  # fmt: skip
def test_every_way_has_the_same_bits(cp: Any, name: str) -> None:
    """They are the same for every chunk, with both numbers of rows and with even loads."""
    skip_without("fa2")
    rng = np.random.default_rng(5)
    lengths = tuple(int(n) for n in rng.integers(0, 4097, 40))
    built = build(replace(_CASES[name], lengths=lengths))
    for chunk in (128, 512, 2048):
        found = []
        for way in WAYS:
            with few_rows(way, chunk):
                found.append([one.get() for one in _attended(cp, built)[1]])
        for other in found[1:]:
            assert all(map(same_bits, other, found[0]))


def test_a_thousand_replays_have_the_same_bits(cp: Any) -> None:
    """The captured step's merge begins early; its workspace is poisoned before each replay."""
    skip_without("fa2")
    shape, rng = (4, 8192, 8, 128), cp.random.RandomState(3)
    q = rng.standard_normal((4, 1, 32, 128), dtype=cp.float32).astype(cp.float16)
    k, v = (rng.standard_normal(shape, dtype=cp.float32).astype(cp.float16) for _ in "kv")
    lengths = cp.asarray([8192, 5000, 1, 777], cp.int32)
    arrays = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}
    with few_rows("split", 512):
        prepared = cuflash.prepare(operation="kvcache", **arrays)
    assert any(one.overlaps for one in prepared.plan.launches) == (
        prepared.plan.launches[0].config.architecture.startswith("sm_90")
    )
    workspace = cp.empty(prepared.workspace_bytes, cp.uint8)
    out, lse = cp.empty((4, 1, 32, 128), cp.float16), cp.empty((4, 32, 1), cp.float32)
    pointers = {name: array.data.ptr for name, array in {**arrays, "out": out, "lse": lse}.items()}
    stream = own_stream(cp)
    with stream:
        prepared.run(pointers, workspace=workspace.data.ptr)
        stream.synchronize()
        stream.begin_capture()
        workspace.fill(0xFF)
        out.fill(cp.nan)
        prepared.run(pointers, workspace=workspace.data.ptr)
        graph = stream.end_capture()
        first = out.view(cp.uint16).copy(), lse.view(cp.uint32).copy()
        different = cp.zeros((), cp.int64)
        for _ in range(1000):
            graph.launch(stream)
            different += (out.view(cp.uint16) != first[0]).sum()
            different += (lse.view(cp.uint32) != first[1]).sum()
        assert int(different) == 0
