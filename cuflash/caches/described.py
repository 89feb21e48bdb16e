"""Descriptions of the arrays of a call with caches, from arrays or from shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.adopt import adopt
from ..arrays.spec import TensorSpec
from ..checks import describe
from ..errors import ArgumentTypeError, shown
from ..features.float8 import NAMES as SCALES
from ..options import Options
from ..planning.problem import ElementName
from ..signature import spec_of_array, spec_of_feature, spec_of_matrix
from .as_attention import own_names, places_of
from .float8 import Numbers, check_cache_dtype, scale_spec, split_scales
from .packed import ARGUMENT, OFFSETS, check_offsets, with_batch_axis

__all__ = ["FEATURES", "PER_ENTRY", "TABLES", "DescribedCaches", "describe_caches"]

#: Arrays of features that attention over caches takes.
FEATURES = ("alibi_slopes", "sinks")
#: Arrays of one int32 for each entry of the batch.
PER_ENTRY = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens", "overflow")
TABLES = ("page_table", "rotary_cos", "rotary_sin")


class DescribedCaches(NamedTuple):
    """Descriptions of the arrays of a call, and the scales of float8 caches that are numbers."""

    specs: dict[str, TensorSpec]
    scales: Numbers | None


def describe_caches(
    given: Mapping[str, Any], dtype: Any, options: Options, where: int
) -> DescribedCaches:
    """Return descriptions of the arrays of a call with caches, by argument name.

    Parameters
    ----------
    given
        Every array: itself, its shape, its dtype or both, as for ``prepare``;
        None if not given. Scales may be numbers; ``cache_dtype`` is included.
    dtype
        Dtype of matrices whose shapes are given.
    options
        The checked keywords.
    where
        The device of arrays that do not exist yet.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.
    """
    _check_needed(given)
    arrays = {name: array for name, array in given.items() if array is not None}
    specs, float8 = _matrices(arrays, dtype, where)
    of_arrays, numbers = split_scales(given, float8)
    if ARGUMENT in arrays:
        specs[ARGUMENT] = spec_of_array(ARGUMENT, arrays[ARGUMENT], None, "int32", where)
        batch = check_offsets(specs[ARGUMENT])
    else:
        shape = specs["q" if "q" in specs else "k"].shape
        batch = shape[0] if shape else 0  # a shape without axes is refused later
    for name in PER_ENTRY:
        if name in arrays:
            specs[name] = spec_of_array(name, arrays[name], (batch,), "int32", where)
    first = specs["q"] if "q" in specs else specs["k"]
    compute: ElementName = "float64" if first.dtype == "float64" else "float32"
    kinds: tuple[ElementName, ...] = ("int32", compute, compute)
    for name, kind in zip(TABLES, kinds, strict=True):
        if name in arrays:
            specs[name] = spec_of_array(name, arrays[name], None, kind, where)
    for name, array in of_arrays.items():
        specs[name] = scale_spec(spec_of_array(name, array, None, "float32", where))
    scales = numbers if float8 else None
    return DescribedCaches(specs | _features(arrays, specs, scales, options, where), scales)


def _matrices(
    arrays: Mapping[str, Any], dtype: Any, where: int
) -> tuple[dict[str, TensorSpec], bool]:
    """Return the descriptions of q, k, v and the caches, and whether the caches are float8."""
    specs: dict[str, TensorSpec] = {}
    names = [name for name in ("q", "k", "v", "k_cache", "v_cache") if name in arrays]
    told = "cache_dtype" in arrays
    for name in names:
        if name.endswith("_cache") and (told or _holds_bytes(name, arrays[name])):
            specs[name] = spec_of_array(name, arrays[name], None, "uint8", where)
        else:
            specs[name] = spec_of_matrix(name, arrays[name], dtype, where)
    dtypes = {name: specs[name].dtype for name in ("k_cache", "v_cache")}
    float8 = check_cache_dtype(arrays.get("cache_dtype"), dtypes)
    for name in dtypes if float8 else ():
        specs[name] = replace(specs[name], dtype="uint8")
    return specs, float8


def _holds_bytes(name: str, cache: Any) -> bool:
    if isinstance(cache, (tuple, list)):
        return False
    return adopt(name, cache).spec.itemsize == 1


def _features(
    arrays: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    scales: Numbers | None,
    options: Options,
    where: int,
) -> dict[str, TensorSpec]:
    """Return descriptions of the arrays of features, as attention takes them."""
    names = [name for name in FEATURES if name in arrays]
    if not names:
        return {}
    with own_names():
        qkv = {"q": specs["q"], "k": specs["k_cache"], "v": specs["v_cache"]}
        if ARGUMENT in specs:
            qkv |= {"q": with_batch_axis(specs["q"]), OFFSETS: specs[ARGUMENT]}
            options = replace(options, more=(*options.more, ("most_queries", 1)))
        qkv |= {name: specs[name] for name in SCALES if name in specs}
        options = replace(options, more=(*(scales or ()), *options.more))
        sizes = describe("forward", {**qkv, **places_of(specs)}, options)
        return {name: spec_of_feature(name, arrays[name], sizes, where) for name in names}


def _check_needed(given: Mapping[str, Any]) -> None:
    expected = "an array, or its shape"
    first = ("k", "v") if given.get("q") is None else ()
    for name in ("k_cache", "v_cache", *first):
        if given.get(name) is None:
            raise ArgumentTypeError(name, "None", expected)
    lengths = given.get("cache_seqlens")
    if lengths is None or isinstance(lengths, (bool, int)):
        said = "an int32 array, its shape or its dtype: a run reads it on the device"
        raise ArgumentTypeError("cache_seqlens", shown(lengths), said)
