"""Attention over caches: check, append, and hand what counts to attention itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .. import dispatch
from ..arrays.adopt import Adopted
from ..arrays.spec import TensorSpec
from ..errors import ArgumentTypeError, ArgumentValueError
from ..features.cached_keys import NAMES
from ..features.float8 import NAMES as SCALES
from ..options import Options, check_flag, check_options
from ..pipeline import CallPlan, choose_device, plan_call
from . import device, host
from .checks import check_call, check_writable
from .float8 import Numbers, adopt_scales, as_bytes, check_cache_dtype, split_scales
from .given import CacheCall, Sizes, adopt_all, length_of
from .lengths import lengths_of

__all__ = [
    "advances",
    "append_to",
    "attend",
    "own_names",
    "places_of",
    "plan_attention",
]

#: Arguments of attention that a call with caches has under other names.
_OWN_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_kv": "cache_seqlens"}
#: Arrays that attention takes as they are, in the order in which it takes them.
_FEATURES, _TARGETS = ("alibi_slopes", "sinks"), ("out", "lse_out")
#: Arrays that tell where an entry's keys lie.
_PLACES = (*NAMES, "cache_batch_idx")


def append_to(
    given: Mapping[str, Any],
    cache_seqlens: Any,
    interleaved: Any,
    cache_dtype: Any,
    backend: Any,
) -> None:
    """Append to caches.

    Parameters
    ----------
    given
        Every array by argument name but ``cache_seqlens``, None being nothing.
    cache_seqlens, interleaved, cache_dtype, backend
        As the caller gave them.
    """
    options = check_options(backend=backend)
    needed = ("k", "v", "k_cache", "v_cache")
    call = _call(given, needed, cache_seqlens, interleaved, cache_dtype)
    _check_place(call, options)
    _check_written(call, {})
    if call.device is None:
        host.append(call, lengths_of(call))
    else:
        device.append(call, device.lengths_before(call), False, dispatch.tell)


def attend(
    given: Mapping[str, Any],
    beside: Mapping[str, Any],
    cache_seqlens: Any,
    interleaved: Any,
    cache_dtype: Any,
    keywords: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Out, and the log-sum-exp or None.

    Parameters
    ----------
    given
        As of :func:`append_to`, with ``q``.
    beside
        ``alibi_slopes``, ``sinks``, ``out`` and ``lse_out``, None being nothing.
    cache_seqlens, interleaved, cache_dtype
        As the caller gave them.
    keywords
        Of attention, and ``return_lse``.
    """
    own = {name: value for name, value in keywords.items() if name != "return_lse"}
    options, with_lse = check_options(**own), check_flag("return_lse", keywords["return_lse"])
    call = _call(given, ("q", "k_cache", "v_cache"), cache_seqlens, interleaved, cache_dtype)
    arrays = adopt_all(beside)
    _check_place(call, options)
    _check_attention(call, arrays, options)
    _check_written(call, arrays)
    advance = advances(options)
    run = _on_host if call.device is None else _on_device
    natives = run(call, advance)
    natives |= {name: array.native for name, array in arrays.items() if name in _FEATURES}
    natives |= {name: arrays[name].native for name in _TARGETS if name in arrays}
    where = {"backend": "numpy" if call.device is None else "cuda", "layout": "bshd"}
    given = {**keywords, **where, "batch_invariant": True}
    if call.scales is not None and call.device is not None:
        given |= dict(call.scales)
    results = _in_float32(natives, given) if _is_computed_wider(call) else _forward(natives, given)
    answer = call.arrays["q"].answer
    out = arrays["out"].given if "out" in arrays else answer(results["out"])
    if not with_lse:
        return out, None
    return out, arrays["lse_out"].given if "lse_out" in arrays else answer(results["lse"])


