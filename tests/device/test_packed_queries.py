"""Packed queries over caches on the device, against the reference and calls of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash

from ..kit.caches import Built, CacheCase, check_close, same_bits
from ..kit.packed_queries import PackedCase, build_packed, packed_cases
from .common import own_stream, skip_without

#: Entries without queries or keys, with fewer keys than queries, and with one or 300 queries.
_CASE = CacheCase(
    "float16", lengths=(900, 0, 7, 1024, 600, 1), slots=1024, new=None, heads=(8, 2),
    dims=(128, 128), options=(("causal", True),),
)  # fmt: skip
_COUNTS = 1, 3, 9, 0, 300, 2
_NEW = replace(_CASE, new=1, pairs=16, table_rows=1400, counts=True)
_CASES = {
    "plain": _CASE,
    "pages": replace(_CASE, kind="paged", slots=16, pages=64),
    "padding": replace(_CASE, kind="indexed", leftpad=(800, 0, 3, 5, 0, 0), slopes=True),
    "window": replace(_CASE, options=(("window_size", (100, 0)),), sinks=True, dims=(64, 64)),
    "appended": _NEW,
    "appended-pages": replace(_NEW, kind="paged", slots=64, pages=16, dtype="bfloat16"),
}


def _on_device(cp: Any, built: Built) -> tuple[list[Any], dict[str, Any]]:
    raw = [cp.asarray(buffer) for buffer in built.raw]
    arrays = {name: cp.asarray(array) for name, array in built.arrays.items()}
    return raw, arrays | dict(zip(("k_cache", "v_cache"), built.views(raw), strict=True))


def _check(cp: Any, built: Built, most: int, **more: Any) -> tuple[Any, Any]:
    truth, truth_lse, expected, overflow = built.expected()
    raw, arrays = _on_device(cp, built)
    given = {**arrays, **built.keywords, **built.options, "max_seqlen_q": most, **more}
    out, lse = cuflash.attention_with_kvcache(**given, return_lse=True)
    check_close(built.case, out.get(), truth)
    check_close(built.case, lse.get(), truth_lse)
    assert all(same_bits(a.get(), b) for a, b in zip(raw, expected, strict=True))
    if built.case.counts:
        assert arrays["overflow"].get().tolist() == overflow.tolist()
    return out.get(), lse.get()


@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("algorithm", ["auto", "fa2"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(
    cp: Any, case: CacheCase, algorithm: str, chunk: int | None
) -> None:
    _check(cp, build_packed(case, _COUNTS, 5), 300, algorithm=algorithm, kv_chunk=chunk)


@pytest.mark.parametrize("name", ["plain", "pages", "appended"])
def test_float8_caches(cp: Any, name: str) -> None:
    skip_without("fa3")
    case = replace(_CASES[name], float8="each", dtype="bfloat16")
    _check(cp, build_packed(case, _COUNTS, 5), 300)


def test_drawn_problems(cp: Any) -> None:
    @settings(max_examples=100, deadline=None)
    @given(packed_cases(dtypes=("float16", "float32")))
    def check(drawn: PackedCase) -> None:
        _check(cp, build_packed(*drawn), max(drawn[1]))

    check()


@pytest.mark.parametrize("most", [8, 300])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(cp: Any, most: int) -> None:
    """The batch has many entries, or few, or is not packed."""
    counts = tuple(1 + b % most for b in range(40))
    case = replace(_CASE, lengths=tuple(20 * b for b in range(40)))
    built = build_packed(case, counts, 3)
    at = built.arrays["cu_seqlens_q"]
    out, _ = _check(cp, built, most)
    _, arrays = _on_device(cp, built)
    for b in (0, 7, 39):
        own = {"q": arrays["q"][at[b] : at[b + 1]], "causal": True, "max_seqlen_q": most}
        own |= {name: arrays[name][b : b + 1] for name in ("k_cache", "v_cache", "cache_seqlens")}
        own["cu_seqlens_q"] = cp.asarray(np.array([0, counts[b]], np.int32))
        assert same_bits(cuflash.attention_with_kvcache(**own).get(), out[at[b] : at[b + 1]])


def test_a_graph_reads_offsets_when_it_runs(cp: Any) -> None:
    """The graph is replayed with other offsets and lengths than it was captured with."""
    first = build_packed(replace(_NEW, counts=True), (60,) * 5 + (15,), 0)
    stream = own_stream(cp)
    with stream:
        raw, arrays = _on_device(cp, first)
        options = {**first.keywords, **first.options, "max_seqlen_q": 300}
        cuflash.attention_with_kvcache(**arrays, **options, return_lse=True)  # compiled
        stream.begin_capture()
        out, lse = cuflash.attention_with_kvcache(**arrays, **options, return_lse=True)
        graph = stream.end_capture()
        for counts in (_COUNTS, (0, 0, 0, 0, 10, 300)):
            built = build_packed(_NEW, counts, 315 - sum(counts))
            for buffer, values in zip(raw, built.raw, strict=True):
                buffer.set(values)
            for name, values in built.arrays.items():
                arrays[name].set(values)
            graph.launch(stream)
            stream.synchronize()
            truth, truth_lse, expected, _ = built.expected()
            check_close(built.case, out.get(), truth)
            check_close(built.case, lse.get(), truth_lse)
            assert all(same_bits(a.get(), b) for a, b in zip(raw, expected, strict=True))
