"""The public functions. What their docstrings say is the contract."""

from __future__ import annotations

from typing import Any

from .cuda.available import is_usable
from .dispatch import call
from .errors import ArgumentTypeError, ArgumentValueError
from .options import AlgorithmChoice, BackendChoice, check_flag
from .pullback import Pullback

__all__ = ["attention", "attention_backward", "attention_vjp", "is_available"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    out_dtype: Any = None,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    workspace: Any = None,
) -> Any:
    """Exact attention: ``softmax(scale * q k^T + mask) v``, without the square in memory.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries. NumPy, CuPy, or anything with DLPack or
        ``__cuda_array_interface__``; float16, bfloat16 (the interface cannot
        say it), float32 or float64; head_dim 1 to 256. A subclass is computed
        as a plain array; masked arrays, matrices and quantities with a unit
        are refused.
    k : array, (batch, seqlen_kv, heads_kv, head_dim)
        Keys. heads_kv divides heads_q; query head h reads kv head
        ``h // (heads_q // heads_kv)``.
    v : array, (batch, seqlen_kv, heads_kv, head_dim_v)
        Values.
    causal : bool
        Query i sees key j iff ``j <= i + q_offset``.
    scale : float, optional
        Factor of the scores, finite and positive; by default
        ``1 / sqrt(head_dim)``.
    q_offset : int, optional
        Position of query 0 among the keys; by default ``seqlen_kv - seqlen_q``
        (the last query sees the last key). 0 is the alignment of JAX and
        PyTorch. Without a mask it changes nothing.
    layout : {"bshd", "bhsd", "shd", "hsd", "sd"}, optional
        Order of the axes batch, sequence, head, dimension. By default "bshd"
        for 4 axes and "sd" for 2; 3 axes must be named.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out, lse_out : array, optional
        Destinations, returned as given; they must not overlap an input, each
        other or themselves. Two mappings of one file overlap where they show
        the same bytes of it.
    out_dtype : dtype, optional
        float32 for the output of 16-bit inputs; else the dtype of q. Of NumPy
        or of another library (``torch.float32``). By default that of ``out``,
        if given.
    backend : {"auto", "cuda", "numpy"}
        Arrays in CUDA memory are computed there. With "auto" NumPy arrays go
        to the GPU and back where one can be used, else to the tiled NumPy
        code; "numpy" keeps them on the host.
    algorithm : {"auto", "fa1", "fa2", "fa3"}
        "auto" takes the best generation that can do the problem; a named one
        never falls back. :func:`explain` says which and why.
    blocks : (int, int), optional
        ``(block_q, block_kv)`` instead of the planned tile.
    workspace : CuPy uint8 array, optional
        At least ``prepare(...).workspace_bytes`` bytes, 256-byte aligned, not
        used by anything else until the call has run. By default it is
        allocated; while a CUDA graph is captured it is then kept for the life
        of the process, since the graph goes on using it, and so is what the
        call copies. Arrays in host memory are refused in a capture.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        Of q's layout, C-contiguous, and of q's kind: made by the ``from_dlpack``
        of its library, so of a subclass it is the plain array
        (``numpy.ndarray``, ``torch.Tensor``), and of a library without one a
        NumPy or CuPy array. A row that sees no key is 0.
    lse : array, (batch, heads_q, seqlen_q)
        Only with ``return_lse``: natural log of the sum of exp of the scaled,
        masked scores; float32, or float64 for float64; minus infinity for a
        row that sees no key. Axes that the layout lacks are left out.

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
    Dao, Fu, Ermon, Rudra, Re, "FlashAttention: Fast and Memory-Efficient Exact
    Attention with IO-Awareness", 2022; Dao, "FlashAttention-2", 2023. CUDA
    work is queued on CuPy's current stream of the arrays' device; nothing
    waits for it unless the result is a NumPy array.
    """
    keywords = {
        "causal": causal,
        "scale": scale,
        "q_offset": q_offset,
        "layout": layout,
        "out_dtype": out_dtype,
        "backend": backend,
        "algorithm": algorithm,
        "blocks": blocks,
        "return_lse": return_lse,
    }
    arrays = {"q": q, "k": k, "v": v}
    if out is not None:
        arrays["out"] = out
    if lse_out is not None:
        arrays["lse_out"] = lse_out
    if workspace is not None:
        arrays["workspace"] = workspace
    results = call("forward", arrays, keywords)
    return (results["out"], results["lse"]) if return_lse else results["out"]


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


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: str | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    deterministic: bool = False,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
) -> tuple[Any, Pullback]:
    """The output of :func:`attention` and the function that pulls gradients back through it.

    Parameters
    ----------
    q, k, v, causal, scale, q_offset, layout, return_lse, out_dtype, backend, algorithm
        As for :func:`attention`.
    deterministic : bool
        As for :func:`attention_backward`.

    Returns
    -------
    out : array, or (out, lse) with ``return_lse``
        As of :func:`attention`.
    pullback : callable, which pickles if the arrays do
        ``pullback(dout, dlse=None) -> (dq, dk, dv)``, any number of times:
        dout (batch, seqlen_q, heads_q, head_dim_v) like out, dlse (batch,
        heads_q, seqlen_q) like lse; dq, dk and dv as of
        :func:`attention_backward`, shaped and typed like q, k and v. It keeps
        q, k, v, out and lse; do not overwrite them before it is called.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`; of ``dout`` and ``dlse`` when ``pullback``
        is called.

    Notes
    -----
    The pullback computes the vector-Jacobian product of
    :func:`attention_backward`: with ``L = sum(out * dout) + sum(lse * dlse)``
    it gives ``dL/dq``, ``dL/dk`` and ``dL/dv``. There is no ``blocks``: a tile
    is of one pass, and the two passes want different ones.
    """
    shared: dict[str, Any] = {
        "causal": causal,
        "scale": scale,
        "q_offset": q_offset,
        "layout": layout,
        "backend": backend,
        "algorithm": algorithm,
    }
    check_flag("deterministic", deterministic)
    with_lse = check_flag("return_lse", return_lse)
    out, lse = attention(q, k, v, return_lse=True, out_dtype=out_dtype, **shared)
    saved = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    pullback = Pullback(saved, {**shared, "deterministic": deterministic})
    return ((out, lse) if with_lse else out), pullback


def is_available() -> bool:
    """Whether CUDA can be used: CuPy, not a ROCm build, with a driver and a device."""
    return is_usable()


def _destinations(grads: Any) -> dict[str, Any]:
    if not isinstance(grads, (tuple, list)) or len(grads) != 3:
        raise ArgumentTypeError("grads", repr(type(grads)), "(dq, dk, dv), three arrays")
    if any(g is None for g in grads):
        raise ArgumentValueError("grads", "None in place of an array", "three arrays")
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))
