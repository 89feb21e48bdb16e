"""Caches of keys and values: appending to them, and attention over them."""

from __future__ import annotations

from typing import Any

from ..caches.attend import append_to, attend
from ..options import AlgorithmChoice, BackendChoice, WindowSize

__all__ = ["append_kv", "attention_with_kvcache"]


def append_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool | None = None,
    rotary_seqlens: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    cache_dtype: Any = None,
    overflow: Any = None,
    backend: BackendChoice = "auto",
) -> None:
    """Append new keys and values to caches, in place.

    Parameters
    ----------
    k : array, (batch, new_tokens, heads_kv, head_dim)
        Keys of the new tokens; float16, bfloat16, float32 or float64.
    v : array, (batch, new_tokens, heads_kv, head_dim_v)
        Their values.
    k_cache : array, (batch, capacity, heads_kv, head_dim), or with a page table \
(pages, page_size, heads_kv, head_dim)
        Where keys are written. Of k's dtype, or float8. Strides may be any, except that the last
        axis has no gaps. (Arrays that are only read may have any strides; CUDA
        copies those whose last axis has gaps.)
    v_cache : array, as k_cache with head_dim_v
        Where values are written.
    cache_seqlens : int or array of int32, (batch,)
        Length of every entry before the append: token i goes to slot
        ``cache_seqlens[b] + i``. CUDA reads the array as it runs, and clamps
        lengths to the range from 0 to the capacity.
    page_table : array of int32, (batch, pages of an entry), optional
        Slot s of entry b is slot ``s % page_size`` of page
        ``page_table[b, s // page_size]``. The capacity is that of all pages of
        a row. Numbers of pages that get no new token are not read.
    cache_batch_idx : array of int32, (batch,), optional
        The entry of the cache for every entry of the batch; by default the one
        with the same index. Not with ``page_table``. If two entries of the batch
        write to the same slot, its contents are undefined.
    rotary_cos, rotary_sin : array, (positions, pairs), optional
        Keys are rotated before they are written: at position p, pair i of
        columns ``(x, y)`` becomes ``(x cos[p, i] - y sin[p, i],
        x sin[p, i] + y cos[p, i])``. float32 (float64 for float64), C-contiguous;
        ``2 * pairs`` is at most head_dim, and the columns after them do not
        change. Computed in the dtype of the tables, rounded once.
    rotary_interleaved : bool
        Needed with the tables, since libraries differ. True: pair i has the columns 2i and
        2i + 1 (GPT-J); False: i and pairs + i (GPT-NeoX, Llama).
    rotary_seqlens : array of int32, (batch,), optional
        Position of an entry's first new token, by default its slot.
    k_scale, v_scale : number or array of float32, (), (1,) or (batch, heads_kv)
        Scales of float8 caches, which need them: a key is ``k_scale`` times the
        stored number. New keys are rotated, rounded to their dtype, divided by
        the scale, rounded to the nearest float8 number (ties to even), and
        saturated to +-448. NaN stays NaN. A scale is above 0.
    cache_dtype : "float8_e4m3fn" or that dtype, optional
        Dtype of the numbers in caches that are given as uint8. Caches that are
        arrays of ``ml_dtypes.float8_e4m3fn`` do not need it. With float8 caches
        k, v and queries are float16 or bfloat16.
    overflow : array of int32, (batch,), optional
        Set to the number of new tokens of every entry that have no slot, or no
        position in the tables (if the first position is below 0, no token of the
        entry has one). These tokens are not written, and change no memory.
    backend : {"auto", "cuda", "numpy"}
        The backend of the memory that holds the caches; another one is refused.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, what it got and what is needed, before anything is
        written. For arrays in host memory also if a length, an entry of a
        table or a position is out of range, or if a token does not fit and
        ``overflow`` is not given. CUDA does not write such tokens.
    BackendUnavailableError, ToolchainError, CompileError, LaunchError
        As for :func:`attention`.

    Notes
    -----
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    2021. Angles of large positions need tables that were computed in float64.
    CUDA work is queued on CuPy's current stream of the caches' device.
    """
    given = {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table,
        "cache_batch_idx": cache_batch_idx,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": rotary_seqlens,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "overflow": overflow,
    }
    append_to(given, cache_seqlens, rotary_interleaved, cache_dtype, backend)


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
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    cache_dtype: Any = None,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    kv_chunk: int | None = None,
    overflow: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
) -> Any:
    """Append new tokens to caches, and return attention over the caches.

    The contract is that of flash-attn's ``flash_attn_with_kvcache``.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries, as for :func:`attention`; with ``cu_seqlens_q`` (total_q, heads_q, head_dim).
    k_cache, v_cache : array
        As for :func:`append_kv`; written only where there are new tokens.
        heads_kv divides heads_q.
    k, v : array, optional
        New tokens, both or neither: they are appended first, as
        :func:`append_kv` does. Their number may differ from seqlen_q, unless queries are packed.
    cache_seqlens : int or array of int32, (batch,)
        Length of every entry before the append. The length after it is larger
        by the new tokens that fit. Later slots are never used and may hold
        anything. An int is refused while a CUDA graph is captured.
    page_table, cache_batch_idx : array of int32, optional
        As for :func:`append_kv`. Numbers of pages without a used slot may be anything. On
        CUDA a number out of range is clamped to the nearest page.
    cache_leftpad : array of int32, (batch,), optional
        Number of slots at the beginning of every entry that are not used. They
        are part of its length, and positions include them.
    rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens
        As for :func:`append_kv`; only with new tokens. Queries are rotated too:
        with ``causal`` or a window, row i at position ``cache_seqlens[b] + i``,
        otherwise all rows at ``cache_seqlens[b]`` (``rotary_seqlens[b]`` where
        it is given). A query beyond the tables is NaN, and so is its output.
    cu_seqlens_q : array of int32, (batch + 1,), optional
        Packed queries: rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, and
        of ``k`` and ``v``, belong to entry b; ``k`` and ``v`` then are (total_q,
        heads_kv, ...). Offsets begin at 0 and never decrease. With other offsets CUDA
        results are undefined, but no other memory is touched. Rows after the last offset
        belong to no entry: they are not appended, and see no key and no sink.
    max_seqlen_q : int, optional
        The most queries of an entry; only with ``cu_seqlens_q``. CUDA needs it, and
        chooses tile and chunk for it, but results are right for more. Host arrays with
        more are refused.
    k_scale, v_scale, cache_dtype
        As for :func:`append_kv`. Stored numbers are converted to q's dtype, which holds all
        of them exactly. Scales are applied in float32: ``k_scale`` to the scores,
        ``v_scale`` to the output.
    causal : bool
        The last query sees the last key, the query before it all but the last:
        query i sees slot j iff ``j <= i + length after the append - seqlen_q``. With
        ``cu_seqlens_q`` lengths are those of the entry.
    window_size : (int or None, int or None), optional
        ``(left, right)`` around that slot, as for :func:`attention`. None is no
        bound, which is -1 in flash-attn; -1 is refused.
    softcap, alibi_slopes, sinks, scale
        As for :func:`attention`.
    kv_chunk : int, optional
        As for :func:`attention`. By default the tile and the chunk follow from widths, heads,
        seqlen_q, the capacity, and whether arrays are aligned to 16 bytes: a row
        has the same bits in a batch of any size. NumPy has no chunks.
    overflow : array of int32, (batch,), optional
        As for :func:`append_kv`; only with new tokens.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Destinations, returned as given.
    backend : {"auto", "cuda", "numpy"}
        As for :func:`append_kv`.
    algorithm, blocks
        As for :func:`attention`.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)
        As for :func:`attention`. A row that sees no key is 0.
    lse : array, (batch, heads_q, seqlen_q) or (heads_q, total_q)
        Only with ``return_lse``; for a row that sees no key the sink, or minus infinity.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As for :func:`append_kv` and :func:`attention`, before a cache is written.
    UnsupportedError
        As for :func:`attention`; and on CUDA for ``algorithm="fa1"`` with
        ``page_table``, ``cache_batch_idx``, ``cache_leftpad`` or ``cu_seqlens_q``, and
        for "fa3" if its tiles are not a whole number of pages: "auto" then takes "fa2".
        Float8 caches need head_dims that are multiples of 16, and addresses and strides
        that are multiples of 16 bytes. Up to 16 queries, or 16 query heads of one query,
        take "fa2", from compute capability 8.9 on; more take "fa3", on Hopper GPUs, with
        pages of multiples of 8 slots and no ``cache_leftpad`` with a ``page_table``.
    BackendUnavailableError, ToolchainError, CompileError, LaunchError
        As for :func:`attention`.

    Notes
    -----
    Dao, "flash-attn", ``flash_attn_with_kvcache``. On CUDA nothing on the host
    depends on lengths: they may change in a graph. If a token does not fit,
    the last query is at the last used slot.
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    given |= {
        "page_table": page_table,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": rotary_seqlens,
        "cu_seqlens_q": cu_seqlens_q,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "overflow": overflow,
    }
    beside = {"alibi_slopes": alibi_slopes, "sinks": sinks, "out": out, "lse_out": lse_out}
    keywords = {
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "scale": scale,
        "backend": backend,
        "algorithm": algorithm,
        "blocks": blocks,
        "kv_chunk": kv_chunk,
        "return_lse": return_lse,
    }
    others = cache_seqlens, rotary_interleaved, cache_dtype, keywords, max_seqlen_q
    results = attend(given, beside, *others)
    return results if return_lse else results[0]
