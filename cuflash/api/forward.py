"""Attention."""

from __future__ import annotations

from typing import Any, Literal, overload

from ..arrays.spec import LayoutName
from ..block_mask import BlockMask
from ..dispatch import call
from ..given import add_given, add_some, split_given
from ..options import AUTO, AlgorithmChoice, BackendChoice, WindowSize
from ..resuming import resumed
from ..score_mod import ScoreMod

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
    """Return exact attention, ``softmax(scale * q k^T + mask) v``; the scores are never stored.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries. NumPy, CuPy, or anything with DLPack or
        ``__cuda_array_interface__``; float16, bfloat16 (which the interface cannot
        name), float32 or float64; head_dim 1 to 256. A subclass counts as a
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
        A function that is applied to scores, but not to sinks, before slopes,
        bias and mask: see :class:`ScoreMod`. Not with ``softcap``.
    alibi_slopes : array, (heads_q,) or (batch, heads_q), optional
        ALiBi: ``alibi_slopes[h] * abs(i + q_offset - j)`` is subtracted from a score, after the
        softcap and before the mask, but not from sinks. float32 (float64 for float64), finite, of
        either sign. ``q_offset`` must be from -(2^30 - 2^12) to 2^30 - 2^12. Except for float64,
        ``softcap``, or ``scale`` if there is no softcap, must be from 2^-60 to 2^60.
    bias : array, broadcasts against (batch, heads_q, seqlen_q, seqlen_kv), optional
        Numbers that are added to the scores, after the softcap and before the mask. Each axis may
        be 1, the first ones may be left out, and strides may be any: no axis is repeated in memory,
        except where CUDA computes with an array on the host. Of q's dtype or float32. Minus
        infinity hides a pair. A row whose pairs are all hidden sees no key; if it has a sink, its
        ``q`` and ``dout`` must be finite. Infinity and NaN make their rows NaN. Needs a ``scale``
        or ``softcap`` as ``alibi_slopes`` does.
    mask : array of bool, broadcasts like ``bias``, optional
        Query i sees key j only where ``mask[b, h, i, j]`` is True and nothing
        else hides j. Strides and rows without a visible key: as for ``bias``.
    block_mask : BlockMask, optional
        A mask of whole blocks of queries and keys. Rows without a visible key: as for ``bias``.
    sinks : array, (heads_q,), optional
        A learned logit of every query head, of q's dtype or float32 (float64
        for float64), that takes part in the softmax and has no value:
        ``lse = log(sum_j exp(z_j) + exp(sinks[h]))``. Minus infinity is no
        sink; plus infinity and NaN make the head's ``out`` and ``lse`` NaN.
    dropout_p : float, optional
        Fraction of the weights that is dropped from ``out``, at random; the kept weights are
        divided by the fraction that is kept. At least 0 (the same as None) and below 1; rounded to
        a multiple of 2^-14, also for the divisor. ``lse`` is that of all weights; sinks are never
        dropped.
    dropout_seed : int, or array of uint32, (2,) or (4,), optional
        Needed where ``dropout_p`` is above 0, and refused where it is not: an integer below 2^64;
        or an array of its lower and upper word, optionally followed by the two words of an offset.
        The dropped weights depend on the seed, the entry of the batch, the number of query heads,
        the head, the query and the key alone (Philox4x32 with 7 rounds); :func:`dropout_mask` shows
        them. Every new integer is planned anew, as every new value of a keyword is; an array may
        change, also in a CUDA graph.
    seqused_q, seqused_kv : array of int32, (batch,), optional
        Every entry uses its first ``seqused_q[b]`` queries and ``seqused_kv[b]`` keys, clamped to
        the rows it has. The other rows may hold anything: ``out`` of such a query is 0 and its
        ``lse`` minus infinity. Without ``q_offset`` query 0 of entry b is at key ``seqused_kv[b] -
        seqused_q[b]``. CUDA reads the lengths as it runs: they may change in a graph.
    cu_seqlens_q, cu_seqlens_kv : array of int32, (sequences + 1,), optional
        Both or neither: rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of
        q are sequence b, and see only its keys. For ``layout="shd"``. The first
        offset is 0, offsets never decrease, and they are clamped to the number of
        rows. Rows after the last offset are in no sequence: their ``out`` is 0,
        ``lse`` minus infinity. Query 0 of b is at key ``q_offset``. By default
        its last query sees its last key. CUDA reads the offsets as it runs.
    scale : float, optional
        Factor of the scores, 2^-100 to 2^100 (float64: 2^900); default ``1 / sqrt(head_dim)``.
    q_offset : int, optional
        Position of query 0 among the keys; by default ``seqlen_kv - seqlen_q`` (the last query
        sees the last key). 0 is the alignment of JAX and PyTorch. Without a mask, a window or
        ALiBi it changes nothing.
    layout : {"bshd", "bhsd", "shd", "hsd", "sd"}, optional
        Order of the axes; by default "bshd" for 4 and "sd" for 2 of them.
    resume : (array, array), optional
        ``out`` and ``lse`` of the same queries over other keys, float32 (float64 for float64).
        The results are then those over all keys, as for :func:`merge`, in the same dtype, and
        may be written over these arrays. Give ``q_offset``, and give sinks to the last call only.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Destinations, returned as given; they must not overlap an input, each
        other or themselves. Mappings of the same bytes of a file overlap too.
    out_dtype : dtype, optional
        float32 is possible for 16-bit inputs; otherwise the dtype of q. It may be
        another library's (``torch.float32``). By default that of ``out``, if given.
    backend : {"auto", "cuda", "numpy"}
        Arrays in CUDA memory are computed there. With "auto" NumPy arrays go
        to the GPU and back where one can be used, else to the tiled NumPy
        code; "numpy" keeps them on the host.
    algorithm : {"auto", "fa1", "fa2", "fa3"}
        "auto" takes the best one that supports the call, as :func:`explain` shows; a named
        one never falls back to another.
    blocks : (int, int), optional
        ``(block_q, block_kv)`` instead of the planned tile.
    kv_chunk : int, optional
        Number of keys that one thread block processes, a multiple of the tile's;
        another block processes the next chunk, and a kernel merges their results
        (Dao et al., "Flash-Decoding", 2023). Chunks begin at multiples of it.
        0: one block processes all keys of a row. By default the plan chooses.
        A row's bits depend on the tile and the chunk, not on the batch.
    workspace : CuPy array of uint8, optional
        At least ``prepare(...).workspace_bytes`` bytes, 256-byte aligned, not used by anything else
        until the call has run. By default it is allocated. In the capture of a CUDA graph the
        allocated workspace and the copies that the call makes are kept for the life of the process,
        since the graph goes on using them. Arrays in host memory are refused in a capture.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        In q's layout, C-contiguous, made by the ``from_dlpack`` of q's library: for a subclass the
        plain array (``numpy.ndarray``, ``torch.Tensor``), for a library without ``from_dlpack`` a
        NumPy or CuPy array. A row that sees no key is 0.
    lse : array, (batch, heads_q, seqlen_q)
        Only with ``return_lse``: natural log of the sum of exp of the scaled, masked scores, and of
        sinks; float32, or float64 for float64. For a row that sees no key it is the sink, or minus
        infinity. It lacks the axes that q's layout lacks.

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
    Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023. CUDA work is queued on CuPy's
    current stream of the arrays' device; nothing waits for it unless the result is a NumPy array.

    Range: sums are formed in float32 (float64 for float64 inputs), and values out of its range
    become infinite or NaN: ``q k^T`` before the scale, ``scale * q``, scores, and the weighted sum
    of values before its division. That sum is finite with |v| at most 3.4e38 / seqlen_kv for
    float32 inputs, 1.8e308 / seqlen_kv for float64 and 8e34 / seqlen_kv for bfloat16 (weights are
    relative to an older maximum, up to a factor of 4096).
    """
    # What is left out has its default. Calls that give few arguments take less time.
    arrays = {"q": q, "k": k, "v": v}
    keywords: dict[str, Any] = {"return_lse": return_lse}
    if causal is not False:
        keywords["causal"] = causal
    numbers = window_size is None and softcap is None and dropout_p is None and scale is None
    numbers = numbers and q_offset is None and kv_chunk is None and blocks is None
    if not (numbers and layout is None and out_dtype is None):
        add_some(keywords, window_size=window_size, softcap=softcap, dropout_p=dropout_p)
        add_some(keywords, scale=scale, q_offset=q_offset, layout=layout)
        add_some(keywords, out_dtype=out_dtype, blocks=blocks, kv_chunk=kv_chunk)
    if not (backend is AUTO and algorithm is AUTO):
        keywords |= {"backend": backend, "algorithm": algorithm}
    whole = seqused_q is seqused_kv is cu_seqlens_q is cu_seqlens_kv is None
    plain = alibi_slopes is bias is mask is sinks is dropout_seed is None and score_mod is None
    if not (plain and whole and block_mask is None):
        shown, seeds, of_score = split_given(keywords, score_mod, block_mask, dropout_seed)
        lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
        add_given(arrays, (alibi_slopes, bias, mask, shown, sinks, seeds, *lengths), of_score)
    if not out is lse_out is workspace is None:
        add_some(arrays, out=out, lse_out=lse_out, workspace=workspace)
    if resume is not None:
        return resumed(arrays, keywords, resume)
    results = call("forward", arrays, keywords)
    return (results["out"], results["lse"]) if return_lse else results["out"]