def _forward(natives: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    return dispatch.call("forward", natives, keywords)


def _is_computed_wider(call: CacheCall) -> bool:
    """Whether what float8 caches hold is computed with as float32: on the host."""
    return call.scales is not None and call.device is None


def _in_float32(natives: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The same of queries that are widened, and an output that is rounded to their dtype."""
    q, out = natives["q"], natives.get("out")
    wide = {name: array for name, array in natives.items() if name != "out"}
    wide |= {name: wide[name].astype(np.float32) for name in ("q", "sinks") if name in wide}
    results = _forward(wide, keywords)
    made = np.empty(results["out"].shape, q.dtype) if out is None else out
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        made[...] = results["out"]
    return {**results, "out": made}


def _call(
    given: Mapping[str, Any],
    needed: tuple[str, ...],
    cache_seqlens: Any,
    interleaved: Any,
    cache_dtype: Any,
) -> CacheCall:
    length, lengths = length_of(cache_seqlens)
    others = {name: value for name, value in given.items() if name not in SCALES}
    arrays = adopt_all({**others, "cache_seqlens": lengths}, needed)
    caches = {name: arrays[name].spec.dtype for name in ("k_cache", "v_cache")}
    float8 = check_cache_dtype(cache_dtype, caches)
    scales, numbers = split_scales(given, float8)
    arrays = {**as_bytes(arrays), **adopt_scales(scales)}
    return check_call(arrays, length, interleaved, numbers if float8 else None)


def _check_place(call: CacheCall, options: Options) -> None:
    """Caches are worked on where they are: they are not copied to a device and back.

    Raises
    ------
    ArgumentValueError
        If the backend is another one.
    UnsupportedError
        If attention on CUDA does not take an argument.
    """
    if call.device is None:
        if options.backend == "cuda":
            expected = "'auto' or 'numpy'; or caches in CUDA memory"
            raise ArgumentValueError("backend", "'cuda' for caches in host memory", expected)
        return
    choose_device(call.device, options)


def advances(options: Options) -> bool:
    """Whether each query stands one position further than the one before it."""
    window = options.keyword("window_size")
    return options.causal or (window is not None and window != (None, None))


def _check_attention(call: CacheCall, beside: Mapping[str, Adopted], options: Options) -> None:
    """Have attention itself check what it will be given, before a cache is written."""
    names = ("q", "k_cache", "v_cache", *_PLACES, *SCALES)
    specs = {name: call.spec(name) for name in names if name in call.arrays}
    specs |= {name: array.spec for name, array in beside.items()}
    plan_attention(specs, call.sizes, options, call.scales)


def plan_attention(
    specs: Mapping[str, TensorSpec],
    sizes: Sizes,
    options: Options,
    scales: Numbers | None = None,
) -> CallPlan:
    """The plan of attention over caches, in the layout of the caches and where they are.

    Parameters
    ----------
    specs
        Of ``q`` and the caches, of what tells where entries are, and of arrays
        of features and destinations, by argument name.
    sizes, options
        As they were checked.
    scales
        Of float8 caches those that are numbers; None of other caches.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError
        As of attention, by the arguments' names here.
    """
    given, where = {"q": specs["q"]}, specs["k_cache"].device
    if scales is not None and where is not None:
        options = replace(options, more=(*scales, *options.more))
    for name in ("k", "v"):
        cache = specs[f"{name}_cache"]
        shape = (sizes.batch, sizes.capacity, *cache.shape[2:])
        if scales is not None and where is None:  # as the numbers that bytes stand for
            cache = replace(specs["q"], shape=shape).contiguous()
        fits = cache.shape == shape or where is not None
        given[name] = cache if fits else replace(cache, shape=shape).contiguous()
    given |= {name: specs[name] for name in _FEATURES if name in specs}
    given["seqused_kv"] = TensorSpec((sizes.batch,), "int32", (1,), 4, where)
    if where is not None:
        given |= {**places_of(specs), **{name: specs[name] for name in SCALES if name in specs}}
    given |= {name: specs[name] for name in _TARGETS if name in specs}
    asked = replace(options, layout="bshd", backend="cuda" if where is not None else "numpy")
    asked = replace(asked, batch_invariant=True)
    with own_names():
        return plan_call("forward", tuple(given.items()), asked, where, True)


def places_of(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Descriptions of the arrays of :func:`~.device.places`, by the names that attention has."""
    found = {name: specs[name] for name in NAMES if name in specs}
    if "cache_batch_idx" in specs:
        entries = specs["cache_batch_idx"]
        found["page_table"] = replace(entries, shape=(*entries.shape, 1), strides=(1, 1))
    return found


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Errors of attention inside name the arguments as a call with caches does."""
    try:
        yield
    except (ArgumentTypeError, ArgumentValueError) as error:
        name = _OWN_NAMES.get(error.argument, error.argument)
        raise type(error)(name, error.got, error.expected) from error


def _check_written(call: CacheCall, beside: Mapping[str, Adopted]) -> None:
    """What is written lies apart from all else."""
    caches = ("k_cache", "v_cache") if "k" in call.arrays else ()
    every = {**call.arrays, **beside}
    names = [name for name in (*caches, "overflow", *_TARGETS) if name in every]
    written = {name: every.pop(name) for name in names}
    check_writable(written, every)


def _on_host(call: CacheCall, advance: bool) -> dict[str, Any]:
    """Append, and give what attention reads."""
    rows = call.spec("q").shape[1]
    turned = (rows if advance else min(rows, 1)) if call.interleaved is not None else 0
    lengths = lengths_of(call, turned)
    if "k" in call.arrays:
        host.append(call, lengths)
    q = call.native("q")
    if call.interleaved is not None:
        q = host.rotated_queries(call, lengths, advance)
    keys, values, count = host.held(call, lengths)
    if call.scales is not None:
        keys, values = host.numbers_of(call, keys, values)
    return {"q": q, "k": keys, "v": values, "seqused_kv": count}


def _on_device(call: CacheCall, advance: bool) -> dict[str, Any]:
    """The same on the stream of the caches' device."""
    before, q = device.lengths_before(call), call.native("q")
    if "k" in call.arrays:
        appended = device.append(call, before, advance, dispatch.tell)
        before, q = appended.lengths, appended.queries
    caches = {name: call.native(f"{name}_cache") for name in ("k", "v")}
    places = {name: array.native for name, array in device.places(call).items()}
    scales = {name: call.native(name) for name in SCALES if name in call.arrays}
    return {"q": q, **caches, "seqused_kv": before, **places, **scales}
