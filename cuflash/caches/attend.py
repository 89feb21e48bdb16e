"""Attention over caches: check, append, and call attention on the used slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import dispatch
from ..arrays.adopt import Adopted
from ..errors import ArgumentValueError
from ..features.cached_keys import NAMES
from ..features.float8 import NAMES as SCALES
from ..options import Options, check_flag, check_options
from ..pipeline import choose_device
from . import device, host
from .as_attention import TARGETS, advances, asked, of_packed, plan_attention
from .checks import check_call, check_writable
from .float8 import adopt_scales, as_bytes, check_cache_dtype, split_scales
from .given import CacheCall, adopt_all, length_of
from .host_packed import check_queries, forward_packed
from .lengths import lengths_of, queries_of
from .packed import ARGUMENT, OFFSETS

__all__ = ["append_to", "attend", "attend_into"]

#: Arrays that locate the keys of an entry.
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
        Every array by argument name except ``cache_seqlens``; None if not given.
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
    max_seqlen_q: Any = None,
) -> tuple[Any, Any]:
    """Return the output, and the log-sum-exp or None.

    Parameters
    ----------
    given
        As for :func:`append_to`, with ``q``.
    beside
        ``alibi_slopes``, ``sinks``, ``out`` and ``lse_out``; None if not given.
    cache_seqlens, interleaved, cache_dtype, max_seqlen_q
        As the caller gave them.
    keywords
        Keywords of attention, and ``return_lse``.
    """
    own = {name: value for name, value in keywords.items() if name != "return_lse"}
    options, with_lse = check_options(**own), check_flag("return_lse", keywords["return_lse"])
    needed = ("q", "k_cache", "v_cache")
    call = _call(given, needed, cache_seqlens, interleaved, cache_dtype, max_seqlen_q)
    arrays = adopt_all(beside)
    natives = _appended(call, arrays, options)
    where = {"backend": "numpy" if call.device is None else "cuda", "layout": "bshd"}
    given = {**keywords, **where, "batch_invariant": True}
    if call.scales is not None and call.device is not None:
        given |= dict(call.scales)
    results = _computed(call, natives, given)
    answer = call.arrays["q"].answer
    out = arrays["out"].given if "out" in arrays else answer(results["out"])
    if not with_lse:
        return out, None
    return out, arrays["lse_out"].given if "lse_out" in arrays else answer(results["lse"])


def _computed(
    call: CacheCall, natives: dict[str, Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of attention over arrays that have its argument names."""
    forward = _in_float32 if _is_computed_wider(call) else _forward
    if not call.sizes.most_queries:
        return forward(natives, keywords)
    if call.device is None:
        return forward_packed(call, forward, natives, keywords)
    natives |= {name: natives[name][None] for name in ("q", *TARGETS) if name in natives}
    natives[OFFSETS] = call.native(ARGUMENT)
    results = forward(natives, {**keywords, **dict(of_packed(call.sizes))})
    return {name: results[name][0] for name in ("out", "lse") if name in results}


def attend_into(
    given: Mapping[str, Any], beside: Mapping[str, Any], interleaved: Any, options: Options
) -> None:
    """Attend over arrays in host memory, with checked keywords.

    Parameters
    ----------
    given
        As for :func:`attend`, with ``cache_seqlens`` as an array.
    beside
        As for :func:`attend`, with both destinations.
    interleaved
        As the caller gave it.
    options
        The checked keywords.
    """
    others = {name: array for name, array in given.items() if name != "cache_seqlens"}
    call = _call(others, ("q", "k_cache", "v_cache"), given["cache_seqlens"], interleaved, None)
    natives = _appended(call, adopt_all(beside), options)
    targets = {name: natives.pop(name) for name in TARGETS}
    out = targets["out"]
    if _is_computed_wider(call):
        natives, targets["out"] = _widened(natives), np.empty(out.shape, np.float32)
    dispatch.run("forward", natives, targets, asked(options, call.device))
    if _is_computed_wider(call):
        _round_into(out, targets["out"])


