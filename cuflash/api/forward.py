"""Attention."""

from __future__ import annotations

from typing import Any, Literal, overload

from ..arrays.spec import LayoutName
from ..block_mask import BlockMask, split_block_mask
from ..dispatch import call
from ..given import add_given
from ..options import AlgorithmChoice, BackendChoice, WindowSize, seed_of
from ..resuming import resumed
from ..score_mod import ScoreMod, with_arrays

__all__ = ["attention"]


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = ...,
    window_size: WindowSize | None = ...,
    softcap: float | None = ...,
    score_mod: ScoreMod | None = ...,
    alibi_slopes: Any = ...,
    bias: Any = ...,
    mask: Any = ...,
    block_mask: BlockMask | None = ...,
    sinks: Any = ...,
    dropout_p: float | None = ...,
    dropout_seed: Any = ...,
    seqused_q: Any = ...,
    seqused_kv: Any = ...,
    cu_seqlens_q: Any = ...,
    cu_seqlens_kv: Any = ...,
    scale: float | None = ...,
    q_offset: int | None = ...,
    layout: LayoutName | None = ...,
    resume: tuple[Any, Any] | None = ...,
    return_lse: Literal[True],
    out: Any = ...,
    lse_out: Any = ...,
    out_dtype: Any = ...,
    backend: BackendChoice = ...,
    algorithm: AlgorithmChoice = ...,
    blocks: tuple[int, int] | None = ...,
    kv_chunk: int | None = ...,
    workspace: Any = ...,
) -> tuple[Any, Any]: ...


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = ...,
    window_size: WindowSize | None = ...,
    softcap: float | None = ...,
    score_mod: ScoreMod | None = ...,
    alibi_slopes: Any = ...,
    bias: Any = ...,
    mask: Any = ...,
    block_mask: BlockMask | None = ...,
    sinks: Any = ...,
    dropout_p: float | None = ...,
    dropout_seed: Any = ...,
    seqused_q: Any = ...,
    seqused_kv: Any = ...,
    cu_seqlens_q: Any = ...,
    cu_seqlens_kv: Any = ...,
    scale: float | None = ...,
    q_offset: int | None = ...,
    layout: LayoutName | None = ...,
    resume: tuple[Any, Any] | None = ...,
    return_lse: bool = ...,
    out: Any = ...,
    lse_out: Any = ...,
    out_dtype: Any = ...,
    backend: BackendChoice = ...,
    algorithm: AlgorithmChoice = ...,
    blocks: tuple[int, int] | None = ...,
    kv_chunk: int | None = ...,
    workspace: Any = ...,
) -> Any: ...


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    block_mask: BlockMask | None = None,
    sinks: Any = None,
    dropout_p: float | None = None,
    dropout_seed: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: LayoutName | None = None,
    resume: tuple[Any, Any] | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    out_dtype: Any = None,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
    workspace: Any = None,
) -> Any:
    """Exact attention: ``softmax(scale * q k^T + mask) v``, without the square in memory.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries. NumPy, CuPy, or anything with DLPack or
        ``__cuda_array_interface__``; float16, bfloat16 (the interface cannot
        say it), float32 or float64; head_dim 1 to 256. A subclass counts as a
        plain array; masked arrays, matrices and quantities with a unit are refused.
    k : array, (batch, seqlen_kv, heads_kv, head_dim)
        Keys. heads_kv divides heads_q; query head h reads kv head
        ``h // (heads_q // heads_kv)``.
    v : array, (batch, seqlen_kv, heads_kv, head_dim_v)
        Values.
    causal : bool
        Query i sees key j iff ``j <= i + q_offset``.
    window_size : (int or None, int or None), optional
        ``(left, right)``: query i sees key j iff ``i + q_offset - left <= j <=
        i + q_offset + right``, both ends included; None: no bound on that
        side. With ``causal`` the right side is 0.
    softcap : float, optional
        Scores ``s = scale * q k^T`` become ``softcap * tanh(s / softcap)``
        before the mask; sinks are not capped. On CUDA bfloat16 takes the
        approximate hyperbolic tangent, with a relative error of 2^-11.
        ``softcap`` and ``scale / softcap`` are from 2^-100 to 2^100, for
        float64 from 2^-900 to 2^900. None and 0: no cap.
    score_mod : ScoreMod, optional
        A function that scores, but not sinks, go through before slopes, bias
        and mask: see :class:`ScoreMod`. Not with ``softcap``.
    alibi_slopes : array, (heads_q,) or (batch, heads_q), optional
        ALiBi: a score loses ``alibi_slopes[h] * abs(i + q_offset - j)``, after
        the softcap and before the mask; sinks lose nothing. float32 (float64
        for float64), finite, of either sign. It needs ``q_offset`` from
        -(2^30 - 2^12) to 2^30 - 2^12, and but for float64 ``softcap``, or
        ``scale`` without one, from 2^-60 to 2^60.
    bias : array, broadcasts against (batch, heads_q, seqlen_q, seqlen_kv), optional
        Numbers that are added to the scores, after the softcap and before the
        mask. Each axis may be 1, the first ones may be left out, and strides
        may be any: nothing is repeated in memory, but for an array on the
        host that CUDA computes with. Of q's dtype or float32.
        Minus infinity hides a pair; a row that is so hidden whole sees no key,
        and if it has a sink its ``q`` and ``dout`` have to be finite. Infinity and NaN
        make their rows NaN. Needs a ``scale`` or ``softcap`` as ``alibi_slopes`` does.
    mask : array of bool, broadcasts like ``bias``, optional
        Query i sees key j only where ``mask[b, h, i, j]`` and all else that
        hides keys let it. Strides and rows that it hides whole: as of ``bias``.
    block_mask : BlockMask, optional
        The same of whole blocks of queries and keys, of dead rows too.
    sinks : array, (heads_q,), optional
        A learned logit of every query head, of q's dtype or float32 (float64
        for float64), that takes part in the softmax and has no value:
        ``lse = log(sum_j exp(z_j) + exp(sinks[h]))``. Minus infinity is no
        sink; plus infinity and NaN make the head's ``out`` and ``lse`` NaN.
    dropout_p : float, optional
        The part of the weights that is left out of ``out``, at random; those
        that stay are divided by the part that stays. At least 0, which is the
        same as None, and below 1; rounded to a multiple of 2^-14, for the
        weights as for the divisor. ``lse`` is of all weights; sinks are kept.
    dropout_seed : int, or array of uint32, (2,) or (4,), optional
        Needed where ``dropout_p`` is above 0, and refused where it is not: an
        integer below 2^64; or its lower and upper word as an array, perhaps
        followed by those of an offset. Which weights are dropped depends on
        it, the entry of the batch, the number of query heads, the head, the
        query and the key alone (Philox4x32 with 7 rounds), and
        :func:`dropout_mask` says it. Every integer is decided anew, as every
        value of a keyword is; an array may change, also in a CUDA graph.
    seqused_q, seqused_kv : array of int32, (batch,), optional
        How many queries and keys of every entry count, the first ones; clamped
        to those there are. What the others hold is never used: ``out`` of such
        a query is 0 and its ``lse`` minus infinity. Without ``q_offset`` query
        0 of entry b stands at key ``seqused_kv[b] - seqused_q[b]``. CUDA reads
        them as it runs: they may change in a graph.
    cu_seqlens_q, cu_seqlens_kv : array of int32, (sequences + 1,), optional
        Both or neither: rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of
        q are sequence b, and see its keys alone. For ``layout="shd"``. The
        first offset is 0; they do not fall, and are clamped to the rows there
        are. Rows behind the last are no sequence's: ``out`` is 0 there, ``lse``
        minus infinity. Query 0 of b stands at key ``q_offset``, by default
        where the last query sees the last key. Read by CUDA as it runs.
    scale : float, optional
        Factor of the scores, 2^-100 to 2^100 (float64: 2^900); default ``1 / sqrt(head_dim)``.
    q_offset : int, optional
        Position of query 0 among the keys; by default ``seqlen_kv - seqlen_q`` (the last query
        sees the last key). 0 is the alignment of JAX and PyTorch. Without a mask, a window or
        ALiBi it changes nothing.
    layout : {"bshd", "bhsd", "shd", "hsd", "sd"}, optional
        Order of the axes; by default "bshd" for 4 and "sd" for 2 of them.
    resume : (array, array), optional
        ``out`` and ``lse`` of these queries over other keys: the results are then those over
        all these keys, as of :func:`merge`, float32 as both are (float64 for float64), and
        may be written over them. Give ``q_offset``, and sinks to one call, the last.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Destinations, returned as given; they must not overlap an input, each
        other or themselves, also as mappings of the same bytes of a file.
    out_dtype : dtype, optional
        float32 for the output of 16-bit inputs; else the dtype of q. Also of
        another library (``torch.float32``). By default that of ``out``.
    backend : {"auto", "cuda", "numpy"}
        Arrays in CUDA memory are computed there. With "auto" NumPy arrays go
        to the GPU and back where one can be used, else to the tiled NumPy
        code; "numpy" keeps them on the host.
    algorithm : {"auto", "fa1", "fa2", "fa3"}
        "auto" takes the best that can do the problem, as :func:`explain` says; a named one
        never falls back.
    blocks : (int, int), optional
        ``(block_q, block_kv)`` instead of the planned tile.
    kv_chunk : int, optional
        Keys that one thread block walks, a multiple of the tile's; another
        block walks the next ones, and a kernel merges what they make of a row
        (Dao et al., "Flash-Decoding", 2023). Chunks begin at multiples of it.
        0: one block walks all keys of a row. By default as the plan finds best.
        A row's bits depend on the tile and the chunk, not on the batch.
    workspace : CuPy array of uint8, optional
        At least ``prepare(...).workspace_bytes`` bytes, 256-byte aligned, not
        used by anything else until the call has run. By default it is
        allocated; while a CUDA graph is captured it is then kept for the life
        of the process, since the graph goes on using it, and so is what the
        call copies. Arrays in host memory are refused in a capture.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        Of q's layout, C-contiguous, and of q's kind: made by the ``from_dlpack`` of its
        library, so of a subclass it is the plain array (``numpy.ndarray``, ``torch.Tensor``),
        and of a library without one a NumPy or CuPy array. A row that sees no key is 0.
    lse : array, (batch, heads_q, seqlen_q)
        Only with ``return_lse``: natural log of the sum of exp of the scaled,
        masked scores, and of sinks; float32, or float64 for float64. Of a row
        that sees no key the sink, or minus infinity. Without axes that the layout lacks.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, what it got and what is needed, before anything
        is compiled, launched or written.
    UnsupportedError
        If the algorithm cannot do this problem on this device.
    BackendUnavailableError, ToolchainError
        If CUDA is needed and cannot be used.
    CompileError, LaunchError
        If the compiler or the driver refuses a kernel, with the plan.

    Notes
    -----
    Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023. CUDA work is
    queued on CuPy's current stream of the arrays' device; nothing waits for it unless
    the result is a NumPy array.

    Range: sums are formed in float32 (float64 for float64 inputs), and what exceeds it becomes
    infinite or NaN: ``q k^T`` before the scale, ``scale * q``, scores, and the sum over the keys
    that ``out`` is divided from. That sum is finite with |v| at most 3.4e38 / seqlen_kv for
    float32 inputs, 1.8e308 / seqlen_kv for float64 and 8e34 / seqlen_kv for bfloat16 (weights are
    kept relative to an older maximum, up to a factor of 4096).
    """
    block, shown = split_block_mask(block_mask)
    seed, seeds = seed_of(dropout_seed)
    score, of_score = with_arrays(score_mod)
    keywords: dict[str, Any] = {"causal": causal, "window_size": window_size, "softcap": softcap}
    keywords |= {"score_mod": score, "block_mask": block}
    keywords |= {"dropout_p": dropout_p, "dropout_seed": seed, "scale": scale}
    keywords |= {"q_offset": q_offset, "layout": layout, "out_dtype": out_dtype}
    keywords |= {"backend": backend, "algorithm": algorithm, "blocks": blocks}
    keywords["kv_chunk"] = kv_chunk
    keywords["return_lse"] = return_lse
    arrays = {"q": q, "k": k, "v": v}
    lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
    given = alibi_slopes, bias, mask, shown, sinks, seeds, *lengths, out, lse_out, workspace
    if of_score or any(array is not None for array in given):
        add_given(arrays, given, of_score, ("out", "lse_out", "workspace"))
    if resume is not None:
        return resumed(arrays, keywords, resume)
    results = call("forward", arrays, keywords)
    return (results["out"], results["lse"]) if return_lse else results["out"]
