"""Attention from its definition, with whole matrices: the oracle of the tests.

It has no tiles, backends or plans, and shares no code with the library except the error classes, so
that agreement with it is evidence. It computes one (batch, head) at a time: 4096 queries by 4096
keys need about half a gigabyte in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reference_caches import append_kv, attention_with_kvcache
from .reference_checks import (
    check_arrays,
    check_block_mask,
    check_dropout,
    check_options,
    checked_function,
    find_layout,
    from_heads_first,
    rows_from_heads_first,
    to_heads_first,
)
from .reference_heads import Heads
from .reference_packed import packed_backward, packed_forward
from .reference_scores import add_pairs

__all__ = ["append_kv", "attention", "attention_backward", "attention_with_kvcache"]

_Array = NDArray[Any]


def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    alibi_slopes: _Array | None = None,
    bias: _Array | None = None,
    mask: _Array | None = None,
    block_mask: Any = None,
    sinks: _Array | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | _Array | None = None,
    seqused_q: _Array | None = None,
    seqused_kv: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_kv: _Array | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    score_mod: Any = None,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: str | None = None,
    dtype: type[np.floating[Any]] = np.float64,
) -> tuple[_Array, _Array]:
    """Attention and the log-sum-exp of its scores.

    Parameters
    ----------
    q : ndarray, (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype, ``ml_dtypes.bfloat16`` included.
    k : ndarray, (batch, seqlen_kv, heads_kv, head_dim)
        Keys. Query head h reads kv head ``h // (heads_q // heads_kv)``.
    v : ndarray, (batch, seqlen_kv, heads_kv, head_dim_v)
        Values.
    alibi_slopes : ndarray, (heads_q,) or (batch, heads_q), optional
        The number subtracted from a score for every key of distance between query and key.
    bias : ndarray, broadcasts against (batch, heads_q, seqlen_q, seqlen_kv), optional
        Added to the scores; leading axes may be left out.
    mask : ndarray of bool, broadcasts like ``bias``, optional
        Query i sees key j only where it is True.
    block_mask : BlockMask, optional
        Query i sees key j only where ``blocks[b, h, i // bq, j // bkv]`` is not 0;
        its blocks are a NumPy array that broadcasts like ``bias``.
    sinks : ndarray, (heads_q,), optional
        A logit of each query head that takes weight and has no value.
    dropout_p : float, optional
        The share of the weights that is dropped; None and 0 keep all.
    dropout_seed : int, or ndarray of uint32, (2,) or (4,), optional
        Decides which weights are dropped.
    seqused_q, seqused_kv : ndarray of integers, (batch,), optional
        The number of queries and keys of each entry that count, from the first on; by default all.
        Numbers below 0 count as 0, and numbers beyond the array as its length.
    cu_seqlens_q, cu_seqlens_kv : ndarray of integers, (sequences + 1,), optional
        The begins of sequences that are packed in arrays of the layout "shd". Every "entry" above
        is then a sequence. Rows after the last offset belong to no sequence: 0, and minus infinity
        in lse.
    causal : bool
        Query i sees key j iff ``j <= i + q_offset``.
    window_size : (int or None, int or None), optional
        ``(left, right)``: query i sees key j iff ``i + q_offset - left <= j <=
        i + q_offset + right``; None: no bound on that side.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``; None and 0: no cap.
    score_mod : cuflash.ScoreMod, optional
        Its NumPy function replaces the scores. Not with ``softcap``.
    scale : float, optional
        Factor of the scores; by default ``1 / sqrt(head_dim)``.
    q_offset : int, optional
        Position of query 0 among the keys; by default the number of keys that count minus the
        number of queries that count.
    layout : {"bshd", "bhsd", "shd", "hsd", "sd"}, optional
        Order of the axes; by default "bshd" for 4 axes and "sd" for 2.
    dtype : type
        The type of the computation and of the results: ``numpy.float64``, or ``numpy.longdouble``
        to judge float64.

    Returns
    -------
    out : ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        In the layout of q.
    lse : ndarray, (batch, heads_q, seqlen_q)
        Without the axes that the layout lacks.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument: one that is not a NumPy array of real numbers, that does not fit the
        layout or earlier arguments, or an option with a wrong value.

    Notes
    -----
    With the sum over the keys j that count and that query i sees::

        S_ij  = scale * sum_c q_ic k_jc, with a softcap C: C tanh(S_ij / C),
                with a score_mod f: f(S_ij)
        Z_ij  = S_ij - alibi_slopes[h] |i + q_offset - j| + bias[b, h, i, j]
        lse_i = log(sum_j exp(Z_ij) + exp(sinks[h]))
        P_ij  = exp(Z_ij - lse_i)
        out_i = sum_j P_ij M_ij v_j

    M_ij is 1 without dropout. With dropout it is 0 where a weight, even NaN, is dropped, and
    otherwise 1 / (1 - p), with p the dropout_p rounded to a share of all draws. A row
    that sees no key is dead; so is one without a sink that sees only scores of minus infinity. Its
    out is 0 and its lse is the sink, or minus infinity without one. A NaN or plus infinity among
    the scores that a row sees, or as its sink, makes its out and lse NaN. Elements that no row sees
    never matter. A query that does not count sees no key and no sink: its out is 0 and its lse
    minus infinity.
    """
    if cu_seqlens_q is not None or cu_seqlens_kv is not None:
        return packed_forward(attention, dict(locals()))
    layout = find_layout(q, layout)
    features = {"alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "sinks": sinks}
    lengths = {"seqused_q": seqused_q, "seqused_kv": seqused_kv}
    check_arrays({"q": q, "k": k, "v": v}, layout, **features, **lengths)
    check_options(causal, window_size, softcap, scale, q_offset, dtype)
    check_dropout(dropout_p, dropout_seed)
    check_block_mask(block_mask, q, k, layout)
    q, k, v = (to_heads_first(x, layout) for x in (q, k, v))
    function = checked_function(score_mod, softcap)
    options = (dropout_p, dropout_seed, causal, window_size, softcap, function, scale, q_offset)
    heads = Heads(q, k, v, alibi_slopes, bias, mask, block_mask, sinks, lengths, *options, dtype)
    out = np.zeros((*q.shape[:3], v.shape[3]), dtype)
    lse = np.zeros(q.shape[:3], dtype)
    for b, h in np.ndindex(*q.shape[:2]):
        out[b, h], lse[b, h] = heads.forward(b, h)
    return from_heads_first(out, layout), rows_from_heads_first(lse, layout)


def attention_backward(
    dout: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    dlse: _Array | None = None,
    alibi_slopes: _Array | None = None,
    bias: _Array | None = None,
    mask: _Array | None = None,
    block_mask: Any = None,
    sinks: _Array | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | _Array | None = None,
    seqused_q: _Array | None = None,
    seqused_kv: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_kv: _Array | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    score_mod: Any = None,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: str | None = None,
    dtype: type[np.floating[Any]] = np.float64,
) -> tuple[_Array, ...]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to every array.

    Parameters
    ----------
    dout : ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of out.
    q, k, v, alibi_slopes, bias, mask, block_mask, sinks, dropout_p, dropout_seed
        As for :func:`attention`.
    seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv, causal, window_size, softcap, score_mod
        As for :func:`attention`.
    scale, q_offset, layout, dtype
        As for :func:`attention`.
    dlse : ndarray, (batch, heads_q, seqlen_q), optional
        Gradient of lse; by default 0.

    Returns
    -------
    dq, dk, dv : ndarray
        Shaped like q, k and v. Query heads that share a kv head are summed.
    dalibi_slopes : ndarray, (heads_q,) or (batch, heads_q)
        Only with slopes, and of their shape.
    dbias : ndarray
        Only with a bias, and of its shape.
    dsinks : ndarray, (heads_q,)
        Only with sinks.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As for :func:`attention`.

    Notes
    -----
    With P, M and out as in :func:`attention`, over the pairs where query i sees key j::

        dP_ij   = sum_c dout_ic v_jc
        delta_i = sum_c dout_ic out_ic
        dZ_ij   = P_ij (M_ij dP_ij - delta_i + dlse_i)
        dS_ij   = dZ_ij, with a softcap C: times 1 - (S_ij / C)^2, with a score_mod times f',
                  which comes from differences of f in extended precision
        dq_i    = scale * sum_j dS_ij k_j
        dk_j    = scale * sum_i dS_ij q_i
        dv_j    = sum_i P_ij M_ij dout_i
        dalibi_slopes = -sum_ij |i + q_offset - j| dZ_ij
        dbias   = dZ_ij, summed over the axes that bias broadcasts
        dsinks  = sum_i exp(sinks[h] - lse_i) (dlse_i - delta_i)

    The out and lse of a dead row depend only on the sink: its dq is 0, it adds nothing to dk and
    dv, and its delta is 0. A query that does not count adds nothing to any gradient, whatever its
    dout and dlse are.
    """
    if cu_seqlens_q is not None or cu_seqlens_kv is not None:
        return packed_backward(attention_backward, dict(locals()))
    layout = find_layout(q, layout)
    features = {"alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "sinks": sinks}
    lengths = {"seqused_q": seqused_q, "seqused_kv": seqused_kv}
    check_arrays({"q": q, "k": k, "v": v, "dout": dout}, layout, dlse=dlse, **features, **lengths)
    check_options(causal, window_size, softcap, scale, q_offset, dtype)
    check_dropout(dropout_p, dropout_seed)
    check_block_mask(block_mask, q, k, layout)
    dout, q, k, v = (to_heads_first(x, layout) for x in (dout, q, k, v))
    function = checked_function(score_mod, softcap)
    options = (dropout_p, dropout_seed, causal, window_size, softcap, function, scale, q_offset)
    heads = Heads(q, k, v, alibi_slopes, bias, mask, block_mask, sinks, lengths, *options, dtype)
    dlse = np.zeros(q.shape[:3], dtype) if dlse is None else dlse.reshape(q.shape[:3])
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (q, k, v))
    of_heads = np.zeros((2, *q.shape[:2]), dtype)  # gradients of slopes and of sinks
    dbias = None if bias is None else np.zeros(bias.shape, dtype)
    for b, h in np.ndindex(*q.shape[:2]):
        given = heads.backward(b, h, dout[b, h], dlse[b, h])
        dq[b, h], dk_part, dv_part, dz, of_heads[:, b, h] = given
        dk[b, heads.kv_head(h)] += dk_part
        dv[b, heads.kv_head(h)] += dv_part
        if dbias is not None:
            add_pairs(dbias, b, h, dz)
    grads = [from_heads_first(x, layout) for x in (dq, dk, dv)]
    if alibi_slopes is not None:
        grads.append(of_heads[0].sum(axis=0) if alibi_slopes.ndim == 1 else of_heads[0])
    if dbias is not None:
        grads.append(dbias)
    if sinks is not None:
        grads.append(of_heads[1].sum(axis=0))
    return tuple(grads)
