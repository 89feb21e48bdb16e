"""Checks of a call with caches by shapes, dtypes and addresses, before any array is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays.adopt import Adopted
from ..arrays.mapped import Mappings
from ..arrays.overlap import overlaps_itself, share_memory
from ..arrays.spec import TensorSpec
from ..errors import ArgumentTypeError, ArgumentValueError
from ..options import names_of
from ..planning.problem import DTYPES, MAX_HEAD_DIM, MAX_SEQLEN
from .float8 import Numbers, check_scales
from .given import CacheCall, Sizes, check_interleaved
from .packed import ARGUMENT, check_most, check_offsets

__all__ = ["check_call", "check_specs", "check_writable"]

_Specs = Mapping[str, TensorSpec]

#: Arrays of one number for each entry of the batch.
_PER_ENTRY = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens", "overflow")
_TABLES = ("rotary_cos", "rotary_sin")
_MATRICES = ("k_cache", "v_cache", "k", "v")
#: Dtypes of q, k and v beside float8 caches.
_HALVES = ("float16", "bfloat16")


def check_call(
    arrays: Mapping[str, Adopted],
    length: int | None,
    interleaved: Any,
    scales: Numbers | None = None,
    max_seqlen_q: Any = None,
) -> CacheCall:
    """Check a call by shapes and dtypes, and return it with its sizes.

    Parameters
    ----------
    arrays
        By argument name; at least ``k_cache``, ``v_cache`` and one of ``q`` and ``k``.
    length, interleaved
        ``cache_seqlens`` if it is a number, and ``rotary_interleaved`` as it was given.
    scales
        For float8 caches the scales that are numbers, not arrays; None for other caches.
    max_seqlen_q
        As it was given.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, what it got and what is needed.
    """
    specs = {name: array.spec for name, array in arrays.items()}
    checked, sizes = check_specs(specs, length, interleaved, scales is not None, max_seqlen_q)
    return CacheCall(arrays, length, checked, sizes, scales)


def check_specs(
    specs: Mapping[str, TensorSpec],
    length: int | None,
    interleaved: Any,
    float8: bool = False,
    max_seqlen_q: Any = None,
) -> tuple[bool | None, Sizes]:
    """Check descriptions of the arrays; return the checked ``rotary_interleaved`` and the sizes."""
    _check_together(specs)
    checked = check_interleaved(interleaved, "rotary_cos" in specs)
    for name in ("q", *_MATRICES):
        if name in specs:
            _check_matrix(name, specs, float8)
    _check_devices(specs)
    sizes = _sizes(specs, max_seqlen_q)
    check_scales(specs, sizes.batch, sizes.heads_kv)
    for name in _PER_ENTRY:
        if name in specs:
            _check_numbers(name, specs[name], sizes.batch)
    if "rotary_cos" in specs:
        _check_tables(specs, sizes, float8)
    _check_length(length, specs, sizes)
    return checked, sizes


def check_writable(written: Mapping[str, Adopted], read: Mapping[str, Adopted]) -> None:
    """Check that every written array overlaps neither itself nor another array.

    Raises
    ------
    ArgumentValueError
        If it is read-only, or shares memory with itself or another one.
    """
    taken: dict[str, Any] = {name: array.native for name, array in read.items()}
    mappings = Mappings()
    for name, target in written.items():
        array = target.native
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ArgumentValueError(name, "a read-only array", "one that can be written")
        if overlaps_itself(array):
            got = "an array whose elements share memory"
            raise ArgumentValueError(name, got, "one place for each element")
        for other, native in taken.items():
            if share_memory(array, native, mappings):
                raise ArgumentValueError(name, f"memory that {other} uses", "memory of its own")
        taken[name] = array


def _check_together(specs: _Specs) -> None:
    """Check arguments that need, or exclude, other arguments."""
    appends = "k" in specs or "v" in specs
    for name, other in (("k", "v"), ("v", "k"), _TABLES, _TABLES[::-1]):
        if name in specs and other not in specs:
            raise ArgumentValueError(other, f"None beside {name}", "both or neither")
    for name in ("overflow", "rotary_cos"):
        if name in specs and not appends:
            expected = "k and v beside it: it goes with the tokens that are appended"
            raise ArgumentValueError(name, "an array and no new tokens", expected)
    if "rotary_seqlens" in specs and "rotary_cos" not in specs:
        raise ArgumentValueError("rotary_seqlens", "an array", "None without rotary_cos")
    if "cache_batch_idx" in specs and "page_table" in specs:
        raise ArgumentValueError("cache_batch_idx", "an array", "None beside page_table")


def _check_matrix(name: str, specs: _Specs, float8: bool) -> None:
    spec, first = specs[name], "q" if "q" in specs else "k" if float8 else "k_cache"
    stored = float8 and name.endswith("_cache")  # its dtype is checked elsewhere
    if not stored and spec.dtype not in (_HALVES if float8 else DTYPES):
        expected = f"one of {names_of(_HALVES)} beside float8 caches"
        expected = expected if float8 else f"one of {names_of(DTYPES)}"
        raise ArgumentTypeError(name, f"dtype {spec.dtype}", expected)
    if not stored and spec.dtype != specs[first].dtype:
        expected = f"{specs[first].dtype}, as {first} has"
        raise ArgumentTypeError(name, f"dtype {spec.dtype}", expected)
    packed = ARGUMENT in specs and not name.endswith("_cache")
    if len(spec.shape) != 4 - packed:
        axes = (
            "(rows of all entries, heads, head_dim)" if packed else "(batch, rows, heads, head_dim)"
        )
        if name.endswith("_cache"):
            axes += " or (pages, page_size, heads, head_dim)"
        raise ArgumentValueError(name, f"shape {spec.shape}", axes)
    if name.endswith("_cache") and not _has_whole_rows(spec):
        got = f"strides of {spec.strides} elements at an address of {spec.offset} modulo 16"
        raise ArgumentValueError(name, got, "whole elements, adjacent along the last axis")


def _has_whole_rows(spec: TensorSpec) -> bool:
    """Return whether a row's elements are neighbours, at multiples of their size."""
    return 0 in spec.shape or (spec.rows_are_unit and spec.whole_elements)


