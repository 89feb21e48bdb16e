"""The gradients of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.spec import LayoutName
from ..block_mask import BlockMask, split_block_mask
from ..dispatch import call
from ..errors import ArgumentTypeError, ArgumentValueError
from ..given import add_given
from ..options import (
    AlgorithmChoice,
    BackendChoice,
    Differentiable,
    WindowSize,
    check_wrt,
    seed_of,
)
from ..score_mod import ScoreMod, with_arrays
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
    block, shown = split_block_mask(block_mask)
    seed, seeds = seed_of(dropout_seed)
    score, of_score = with_arrays(score_mod)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    keywords: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "score_mod": score,
        "block_mask": block,
        "dropout_p": dropout_p,
        "dropout_seed": seed,
        "scale": scale,
        "q_offset": q_offset,
        "layout": layout,
        "deterministic": deterministic,
        "backend": backend,
        "algorithm": algorithm,
        "blocks": blocks,
    }
    # The default of wrt is not passed on, which keeps the common call quick.
    lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
    given = alibi_slopes, bias, mask, shown, sinks, seeds, *lengths
    nothing = not of_score and dlse is grads is workspace is None
    if not (wrt is QKV and nothing and all(array is None for array in given)):
        inputs = {} if dlse is None else {"dlse": dlse}
        add_given(inputs, given, of_score)
        _add(arrays, keywords, inputs, wrt, grads, workspace)
    return tuple(call("backward", arrays, keywords).values())


def _add(
    arrays: dict[str, Any],
    keywords: dict[str, Any],
    inputs: dict[str, Any],
    wrt: Any,
    grads: Any,
    workspace: Any,
) -> None:
    """Add the optional arrays and ``wrt``, in the order of a call: inputs come first."""
    if wrt is not QKV:
        keywords["wrt"] = wrt
    targets = {} if grads is None else _destinations(grads, wrt)
    given = {**inputs, **targets, "workspace": workspace}
    arrays |= {name: array for name, array in given.items() if array is not None}


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