def _appended(call: CacheCall, beside: Mapping[str, Adopted], options: Options) -> dict[str, Any]:
    """Check everything, append, and return the arrays for attention by its argument names."""
    _check_place(call, options)
    _check_attention(call, beside, options)
    _check_written(call, beside)
    run = _on_host if call.device is None else _on_device
    return run(call, advances(options)) | {name: array.native for name, array in beside.items()}


def _forward(natives: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    return dispatch.call("forward", natives, keywords)


def _is_computed_wider(call: CacheCall) -> bool:
    """Return whether attention runs in float32 instead of q's dtype: for float8 on the host."""
    return call.scales is not None and call.device is None


def _in_float32(natives: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Run attention with queries widened to float32, and round the output to their dtype."""
    q, out = natives["q"], natives.get("out")
    wide = {name: array for name, array in natives.items() if name != "out"}
    results = _forward(_widened(wide), keywords)
    made = np.empty(results["out"].shape, q.dtype) if out is None else out
    _round_into(made, results["out"])
    return {**results, "out": made}


def _widened(natives: Mapping[str, Any]) -> dict[str, Any]:
    wide = {name: natives[name].astype(np.float32) for name in ("q", "sinks") if name in natives}
    return {**natives, **wide}


def _round_into(out: Any, result: Any) -> None:
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        out[...] = result


def _call(
    given: Mapping[str, Any],
    needed: tuple[str, ...],
    cache_seqlens: Any,
    interleaved: Any,
    cache_dtype: Any,
    max_seqlen_q: Any = None,
) -> CacheCall:
    length, lengths = length_of(cache_seqlens)
    others = {name: value for name, value in given.items() if name not in SCALES}
    arrays = adopt_all({**others, "cache_seqlens": lengths}, needed)
    caches = {name: arrays[name].spec.dtype for name in ("k_cache", "v_cache")}
    float8 = check_cache_dtype(cache_dtype, caches)
    scales, numbers = split_scales(given, float8)
    arrays = {**as_bytes(arrays), **adopt_scales(scales)}
    return check_call(arrays, length, interleaved, numbers if float8 else None, max_seqlen_q)


def _check_place(call: CacheCall, options: Options) -> None:
    """Check that the backend is that of the caches' memory: caches are never moved.

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


def _check_attention(call: CacheCall, beside: Mapping[str, Adopted], options: Options) -> None:
    """Plan attention, which checks its arrays, before a cache is written."""
    names = ("q", "k_cache", "v_cache", ARGUMENT, *_PLACES, *SCALES)
    specs = {name: call.spec(name) for name in names if name in call.arrays}
    specs |= {name: array.spec for name, array in beside.items()}
    plan_attention(specs, call.sizes, options, call.scales)


def _check_written(call: CacheCall, beside: Mapping[str, Adopted]) -> None:
    """Check that written arrays share memory with no other array."""
    caches = ("k_cache", "v_cache") if "k" in call.arrays else ()
    every = {**call.arrays, **beside}
    names = [name for name in (*caches, "overflow", *TARGETS) if name in every]
    written = {name: every.pop(name) for name in names}
    check_writable(written, every)


def _on_host(call: CacheCall, advance: bool) -> dict[str, Any]:
    """Append, and return the arrays for attention."""
    rows: Any = call.spec("q").shape[1]
    if call.sizes.most_queries:
        check_queries(call)
        rows = queries_of(call)
    turned = (rows if advance else np.minimum(rows, 1)) if call.interleaved is not None else 0
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
    """Append, and return the arrays for attention, on the stream of the caches' device."""
    before, q = device.lengths_before(call), call.native("q")
    if "k" in call.arrays:
        appended = device.append(call, before, advance, dispatch.tell)
        before, q = appended.lengths, appended.queries
    caches = {name: call.native(f"{name}_cache") for name in ("k", "v")}
    places = {name: array.native for name, array in device.places(call).items()}
    scales = {name: call.native(name) for name in SCALES if name in call.arrays}
    return {"q": q, **caches, "seqused_kv": before, **places, **scales}
