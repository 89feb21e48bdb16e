"""Packed queries over caches: what is refused, and tiles that depend on no batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.spec import TensorSpec, contiguous_strides
from cuflash.caches.as_attention import describe_attention
from cuflash.caches.checks import check_specs
from cuflash.features.window import bounds_of
from cuflash.options import check_options
from cuflash.planning import invariant
from cuflash.planning.invariant import batch_invariant_plan
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import Plan
from cuflash.planning.tiles.fa2_few import Fa2FewTile

from ..architectures import LIMITS
from ..kit.caches import CacheCase, same_bits
from ..kit.few_rows import of_its_bits
from ..kit.packed_queries import build_packed
from .cache_case import T, V, numbers, setting, wrong
from .fake_device import fake_device

__all__ = ["fake_device"]

_CASE = CacheCase(lengths=(3, 0, 5), new=None)
_APPENDED = replace(_CASE, new=1, lengths=(3, 0, 4))
_COUNTS = 2, 4, 1
_ROWS = 2 + 4 + 1
_FLAT = np.float32


@pytest.mark.parametrize(
    ("case", "change", "kind", "text"),
    [
        (_CASE, wrong("q", lambda q: q[None]), V, "q: got shape (1, 7, 4, 8); expected (rows of"),
        (_CASE, wrong("q", lambda q: q[:, :3]), V, "k_cache: got 2 heads beside 3 of q"),
        (_CASE, wrong("q", lambda q: q[..., :7]), V, "k_cache: got head_dim 8; expected 7"),
        (_CASE, setting(cu_seqlens_q=None), V, "q: got shape (7, 4, 8); expected (batch"),
        (_CASE, setting(cu_seqlens_q=None, max_seqlen_q=4, q=np.zeros((3, 1, 4, 8), _FLAT)), V,
         "max_seqlen_q: got 4; expected None without cu_seqlens_q"),
        (_CASE, wrong("cu_seqlens_q", lambda at: at.astype(np.int64)), T,
         "cu_seqlens_q: got dtype int64; expected int32"),
        (_CASE, wrong("cu_seqlens_q", lambda at: at[None]), V, "cu_seqlens_q: got shape (1, 4)"),
        (_CASE, wrong("cu_seqlens_q", lambda at: at[:1]), V, "cu_seqlens_q: got shape (1,)"),
        (_CASE, wrong("cu_seqlens_q", lambda at: np.repeat(at, 2)[::2]), V,
         "cu_seqlens_q: got strides of (2,)"),
        (_CASE, wrong("cu_seqlens_q", lambda at: at[:3]), V,
         "k_cache: got batch 3; expected 2, as cu_seqlens_q has"),
        (_CASE, wrong("cache_seqlens", lambda n: n[:2]), V, "cache_seqlens: got shape (2,)"),
        (_CASE, setting(max_seqlen_q=3), V, "max_seqlen_q: got 3; expected 4 or more"),
        (_CASE, setting(max_seqlen_q=-1), V, "max_seqlen_q: got -1"),
        (_CASE, setting(max_seqlen_q=True), T, "max_seqlen_q: got True"),
        (_CASE, setting(max_seqlen_q=4.0), T, "max_seqlen_q: got 4.0"),
        (_CASE, setting(out=np.zeros((1, _ROWS, 4, 8), _FLAT)), V, "out: got shape (1, 7, 4, 8)"),
        (_CASE, setting(lse_out=np.zeros((_ROWS, 4), _FLAT)), V, "lse_out: got shape (7, 4)"),
        (_CASE, lambda given: {"out": given["q"]}, V, "out: got memory that q uses"),
        (_CASE, setting(alibi_slopes=np.zeros((7, 4), _FLAT)), V, "alibi_slopes: got shape (7, 4)"),
        (_APPENDED, wrong("k", lambda k: k[:6]), V,
         "k: got shape (6, 2, 8); expected (7, 2, 8), to go with q and k_cache"),
        (_APPENDED, wrong("v", lambda v: v[None]), V, "v: got shape (1, 7, 2, 8)"),
        (_APPENDED, setting(cache_seqlens=numbers(7, 0, 0)), V,
         "k: got 2 new tokens behind 7 in 8 slots"),
        (_APPENDED, setting(cache_seqlens=numbers(0, 5, 0)), V,
         "k: got 4 new tokens behind 5 in 8 slots"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(case: Any, change: Any, kind: type, text: str) -> None:
    built = build_packed(case, _COUNTS)
    before = [buffer.copy() for buffer in built.raw]
    given = {**built.caches, **built.arrays, **built.keywords}
    with pytest.raises(kind) as raised:
        cuflash.attention_with_kvcache(**given | change(given))
    assert str(raised.value).startswith(text), raised.value
    assert all(same_bits(a, b) for a, b in zip(built.raw, before, strict=True))


def test_offsets_that_fall_or_lead_out_count_as_the_nearest() -> None:
    built = build_packed(_CASE, _COUNTS)
    given = {**built.caches, **built.arrays, "cu_seqlens_q": numbers(5, 2, -3, 100)}
    right = {**given, "cu_seqlens_q": numbers(0, 2, 2, 7)}
    found, expected = (cuflash.attention_with_kvcache(**one) for one in (given, right))
    assert same_bits(found, expected)


def test_no_query_at_all() -> None:
    built = build_packed(_CASE, (0, 0, 0))
    given = {**built.caches, **built.arrays, "max_seqlen_q": 0, "return_lse": True}
    out, lse = cuflash.attention_with_kvcache(**given)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (4, 0)


def _plan(batch: int, total: int, most: int | None, capacity: int, **options: Any) -> Plan:
    """The plan of ``total`` packed queries, or without ``most`` of ``total`` in every entry."""

    def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
        size = {"bfloat16": 2, "int32": 4}[dtype]
        return TensorSpec(shape, dtype, contiguous_strides(shape), size, 0)  # type: ignore[arg-type]

    cache = spec(batch, capacity, 8, 128)
    specs = {"q": spec(batch, total, 32, 128), "k_cache": cache, "v_cache": cache}
    if most is not None:
        specs |= {"q": spec(total, 32, 128), "cu_seqlens_q": spec(batch + 1, dtype="int32")}
    _, sizes = check_specs(specs, None, None, max_seqlen_q=most)
    asked = check_options(**options)
    problem = replace(describe_attention(specs, sizes, asked).problem, alignment="tensor_map")
    return batch_invariant_plan(problem, LIMITS["90"], kv_chunk=asked.kv_chunk)


def _of_its_bits(tile: Any) -> Any:
    return of_its_bits(tile) if isinstance(tile, Fa2FewTile) else tile


def _chunk(chosen: Plan) -> int:
    """The keys of a chunk, wherever chunks are merged."""
    return chunk_of(chosen.problem) or getattr(chosen.tile, "chunk", 0)


_OPTIONS = {"causal": {"causal": True}, "full": {}, "window": {"window_size": (100, 0)}}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
@pytest.mark.parametrize("capacity", [8192, 131072])
@pytest.mark.parametrize("most", [2, 8, 64, 300, 2048])
def test_tile_and_chunk_are_those_of_an_unpacked_call(
    most: int, capacity: int, options: Any
) -> None:
    """An unpacked call has ``most`` queries in every entry. Batch and total change nothing."""
    unpacked = _plan(8, most, None, capacity, **options)
    for batch, total in ((1, 1), (1, most), (5, most + 4), (64, most + 100), (64, 64 * most)):
        packed = _plan(batch, total, most, capacity, **options)
        assert packed.algorithm == unpacked.algorithm
        assert _of_its_bits(packed.tile) == _of_its_bits(unpacked.tile)
        assert _chunk(packed) == _chunk(unpacked)
        assert packed.problem.mask == unpacked.problem.mask
        if bool(chunk_of(packed.problem)) == bool(chunk_of(unpacked.problem)):
            merges = [o.config.constants for o in packed.launches if o.config.kernel == "merge"]
            wanted = [o.config.constants for o in unpacked.launches if o.config.kernel == "merge"]
            assert merges == wanted


@pytest.mark.parametrize("capacity", [8192, 131072])
@pytest.mark.parametrize("most", [2, 8, 16])
def test_chunks_are_merged_where_those_of_as_many_unpacked_entries_are(
    most: int, capacity: int
) -> None:
    """Blocks without queries do not count."""
    ways = set()
    for batch in (1, 3, 8, 16, 64):
        packed = _plan(batch, batch * most, most, capacity, causal=True)
        unpacked = _plan(batch, most, None, capacity, causal=True)
        assert isinstance(packed.tile, Fa2FewTile)
        assert isinstance(unpacked.tile, Fa2FewTile)
        assert (packed.tile.chunk, packed.tile.rows) == (unpacked.tile.chunk, unpacked.tile.rows)
        ways.add(packed.tile.chunk > 0)
    assert ways == ({False, True} if most < 16 else {False})


def test_rows_of_many_chunks_are_merged_as_those_of_an_unpacked_call() -> None:
    """Whether warps share a row changes the last bits of its sum, so both calls must agree."""
    for most, share in ((4, 0), (17, 1), (300, 0)):
        few = 1 if most == 4 else 8  # of more entries blocks merge few queries' chunks
        unpacked = _plan(few, most, None, 16384, kv_chunk=1024).launches[-1].config
        many = 2 if most == 4 else 64
        for batch, total in ((1, 1), (many, many * most)):
            merging = _plan(batch, total, most, 16384, kv_chunk=1024).launches[-1].config
            assert merging.constants == unpacked.constants
            assert dict(merging.constants)["shared_rows"] == share


def test_a_maximum_beyond_all_rows_gives_a_plan() -> None:
    """``max_seqlen_q`` may be far above the number of queries; plans cap it."""
    assert _plan(3, 7, 2**30 - 4096, 8192).tile == _plan(3, 7, 2**17, 8192).tile


def test_plans_of_other_totals_have_the_choice_of_the_first() -> None:
    invariant._choice.cache_clear()
    for total in range(7, 27):
        _plan(3, total, 5, 8192, causal=True)
    assert invariant._choice.cache_info().misses == 1


@given(
    whole=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    part=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    sides=st.tuples(*[st.none() | st.integers(0, 130) | st.sampled_from((2**31, 10**20))] * 2),
)
def test_bounds_of_entries_are_those_of_the_definition(
    whole: tuple[int, int], part: tuple[int, int], sides: tuple[int | None, int | None]
) -> None:
    """A kernel moves the bounds of the whole arrays by the rows that an entry lacks."""
    total, capacity = whole
    queries, keys = min(part[0], total), min(part[1], capacity)
    first, last = bounds_of(total, capacity, False, None, sides, every=True)
    moved = (total - queries) - (capacity - keys)
    i, j = np.mgrid[:queries, :keys]
    seen = np.ones((queries, keys), bool)
    shown = np.ones((queries, keys), bool)
    left, right = sides
    if left is not None:
        seen &= j >= i + keys - queries - min(left, 1000)
        shown &= j >= i + first + moved
    if right is not None:
        seen &= j <= i + keys - queries + min(right, 1000)
        shown &= j <= i + last + moved
    assert (seen == shown).all()
    assert all(bound is None or abs(bound) <= max(whole) for bound in (first, last))


def test_few_queries_on_many_keys_are_split() -> None:
    assert chunk_of(_plan(3, 7, 3, 131072, causal=True).problem) > 0
    assert chunk_of(_plan(3, 5000, 2048, 131072, causal=True).problem) == 0


_SHAPES: dict[str, Any] = {
    "q": (7, 4, 16), "k_cache": (3, 32, 2, 16), "v_cache": (3, 32, 2, 16),
    "cache_seqlens": "int32", "cu_seqlens_q": (4,), "dtype": "float16",
}  # fmt: skip


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({}, T, "max_seqlen_q: got None; expected an int"),
        ({"cu_seqlens_q": None}, V, "q: got shape (7, 4, 16)"),
        ({"cu_seqlens_q": "int32", "max_seqlen_q": 4}, V, "cu_seqlens_q: got"),
        ({"operation": "append", "q": None, "k": (7, 2, 16), "v": (7, 2, 16)}, V, "cu_seqlens_q"),
        ({"max_seqlen_q": 4, "algorithm": "fa1"}, cuflash.UnsupportedError, "fa1"),
    ],
)
def test_what_is_not_prepared(changed: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind) as raised:
        cuflash.prepare(**{"operation": "kvcache", **_SHAPES, **changed})
    assert str(raised.value).startswith(text), raised.value


@pytest.mark.usefixtures("fake_device")
def test_prepared_results_are_packed() -> None:
    ready = cuflash.prepare(operation="kvcache", **_SHAPES, max_seqlen_q=4)
    assert ready.tensors["out"].shape == (7, 4, 16)
    assert ready.tensors["lse"].shape == (4, 7)
    assert {"q", "k_cache", "v_cache", "cache_seqlens", "cu_seqlens_q"} < {*ready.tensors}
