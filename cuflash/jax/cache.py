"""The function for caches of keys and values inside JAX, which returns the updated caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..caches.given import check_interleaved, length_of
from ..options import AlgorithmChoice, WindowSize, check_flag, check_options
from .arguments import as_array
from .cache_primitive import run_cached
from .cached import FEATURES, CachedCall
from .float8 import scales_of
from .keywords import KNOWN, as_number
from .lengths import as_int32

__all__ = ["attention_with_kvcache"]

_MATRICES = ("q", "k_cache", "v_cache", "k", "v")
_CACHES = ("k_cache", "v_cache")
_NEEDED = ("q", *_CACHES)
_INTEGERS = ("page_table", "cache_batch_idx", "cache_leftpad", "rotary_seqlens")
_OTHERS = ("rotary_cos", "rotary_sin", *FEATURES)
_KEYWORDS = ("causal", "window_size", "softcap", "scale", "kv_chunk", "algorithm", "blocks")

#: Known lengths are clamped to this range, for an array of int32.
_LEAST, _MOST = -1, 2**31 - 1


def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool | None = None,
    rotary_seqlens: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    kv_chunk: int | None = None,
    return_lse: bool = False,
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
    """Append new tokens to caches; return attention over the caches, and the caches.

    This is :func:`cuflash.attention_with_kvcache` under :func:`jax.jit`. If the
    computation may overwrite the given caches (they are donated, or a loop carries
    them), XLA writes them in place. Otherwise it copies them first.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries, of JAX or what :func:`jax.numpy.asarray` takes; float16,
        bfloat16, float32, or float64 where ``jax_enable_x64`` is set.
    k_cache, v_cache : array, (batch, capacity, heads_kv, width), or with a page table \
(pages, page_size, heads_kv, width)
        Keys and values of earlier tokens, of q's dtype, or ``jnp.float8_e4m3fn``.
    k, v : array, (batch, new_tokens, heads_kv, width), optional
        New tokens, both or neither.
    cache_seqlens : int or array of integers, (batch,) or ()
        Length of every entry before the append, or one length for all entries.
    page_table, cache_batch_idx, cache_leftpad, rotary_seqlens : array of integers, optional
        As for :func:`cuflash.attention_with_kvcache`.
    rotary_cos, rotary_sin, rotary_interleaved
        Likewise.
    k_scale, v_scale : number or array of float32, (), (1,) or (batch, heads_kv)
        Scales of float8 caches, which need both: as for :func:`cuflash.append_kv`. The
        other arrays are then float16 or bfloat16. A number is compiled in; an array may
        be traced, and its numbers are not checked.
    causal, window_size, softcap, scale, kv_chunk, algorithm, blocks
        Likewise, compiled in. The last query sees the last key.
    alibi_slopes, sinks : array, optional
        Likewise.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        Of q's dtype. A row that sees no key is 0.
    k_cache, v_cache : array
        The caches after the append; without new tokens as they were given.
    overflow : array of int32, (batch,)
        Number of new tokens of every entry that have no slot, or no position in
        the rotary tables. These tokens are not written, and change no memory.
    lse : array, (batch, heads_q, seqlen_q)
        Only with ``return_lse``.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, when the call is traced.
    UnsupportedError
        For derivatives, in forward and in reverse mode; under
        :func:`jax.vmap`, since the arrays have a batch axis; and as for
        :func:`cuflash.jax.attention` and :func:`cuflash.attention_with_kvcache`.
    BackendUnavailableError, ToolchainError, CompileError
        As for :func:`cuflash.jax.attention`.

    Notes
    -----
    Lengths, tables and scales that are arrays are read as the computation runs. On
    CUDA lengths are clamped to the range from 0 to the capacity, and numbers of
    pages or entries to the existing ones. On the CPU JAX reports the
    ArgumentValueError as an error of JAX with the same text, before a cache is
    written.

    Arrays that are divided over several devices are gathered first; on a mesh of
    explicit axes they are refused. Inside :func:`jax.shard_map` each device attends
    to its own heads, or its own entries. If heads are divided there, JAX cannot infer
    that ``overflow`` is the same on all devices: use :func:`jax.lax.pmax` of it.

    Examples
    --------
    One token in float8 caches of 8 slots, of which the first two hold 0:

    >>> import jax.numpy as jnp, cuflash.jax
    >>> caches = jnp.zeros((2, 1, 8, 1, 16), "float8_e4m3fn")
    >>> q, k, v = jnp.ones((3, 1, 1, 1, 16), "float16")
    >>> out, k_cache, v_cache, overflow = cuflash.jax.attention_with_kvcache(
    ...     q, *caches, k, v, cache_seqlens=2, k_scale=0.5, v_scale=0.25
    ... )
    >>> k_cache[0, 1:4, 0, 0].tolist(), v_cache[0, 1:4, 0, 0].tolist(), overflow.tolist()
    ([0.0, 2.0, 0.0], [0.0, 4.0, 0.0], [0])
    """
    given = dict(locals())
    with_lse = check_flag("return_lse", return_lse)
    call, arrays = _call_of(given)
    made = run_cached(call, arrays)
    caches = [made.get(name, arrays[name]) for name in _CACHES]
    overflow = made["overflow"] if "overflow" in made else jnp.zeros(made["out"].shape[0], "int32")
    return (made["out"], *caches, overflow, *([made["lse"]] if with_lse else []))


def _call_of(given: Mapping[str, Any]) -> tuple[CachedCall, dict[str, Any]]:
    """Return the call, and its arrays in order, checked against each other."""
    options = check_options(**{name: as_number(name, given[name], KNOWN) for name in _KEYWORDS})
    arrays = {
        name: as_array(name, given[name])
        for name in (*_MATRICES, *_OTHERS)
        if given[name] is not None or name in _NEEDED
    }
    integers = {name: given[name] for name in _INTEGERS if given[name] is not None}
    arrays |= {name: as_int32(name, as_array(name, array)) for name, array in integers.items()}
    scaled, scales = scales_of(given, {name: arrays[name] for name in _CACHES})
    arrays |= scaled
    length, lengths = length_of(given["cache_seqlens"])
    batch = arrays["q"].shape[:1]
    if length is not None:
        arrays["cache_seqlens"] = jnp.full(batch, min(max(length, _LEAST), _MOST), "int32")
    else:
        lengths = as_int32("cache_seqlens", as_array("cache_seqlens", lengths))
        arrays["cache_seqlens"] = jnp.broadcast_to(lengths, lengths.shape or batch)
    interleaved = check_interleaved(given["rotary_interleaved"], "rotary_cos" in arrays)
    call = CachedCall(options, interleaved, tuple(arrays), scales)
    call.results_of(list(arrays.values()), length)
    return call, arrays
