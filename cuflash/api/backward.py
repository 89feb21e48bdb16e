"""The gradients of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.spec import LayoutName
from ..block_mask import BlockMask
from ..dispatch import call
from ..errors import ArgumentTypeError, ArgumentValueError
from ..given import add_given, add_some, split_given
from ..options import (
    AUTO,
    AlgorithmChoice,
    BackendChoice,
    Differentiable,
    WindowSize,
    check_wrt,
)
from ..score_mod import ScoreMod
from ..tensors import QKV

__all__ = ["attention_backward"]


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    wrt: Sequence[Differentiable] = QKV,
    grads: Sequence[Any] | None = None,
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
    deterministic: bool = False,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    workspace: Any = None,
) -> tuple[Any, ...]:
    """Return the gradients of :func:`attention` with respect to its arrays.

    Parameters
    ----------
    dout : array, like out
        Gradient of the output; of q's dtype or of out's. On CUDA a float32
        ``dout`` of 16-bit inputs is rounded to q's dtype before the products;
        the tiled NumPy code does not round it.
    q, k, v : array
        As given to :func:`attention`, with the same keywords.
    out, lse : array
        What :func:`attention` returned, of any algorithm or backend.
    dlse : array, like lse, optional
        Gradient of the log-sum-exp.
    wrt : sequence of {"q", "k", "v", "alibi_slopes", "bias", "sinks"}
        Names of the arrays to differentiate, each once; arrays of features only
        where they are given. Other gradients are not returned. The NumPy backend
        does not compute them either; on CUDA the kernels compute the gradients of
        q, k and v in any case, and write those that are not named to the workspace.
    grads : sequence of arrays, optional
        Destinations, one for each name of ``wrt`` in its order; they must not
        overlap anything.
    deterministic : bool
        Return the same bits from run to run, with up to O(seqlen) more memory.
        Otherwise FlashAttention-2 and 3 may add the terms of dq in any order on CUDA.
    causal, window_size, softcap, score_mod, alibi_slopes, bias, mask, block_mask, sinks,
    seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv, scale, q_offset, layout
        As for :func:`attention`.
    dropout_p, dropout_seed
        As for :func:`attention`; the same values drop the same weights.
    backend, algorithm, blocks, workspace
        As for :func:`attention`; ``blocks`` is the tile of this pass.

    Returns
    -------
    gradients : tuple of arrays
        In the order of ``wrt``, each shaped and typed like the array it is
        the gradient of, C-contiguous. Grouped heads are summed into their kv
        head. Rows that see no key have gradient 0. The gradients of
        ``alibi_slopes``, ``bias`` and ``sinks`` are summed in one fixed order, so
        they have the same bits from run to run. They are summed in float32 (float64
        for float64). On CUDA ``dsinks`` is summed in float64, and ``dalibi_slopes``
        in float32 within a thread and in float64 over threads. ``dbias`` is summed
        over the axes that ``bias`` broadcasts, and rounded once.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`.

    Notes
    -----
    With ``P = exp(scale q k^T - lse)`` and ``delta = rowsum(dout * out) - dlse``:
    ``dv = P^T dout``, ``dS = P * (dout v^T - delta)``, ``dq = scale dS k``,
    ``dk = scale dS^T q`` (Dao et al. 2022, Algorithm 4). With a softcap ``S`` is
    the capped score, and dS is multiplied by ``1 - (S / softcap)^2``; with a
    ``score_mod`` dS is multiplied by its derivative. With ALiBi
    ``dalibi_slopes = -sum(dS * abs(i + q_offset - j))`` over all visible pairs of
    a head, with dS before this multiplication; for slopes of shape (heads_q,) the
    sum is over the batch too. ``dbias`` is dS before this multiplication. With sinks,
    ``lse`` includes them, and ``dsinks = -rowsum(exp(sinks - lse) * delta)`` over all
    rows of a head. With dropout ``M`` is 1 / (1 - dropout_p) where a weight is kept, else 0,
    with the rounded dropout_p:
    ``dv = (P * M)^T dout`` and ``dS = P * (M * (dout v^T) - delta)``.
    """
    # What is left out has its default. Calls that give few arguments take less time.
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    keywords: dict[str, Any] = {}
    if causal is not False:
        keywords["causal"] = causal
    numbers = window_size is None and softcap is None and dropout_p is None and scale is None
    if not (numbers and q_offset is None and layout is None and blocks is None):
        add_some(keywords, window_size=window_size, softcap=softcap, dropout_p=dropout_p)
        add_some(keywords, scale=scale, q_offset=q_offset, layout=layout, blocks=blocks)
    if not (deterministic is False and backend is AUTO and algorithm is AUTO):
        keywords |= {"deterministic": deterministic, "backend": backend, "algorithm": algorithm}
    if wrt is not QKV:
        keywords["wrt"] = wrt
    if dlse is not None:
        arrays["dlse"] = dlse
    whole = seqused_q is seqused_kv is cu_seqlens_q is cu_seqlens_kv is None
    plain = alibi_slopes is bias is mask is sinks is dropout_seed is None and score_mod is None
    if not (plain and whole and block_mask is None):
        shown, seeds, of_score = split_given(keywords, score_mod, block_mask, dropout_seed)
        lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
        add_given(arrays, (alibi_slopes, bias, mask, shown, sinks, seeds, *lengths), of_score)
    if grads is not None:
        arrays |= _destinations(grads, wrt)
    if workspace is not None:
        arrays["workspace"] = workspace
    return tuple(call("backward", arrays, keywords).values())


def _destinations(grads: Any, wrt: Any) -> dict[str, Any]:
    """Return the destinations by the names of the gradients."""
    names = check_wrt("wrt", wrt)
    count = {1: "one array", 2: "two arrays", 3: "three arrays"}.get(len(names), "arrays")
    expected = f"{count}: {', '.join(f'd{name}' for name in names)}"
    if not isinstance(grads, (tuple, list)):
        raise ArgumentTypeError("grads", repr(type(grads)), expected)
    if len(grads) != len(names):
        raise ArgumentTypeError("grads", f"{len(grads)} arrays", expected)
    if any(g is None for g in grads):
        raise ArgumentValueError("grads", "None in place of an array", expected)
    return dict(zip((f"d{name}" for name in names), grads, strict=True))
