"""Attention inside JAX: under ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

``import cuflash.jax`` needs JAX; ``import cuflash`` does not import it.
"""

from __future__ import annotations

from typing import Any

from ..errors import JaxUnavailableError

try:
    import jax
    import jax.numpy as jnp
    from jax.custom_derivatives import SymbolicZero
    from jax.experimental import buffer_callback as _buffer_callback  # noqa: F401
except ImportError as error:
    raise JaxUnavailableError(
        f"cuflash.jax needs JAX with jax.experimental.buffer_callback ({error}): "
        "pip install 'cuflash[jax]'"
    ) from error

from ..errors import ArgumentTypeError
from ..options import AlgorithmChoice, check_flag
from .call import Call, call_of, check_arrays
from .primitive import run
from .types import joined

__all__ = ["attention"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int | None = 0,
    return_lse: bool = False,
    algorithm: AlgorithmChoice = "auto",
    deterministic: bool = False,
) -> Any:
    """Exact attention as :func:`jax.nn.dot_product_attention` computes it, in linear memory.

    ``softmax(scale * query key^T + mask) value`` of every head, without the
    square of the sequence length, forward or backward. Works under
    :func:`jax.jit`, :func:`jax.grad`, :func:`jax.vmap` and what is made of them.

    Parameters
    ----------
    query : array, (batch, seqlen_q, heads_q, head_dim)
        Queries, of JAX or what :func:`jax.numpy.asarray` takes; without the
        batch axis if the others are without it. float16, bfloat16, float32,
        or float64 where ``jax_enable_x64`` is set; head_dim 1 to 256.
    key : array, (batch, seqlen_kv, heads_kv, head_dim)
        Keys, of query's dtype. heads_kv divides heads_q; query head h reads
        head ``h // (heads_q // heads_kv)``.
    value : array, (batch, seqlen_kv, heads_kv, head_dim_v)
        Values, of query's dtype. head_dim_v may differ from head_dim.
    scale : float, optional
        Factor of the scores, a finite and positive Python number, compiled
        in; by default ``1 / sqrt(head_dim)``.
    is_causal : bool
        Query i sees key j iff ``j <= i + q_offset``.
    q_offset : int or None
        Position of query 0 among the keys, compiled in. 0, the default, is
        the alignment of JAX: the first query sees the first key. None is
        ``seqlen_kv - seqlen_q``, the default of :func:`cuflash.attention`:
        the last query sees the last key. Without a mask it changes nothing.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    algorithm : {"auto", "fa1", "fa2", "fa3"}
        As for :func:`cuflash.attention`.
    deterministic : bool
        Gradients with the same bits from run to run, as for
        :func:`cuflash.attention_backward`.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        Of query's dtype. A row that sees no key is 0 (JAX gives it the mean of
        all values).
    lse : array, (batch, heads_q, seqlen_q)
        Only with ``return_lse``: natural log of the sum of exp of the scaled,
        masked scores; float32, or float64 for float64; minus infinity for a
        row that sees no key. It can be differentiated. JAX's
        ``return_residual`` is another thing: (batch, seqlen_q, heads_q),
        rounded to the dtype of key, and constant for :func:`jax.grad`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, when the call is traced.
    UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
        As for :func:`cuflash.attention`, when JAX lowers the computation.

    Notes
    -----
    ``bias``, ``mask``, ``query_seq_lengths``, ``key_value_seq_lengths``,
    ``local_window_size`` and ``implementation`` of JAX's function are not
    taken. A computation for CUDA runs the kernels of :func:`cuflash.prepare`
    on XLA's stream and buffers; one for the CPU runs the tiled NumPy code.
    There are no second derivatives and no forward mode: JAX says so. What
    :func:`jax.vmap` does not map is repeated for each mapped entry. Over
    several devices, divide batch or heads with :func:`jax.shard_map`, given
    ``check_vma=False``; without it XLA gathers the arrays on every device.
    """
    call = call_of(
        is_causal=is_causal,
        scale=scale,
        q_offset=q_offset,
        algorithm=algorithm,
        deterministic_gradients=deterministic,
        residual_dtype=None,
    )
    with_lse = check_flag("return_lse", return_lse)
    given = {"query": query, "key": key, "value": value}
    arrays = [_as_array(name, array) for name, array in given.items()]
    check_arrays(arrays, call)
    one = arrays[0].ndim == 3
    if one:
        arrays = [array[None] for array in arrays]
    q, k, v = arrays
    out, lse = (result[0] if one else result for result in _compiled(*joined((q, k, v)), call))
    return (out, lse) if with_lse else out


def _as_array(name: str, value: Any) -> Any:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ArgumentTypeError(name, kind, "an array") from error


def _forward(query: Any, key: Any, value: Any, call: Call) -> tuple[Any, Any]:
    out, lse = run(call, query, key, value)
    return out, lse


def _save(query: Any, key: Any, value: Any, call: Call) -> tuple[Any, Any]:
    """The forward pass, and what the backward pass needs of it."""
    q, k, v = query.value, key.value, value.value
    out, lse = _forward(q, k, v, call)
    return (out, lse), (q, k, v, out, lse)


def _pull_back(call: Call, saved: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """Gradients of q, k and v. An lse that nothing was made of has none, and costs nothing."""
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    given = () if isinstance(dlse, SymbolicZero) else (dlse,)
    return tuple(run(call.backward, dout, *saved, *given))


_attention = jax.custom_vjp(_forward, nondiff_argnums=(3,))
_attention.defvjp(_save, _pull_back, symbolic_zeros=True)
# Called as it is, jax.shard_map without jax.jit refuses it for its symbolic zeros.
_compiled = jax.jit(_attention, static_argnums=3, inline=True)
