"""The gradients of attention."""

from __future__ import annotations

from typing import Any

from ..dispatch import call
from ..errors import ArgumentTypeError, ArgumentValueError
from ..options import AlgorithmChoice, BackendChoice

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
    grads: tuple[Any, Any, Any] | None = None,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: str | None = None,
    deterministic: bool = False,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    workspace: Any = None,
) -> tuple[Any, Any, Any]:
    """Gradients of :func:`attention` with respect to q, k and v.

    Parameters
    ----------
    dout : array, like out
        Gradient of the output; of q's dtype or of out's. On CUDA a float32
        ``dout`` of 16-bit inputs is rounded to q's dtype before the products;
        the tiled NumPy code takes it as it is.
    q, k, v : array
        As given to :func:`attention`, with the same keywords.
    out, lse : array
        What :func:`attention` returned, of any algorithm or backend.
    dlse : array, like lse, optional
        Gradient of the log-sum-exp.
    grads : (dq, dk, dv), optional
        Destinations; they must not overlap anything.
    deterministic : bool
        The same bits from run to run, with O(seqlen) more memory. Without it
        FlashAttention-2 and 3 add the parts of dq in any order on CUDA.
    causal, scale, q_offset, layout, backend, algorithm, blocks, workspace
        As for :func:`attention`; ``blocks`` is of this pass.

    Returns
    -------
    dq, dk, dv : array
        Shaped and typed like q, k and v, C-contiguous. Grouped heads are
        summed into their kv head. Rows that see no key have gradient 0.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`.

    Notes
    -----
    With ``P = exp(scale q k^T - lse)`` and ``delta = rowsum(dout * out) - dlse``:
    ``dv = P^T dout``, ``dS = P * (dout v^T - delta)``, ``dq = scale dS k``,
    ``dk = scale dS^T q`` (Dao et al. 2022, Algorithm 4).
    """
    keywords = {
        "causal": causal,
        "scale": scale,
        "q_offset": q_offset,
        "layout": layout,
        "deterministic": deterministic,
        "backend": backend,
        "algorithm": algorithm,
        "blocks": blocks,
    }
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        arrays["dlse"] = dlse
    if grads is not None:
        arrays |= _destinations(grads)
    if workspace is not None:
        arrays["workspace"] = workspace
    results = call("backward", arrays, keywords)
    return results["dq"], results["dk"], results["dv"]


def _destinations(grads: Any) -> dict[str, Any]:
    if not isinstance(grads, (tuple, list)) or len(grads) != 3:
        raise ArgumentTypeError("grads", repr(type(grads)), "(dq, dk, dv), three arrays")
    if any(g is None for g in grads):
        raise ArgumentValueError("grads", "None in place of an array", "three arrays")
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))
