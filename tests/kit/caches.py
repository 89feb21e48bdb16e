"""Problems with caches: drawn, built with NaN in all rows that do not count, and judged.

Each cache of a built problem lies in one raw buffer with its gaps and free pages, so that a changed
bit outside of the slots of new tokens shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cuflash import reference

from .float8 import SCALES, bytes_of_numbers, poisoned, scales_of

__all__ = ["KINDS", "STRIDES", "Built", "CacheCase", "build", "cases", "check_close", "same_bits"]

KINDS = "plain", "indexed", "paged"
STRIDES = "nhd", "hnd", "together", "gaps", "backwards"
#: Table entries for unused pages.
_NO_PAGES = -1, 2**31 - 1

_TOLERANCE = {"float16": 2**-8, "bfloat16": 2**-5, "float32": 2**-15, "float64": 2**-40}


@dataclass(frozen=True)
class CacheCase:
    """A problem without its values; ``new`` is None if nothing is appended."""

    dtype: str = "float32"
    kind: str = "plain"
    strides: str = "nhd"
    lengths: tuple[int, ...] = (3, 0)
    slots: int = 8  # of an entry, or of a page
    pages: int = 1  # of an entry
    queries: int = 2
    new: int | None = 2
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    leftpad: tuple[int, ...] | None = None
    pairs: int = 0
    interleaved: bool = False
    positions: tuple[int, ...] | None = None
    table_rows: int = 0
    counts: bool = False  # asks for overflow
    poison: float = math.nan
    options: tuple[tuple[str, Any], ...] = ()
    slopes: bool = False
    sinks: bool = False
    float8: str = ""  # kind of the scales of float8 caches
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self.slots * (self.pages if self.kind == "paged" else 1)

    @property
    def attends_locally(self) -> bool:
        options = dict(self.options)
        return bool(options.get("causal")) or options.get("window_size", (None,) * 2) != (None,) * 2


@dataclass
class Built:
    """The arrays of a problem; ``raw`` are the buffers of which the caches are views."""

    case: CacheCase
    raw: list[Any]
    views: Callable[[list[Any]], tuple[Any, Any]]
    arrays: dict[str, Any]  # all arrays but the caches, by argument name
    options: dict[str, Any]  # keywords of attention
    scales: dict[str, Any]  # scales of float8 caches that are numbers

    @property
    def caches(self) -> dict[str, Any]:
        """The caches by argument name."""
        return dict(zip(("k_cache", "v_cache"), self.views(self.raw), strict=True))

    @property
    def keywords(self) -> dict[str, Any]:
        """Other keywords of an append: the pairs of rotated columns, and the type of bytes."""
        told = {"rotary_interleaved": self.case.interleaved} if self.case.pairs else {}
        return told | ({"cache_dtype": "float8_e4m3fn", **self.scales} if self.case.float8 else {})

    @property
    def appended(self) -> dict[str, Any]:
        """The arrays that ``append_kv`` takes beside the caches."""
        others = ("q", "cache_leftpad", "alibi_slopes", "sinks")
        return {name: array for name, array in self.arrays.items() if name not in others}

    def expected(self, attends: bool = True) -> tuple[Any, ...]:
        """The reference's results: out and lse, or nothing; then the buffers, and overflow."""
        arrays = self.arrays if attends else self.appended
        given = {name: array for name, array in arrays.items() if name != "overflow"}
        given |= {**self.caches, **self.keywords, **(self.options if attends else {})}
        given.pop("cache_dtype", None)
        function = reference.attention_with_kvcache if attends else reference.append_kv
        *found, k, v, overflow = function(**given)
        raw = [buffer.copy() for buffer in self.raw]
        for view, cache in zip(self.views(raw), (k, v), strict=True):
            view[...] = cache
        return (*found, raw, overflow)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two buffers hold the same bits, NaN or not."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def check_close(case: CacheCase, got: Any, truth: Any) -> None:
    """Equal within the rounding of the storage type, with the same infinities and NaN."""
    got = np.asarray(got, np.float64)
    finite = np.isfinite(truth)
    assert (np.isnan(got) == np.isnan(truth)).all()
    assert (got[~finite & ~np.isnan(truth)] == truth[~finite & ~np.isnan(truth)]).all()
    far = abs(got[finite] - truth[finite])
    largest = np.max(abs(truth[finite]), initial=1)
    assert (far <= _TOLERANCE[case.dtype] * largest).all(), far.max()


