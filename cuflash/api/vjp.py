"""Attention together with the function that pulls gradients back through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from ..arrays.adopt import adopt
from ..arrays.cast import cast
from ..arrays.spec import LayoutName
from ..block_mask import BlockMask
from ..errors import ArgumentTypeError, ArgumentValueError
from ..features.refused import check_refused, gradients_of
from ..features.table import FEATURES
from ..given import add_given
from ..options import (
    AlgorithmChoice,
    BackendChoice,
    Differentiable,
    WindowSize,
    check_blocks,
    check_dtype,
    check_flag,
    check_wrt,
    seed_of,
)
from ..planning.problem import DTYPES
from ..score_mod import ScoreMod
from ..tensors import QKV
from .forward import attention
from .pullback import Pullback

__all__ = ["attention_vjp"]


@overload
def attention_vjp(
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
    return_lse: Literal[True],
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    wrt: Sequence[Differentiable] = ...,
    deterministic: bool = ...,
    backend: BackendChoice = ...,
    algorithm: AlgorithmChoice = ...,
    blocks: tuple[int, int] | None = ...,
    backward_blocks: tuple[int, int] | None = ...,
    kv_chunk: int | None = ...,
) -> tuple[tuple[Any, Any], Pullback]: ...


@overload
def attention_vjp(
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
    return_lse: bool = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    wrt: Sequence[Differentiable] = ...,
    deterministic: bool = ...,
    backend: BackendChoice = ...,
    algorithm: AlgorithmChoice = ...,
    blocks: tuple[int, int] | None = ...,
    backward_blocks: tuple[int, int] | None = ...,
    kv_chunk: int | None = ...,
) -> tuple[Any, Pullback]: ...


def attention_vjp(
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
    return_lse: bool = False,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    wrt: Sequence[Differentiable] = QKV,
    deterministic: bool = False,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    backward_blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
) -> tuple[Any, Pullback]:
    """Return the output of :func:`attention` and a function that pulls gradients back through it.

    Parameters
    ----------
    q, k, v, causal, window_size, softcap, score_mod, alibi_slopes, bias, mask, block_mask,
    sinks, seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv, scale, q_offset, layout
        As for :func:`attention`.
    dropout_p, dropout_seed
        As for :func:`attention`. The pullback drops the same weights; an array
        of seeds must not change before it is called.
    return_lse, out_dtype
        As for :func:`attention`.
    backend, algorithm
        As for :func:`attention`.
    residual_dtype : dtype, optional
        Dtype of the output that the pullback keeps; by default that of ``out``.
        "float32" keeps the output of 16-bit inputs before it is rounded: delta
        = rowsum(dout * out) is then as accurate as float32, which matters
        where the keys have a large component in common. It takes 4 bytes for
        each element besides the 2 of ``out``, and rounds ``out`` in a separate pass.
    wrt, deterministic
        As for :func:`attention_backward`.
    blocks, backward_blocks : (int, int), optional
        ``(block_q, block_kv)`` of the forward and of the backward pass,
        instead of the planned tiles.
    kv_chunk : int, optional
        As for :func:`attention`, of the forward pass.

    Returns
    -------
    out : array, or (out, lse) with ``return_lse``
        As for :func:`attention`.
    pullback : Pullback
        ``pullback(dout, dlse=None)`` gives the gradients of ``wrt`` in its
        order, any number of times. It keeps the arrays that it was given, out
        and lse; do not overwrite them before it is called. It pickles if the
        arrays do.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`. ``pullback`` checks ``dout`` and ``dlse`` when
        it is called.

    Notes
    -----
    The pullback computes the vector-Jacobian product of
    :func:`attention_backward`: with ``L = sum(out * dout) + sum(lse * dlse)``
    it returns ``dL/dq`` and the like for every name of ``wrt``.
    """
    seed, seeds = seed_of(dropout_seed)
    shared: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "score_mod": score_mod,
        "dropout_p": dropout_p,
        "scale": scale,
        "q_offset": q_offset,
        "layout": layout,
        "backend": backend,
        "algorithm": algorithm,
        **({"dropout_seed": seed} if seeds is None else {}),
    }
    arrays = {"q": q, "k": k, "v": v}
    lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
    given = alibi_slopes, bias, mask, block_mask, sinks, seeds, *lengths
    add_given(arrays, given, {})
    named = _check_wrt(wrt, arrays)
    check_flag("deterministic", deterministic)
    with_lse = check_flag("return_lse", return_lse)
    check_blocks("backward_blocks", backward_blocks)
    of_forward = {"blocks": blocks, "kv_chunk": kv_chunk}
    out, kept, lse = _forward(arrays, out_dtype, residual_dtype, {**shared, **of_forward})
    own = {"wrt": named, "deterministic": deterministic, "blocks": backward_blocks}
    pullback = Pullback({**arrays, "out": kept, "lse": lse}, {**shared, **own})
    return ((out, lse) if with_lse else out), pullback


def _check_wrt(wrt: Any, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the checked names of ``wrt``; the call must have been given each of these arrays."""
    named = check_wrt("wrt", wrt)
    for name in named:
        if name not in arrays:
            raise ArgumentValueError("wrt", f"{name!r} and no {name}", f"{name} as an argument")
    present = [one.name for one in FEATURES.values() if set(one.arrays) & set(arrays)]
    check_refused((*present, *gradients_of(named)))
    return named


def _forward(
    arrays: Mapping[str, Any], out_dtype: Any, residual_dtype: Any, keywords: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Return the output for the caller, the output for the pullback, and the log-sum-exp."""
    written = _residual_dtype(residual_dtype, out_dtype)
    if residual_dtype is None:
        out, lse = attention(**arrays, return_lse=True, out_dtype=out_dtype, **keywords)
        return out, out, lse
    storage = adopt("q", arrays["q"]).spec.dtype
    wanted = check_dtype("out_dtype", out_dtype) or storage
    if wanted not in (storage, written):
        raise ArgumentTypeError("out_dtype", f"{wanted} for {storage} inputs", f"{storage}")
    try:
        kept, lse = attention(**arrays, return_lse=True, out_dtype=written, **keywords)
    except ArgumentTypeError as error:
        if error.argument != "out_dtype":
            raise
        raise ArgumentTypeError("residual_dtype", error.got, error.expected) from error
    return cast("out", kept, wanted), kept, lse


def _residual_dtype(residual_dtype: Any, out_dtype: Any) -> Any:
    """Return the dtype that the forward pass writes; ``out`` is rounded from it if it differs.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If one is no dtype, or the residual's is narrower than ``out_dtype``.
    """
    kept, out = check_dtype("residual_dtype", residual_dtype), check_dtype("out_dtype", out_dtype)
    if kept is None:
        return out_dtype
    if out is not None and DTYPES[kept].itemsize < DTYPES[out].itemsize:
        raise ArgumentValueError("residual_dtype", f"{kept} beside out_dtype {out}", f"{out}")
    return kept