def _check_devices(specs: _Specs) -> None:
    def place(device: int | None) -> str:
        return "host memory" if device is None else f"CUDA device {device}"

    where = specs["k_cache"].device
    for name, spec in specs.items():
        if spec.device != where:
            got = f"an array in {place(spec.device)}"
            raise ArgumentValueError(name, got, f"{place(where)}, where k_cache is")


def _sizes(specs: _Specs, max_seqlen_q: Any) -> Sizes:
    """Return the size of every axis, after checking the shapes against each other."""
    shapes = {name: spec.shape for name, spec in specs.items()}
    entries, slots, heads_kv, head_dim = shapes["k_cache"]
    head_dim_v = shapes["v_cache"][3]
    packed = ARGUMENT in specs
    first = ARGUMENT if packed else "q" if "q" in specs else "k"
    batch = check_offsets(specs[ARGUMENT]) if packed else shapes[first][0]
    most = check_most(max_seqlen_q, packed, specs["k_cache"].device)
    new, rows = 0, tuple[int, ...]()
    if "k" in specs:
        new = shapes["q"][0] if packed else shapes["k"][1]
        rows = (new,) if packed else (batch, new)
    _check_shape("v_cache", shapes, (entries, slots, heads_kv, head_dim_v), "k_cache")
    if "k" in specs:
        beside = f"{'q' if packed else first} and k_cache"
        _check_shape("k", shapes, (*rows, heads_kv, head_dim), beside)
        _check_shape("v", shapes, (*rows, heads_kv, head_dim_v), "k and v_cache")
    if "q" in specs:
        _check_queries(shapes["q"], heads_kv, head_dim)
    for name, dim in (("k_cache", head_dim), ("v_cache", head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ArgumentValueError(name, f"head_dim {dim}", f"1 to {MAX_HEAD_DIM}")
    capacity = slots
    if "page_table" in specs:
        capacity *= _pages(specs["page_table"], batch)
        if not slots:
            raise ArgumentValueError("k_cache", "pages of 0 slots", "1 or more")
    elif "cache_batch_idx" not in specs and entries != batch:
        expected = f"{batch}, as {first} has, or cache_batch_idx"
        raise ArgumentValueError("k_cache", f"batch {entries}", expected)
    if capacity > MAX_SEQLEN or new > MAX_SEQLEN:
        got = f"{capacity} slots for {new} new tokens"
        raise ArgumentValueError("k_cache", got, f"at most {MAX_SEQLEN} of an entry")
    return Sizes(batch, heads_kv, head_dim, head_dim_v, new, entries, slots, capacity, most)


def _check_shape(
    name: str, shapes: Mapping[str, tuple[int, ...]], wanted: tuple[int, ...], others: str
) -> None:
    if shapes[name] != wanted:
        raise ArgumentValueError(name, f"shape {shapes[name]}", f"{wanted}, to go with {others}")


def _check_queries(shape: tuple[int, ...], heads_kv: int, head_dim: int) -> None:
    heads_q = shape[-2]
    if heads_q % heads_kv if heads_kv else heads_q:
        got = f"{heads_kv} heads beside {heads_q} of q"
        raise ArgumentValueError("k_cache", got, "a number that divides q's heads")
    if shape[-1] != head_dim:
        raise ArgumentValueError("k_cache", f"head_dim {head_dim}", f"{shape[-1]}, as q has")


def _pages(spec: TensorSpec, batch: int) -> int:
    """Return the number of pages in a row of the table."""
    if spec.dtype != "int32":
        raise ArgumentTypeError("page_table", f"dtype {spec.dtype}", "int32")
    if len(spec.shape) != 2 or spec.shape[0] != batch:
        got = f"shape {spec.shape}"
        raise ArgumentValueError("page_table", got, f"({batch}, most pages of an entry)")
    if not _has_whole_rows(spec):
        got = f"strides of {spec.strides} elements"
        raise ArgumentValueError("page_table", got, "rows of neighbouring elements")
    return spec.shape[1]


def _check_numbers(name: str, spec: TensorSpec, batch: int) -> None:
    if spec.dtype != "int32":
        raise ArgumentTypeError(name, f"dtype {spec.dtype}", "int32")
    if spec.shape != (batch,):
        raise ArgumentValueError(name, f"shape {spec.shape}", f"({batch},), one for each entry")
    if not (spec.is_contiguous and _has_whole_rows(spec)):
        got = f"strides of {spec.strides} elements"
        raise ArgumentValueError(name, got, "neighbouring elements")


def _check_tables(specs: _Specs, sizes: Sizes, float8: bool) -> None:
    cos, sin = (specs[name] for name in _TABLES)
    wanted = "float32" if float8 else DTYPES[specs["k_cache"].dtype].compute
    for name, spec in zip(_TABLES, (cos, sin), strict=True):
        if spec.dtype != wanted:
            raise ArgumentTypeError(name, f"dtype {spec.dtype}", f"{wanted} for these caches")
        if len(spec.shape) != 2 or 2 * spec.shape[1] > sizes.head_dim:
            expected = f"(positions, half of the rotated columns), at most {sizes.head_dim // 2}"
            raise ArgumentValueError(name, f"shape {spec.shape}", expected)
        if not (spec.is_contiguous and _has_whole_rows(spec)):
            got = f"strides of {spec.strides} elements"
            raise ArgumentValueError(name, got, "a C-contiguous table")
    if sin.shape != cos.shape:
        raise ArgumentValueError("rotary_sin", f"shape {sin.shape}", f"{cos.shape}, as rotary_cos")
    if "rotary_seqlens" not in specs and cos.shape[0] < sizes.capacity:
        expected = f"{sizes.capacity} or more, one for each slot of an entry"
        raise ArgumentValueError("rotary_cos", f"{cos.shape[0]} positions", expected)


def _check_length(length: int | None, specs: _Specs, sizes: Sizes) -> None:
    """Check a length that is a number, the same for all entries."""
    if length is None:
        return
    if not 0 <= length <= sizes.capacity:
        expected = f"0 to {sizes.capacity}, the slots of an entry"
        raise ArgumentValueError("cache_seqlens", str(length), expected)
    if sizes.most_queries:  # the host does not know how many tokens an entry has
        return
    if length + sizes.new_tokens > sizes.capacity and "overflow" not in specs:
        got = f"{sizes.new_tokens} new tokens behind {length} in {sizes.capacity} slots"
        raise ArgumentValueError("k", got, "room for all of them, or overflow=")