def _one_of(draw: Any, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def _number_of(draw: Any, least: int, most: int) -> int:
    return int(draw(st.integers(least, most)))


@st.composite
def cases(
    draw: Any, dtypes: Any = tuple(_TOLERANCE), appends: bool | None = None, float8: bool = False
) -> CacheCase:
    """Small problems of any kind."""
    one = functools.partial(_one_of, draw)
    number = functools.partial(_number_of, draw)
    kind = one(*KINDS)
    slots, pages = (number(1, 7), number(1, 4)) if kind == "paged" else (number(1, 20), 1)
    capacity, batch = slots * pages, number(1, 3)
    new = number(0, 4) if appends or (appends is None and draw(st.booleans())) else None
    counts = new is not None and draw(st.booleans())
    room = capacity if counts else max(0, capacity - (new or 0))
    if not counts and (new or 0) > capacity:
        new = capacity
    edges = [n for n in (0, 1, slots - 1, slots, slots + 1, room) if 0 <= n <= room]
    length = st.one_of(st.sampled_from(edges), st.integers(0, room))
    lengths = tuple(draw(length) for _ in range(batch))
    leftpad = tuple(number(0, n) for n in lengths) if draw(st.booleans()) else None
    queries, heads_kv = number(1, 4), number(1, 2)
    d = number(1, 12)
    pairs = number(0, d // 2) if new is not None else 0
    positions = tuple(number(-2 * counts, 9) for _ in lengths) if pairs and one(0, 1) else None
    rows = max(0, max(positions or lengths) + max(new or 0, queries))
    rows = number(0, rows) if counts and draw(st.booleans()) else rows
    rows = max(rows, 0 if positions else capacity) if pairs else 0
    window = one(None, (None, None), (0, 0), (2, None), (None, 1), (3, 1))
    options = {"causal": draw(st.booleans()), "window_size": window}
    options |= {"softcap": one(None, 2.0), "scale": one(None, 0.5)}
    return CacheCase(
        dtype=one(*dtypes), kind=kind, strides=one(*STRIDES), lengths=lengths, slots=slots,
        pages=pages, queries=queries, new=new, heads=(heads_kv * number(1, 3), heads_kv),
        dims=(d, one(d, number(1, 12))), leftpad=leftpad, pairs=pairs,
        interleaved=draw(st.booleans()), positions=positions, table_rows=rows,
        counts=counts, poison=one(math.nan, math.inf), options=tuple(options.items()),
        slopes=draw(st.booleans()), sinks=draw(st.booleans()),
        float8=one(*SCALES) if float8 else "", seed=number(0, 2**20),
    )  # fmt: skip


def build(case: CacheCase) -> Built:
    """The arrays of a problem."""
    rng = np.random.default_rng(case.seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    compute = np.dtype("float64" if case.dtype == "float64" else "float32")

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    (heads_q, heads_kv), (d, dv), batch = case.heads, case.dims, case.batch
    arrays = {"q": normal(batch, case.queries, heads_q, d), **_tables(case, rng)}
    raw, views = _caches(case, dtype, rng, arrays)
    if case.new is not None:
        arrays |= {"k": normal(batch, case.new, heads_kv, d)}
        arrays |= {"v": normal(batch, case.new, heads_kv, dv)}
    if case.pairs:
        angles = np.outer(np.arange(case.table_rows), 0.7 ** np.arange(case.pairs))
        arrays |= {"rotary_cos": np.cos(angles).astype(compute)}
        arrays |= {"rotary_sin": np.sin(angles).astype(compute)}
    if case.positions is not None:
        arrays["rotary_seqlens"] = np.array(case.positions, np.int32)
    if case.counts:
        arrays["overflow"] = np.full(batch, -7, np.int32)
    if case.slopes:
        arrays["alibi_slopes"] = rng.uniform(0, 0.5, (batch, heads_q)).astype(compute)
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(heads_q).astype(compute)
    arrays = {name: arrays[name] for name in sorted(arrays)}
    scales = scales_of(case.float8, rng, batch, heads_kv)
    numbers = {name: scale for name, scale in scales.items() if isinstance(scale, float)}
    arrays |= {name: scale for name, scale in scales.items() if name not in numbers}
    return Built(case, raw, views, arrays, dict(case.options), numbers)


def _tables(case: CacheCase, rng: np.random.Generator) -> dict[str, Any]:
    """Lengths, and positions of entries; pages and entries are shared if nothing is appended."""
    found = {"cache_seqlens": np.array(case.lengths, np.int32)}
    if case.leftpad is not None:
        found["cache_leftpad"] = np.array(case.leftpad, np.int32)
    shares = case.new is None and rng.random() < 0.5
    if case.kind == "indexed":
        among = case.batch + 2
        rows = rng.integers(0, among, case.batch) if shares else rng.permutation(among)
        found["cache_batch_idx"] = rows[: case.batch].astype(np.int32)
    if case.kind == "paged":
        among, wanted = case.batch * case.pages + 2, (case.batch, case.pages)
        pages = rng.integers(0, among, wanted) if shares else rng.permutation(among)[:-2]
        table = pages.reshape(wanted).astype(np.int32)
        for b, length in enumerate(case.lengths):
            end = min(length + (case.new or 0), case.capacity)
            if case.pairs:
                begin = length if case.positions is None else case.positions[b]
                end = min(end, length + (max(0, case.table_rows - begin) if begin >= 0 else 0))
            pad = 0 if case.leftpad is None else case.leftpad[b]
            table[b, -(-end // case.slots) :] = rng.choice(_NO_PAGES)
            table[b, : pad // case.slots] = rng.choice(_NO_PAGES)
        wide = np.full((case.batch, case.pages + 1), 2**30, np.int32)
        wide[:, :-1] = table
        found["page_table"] = wide[:, :-1]
    return found


def _caches(
    case: CacheCase, dtype: Any, rng: np.random.Generator, tables: dict[str, Any]
) -> tuple[list[Any], Callable[[list[Any]], tuple[Any, Any]]]:
    """Raw buffers of poison with numbers in the slots that count, and the caches' views of them."""
    entries = case.batch + {"plain": 0, "indexed": 2}.get(case.kind, 0)
    if case.kind == "paged":
        entries = case.batch * case.pages + 2
    sizes = [(entries, case.slots, case.heads[1], width) for width in case.dims]
    together = case.strides == "together" and case.dims[0] == case.dims[1]
    shapes = [_raw_shape(case.strides, size) for size in sizes]
    if together:
        e, s, h, d = sizes[0]
        shapes = [(e, 2, s, h, d)]
    raw = [np.full(math.prod(shape), case.poison).astype(dtype) for shape in shapes]
    if case.float8:
        raw = [poisoned(rng, buffer.size) for buffer in raw]

    def views(buffers: list[Any]) -> tuple[Any, Any]:
        if together:
            both = buffers[0].reshape(*shapes[0])
            return both[:, 0], both[:, 1]
        pairs = zip(buffers, shapes, sizes, strict=True)
        k, v = (_view(case.strides, raw.reshape(*shape), size) for raw, shape, size in pairs)
        return k, v

    for cache in views(raw):
        for b, length in enumerate(case.lengths):
            for slot in range(0 if case.leftpad is None else case.leftpad[b], length):
                page, within = divmod(slot, case.slots)
                entry = tables["page_table"][b, page] if case.kind == "paged" else b
                if case.kind == "indexed":
                    entry = tables["cache_batch_idx"][b]
                rows = rng.standard_normal(cache.shape[2:]).astype(dtype)
                cache[entry, within] = bytes_of_numbers(rng, rows.shape) if case.float8 else rows
    return raw, views


def _raw_shape(strides: str, size: tuple[int, ...]) -> tuple[int, ...]:
    entries, slots, heads, width = size
    if strides == "hnd":
        return entries, heads, slots, width
    return (entries, slots + 1, heads, width + 3) if strides == "gaps" else size


def _view(strides: str, raw: Any, size: tuple[int, ...]) -> Any:
    """A cache in its buffer, of NumPy or of a device."""
    if strides == "hnd":
        return raw.transpose(0, 2, 1, 3)
    if strides == "gaps":
        return raw[:, : size[1], :, 1 : 1 + size[3]]
    return raw[::-1] if strides == "backwards" else raw
