"""Attention inside JAX: under ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

``import cuflash.jax`` needs JAX; ``import cuflash`` does not import it.
"""

from __future__ import annotations

from typing import Any

from ..errors import JaxUnavailableError

try:
    import jax
    import jax.numpy as jnp
    from jax.custom_derivatives import SymbolicZero  # noqa: F401
    from jax.experimental import buffer_callback as _buffer_callback  # noqa: F401
except ImportError as error:
    raise JaxUnavailableError(
        f"cuflash.jax needs JAX with jax.experimental.buffer_callback ({error}): "
        "pip install 'cuflash[jax]'"
    ) from error

from ..options import AlgorithmChoice
from ..score_mod import ScoreMod
from .arguments import arrays_of, seed_of, with_all_axes
from .axes import broadcasts, has_batch, may_share_batch
from .cache import attention_with_kvcache
from .call import Call, call_of, check_arrays
from .derivative import differentiable
from .functions import with_function
from .keywords import check_cast, check_returns, checked
from .lengths import lengths_of, offsets_of
from .types import joined, repeated

__all__ = ["attention", "attention_with_kvcache"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    q_offset: int | None = 0,
    return_lse: bool = False,
    block_mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    algorithm: AlgorithmChoice = "auto",
    deterministic_gradients: bool = False,
    residual_dtype: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
) -> Any:
    """Exact attention as :func:`jax.nn.dot_product_attention` computes it, in linear memory.

    ``softmax(scale * query key^T + mask) value`` of every head, without the
    square of the sequence length, forward or backward. Works under
    :func:`jax.jit`, :func:`jax.grad`, :func:`jax.vmap` and what is made of
    them, and as ``attention_fn`` of Flax's modules.

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
    bias : array, (batch, heads_q, seqlen_q, seqlen_kv), optional
        A number of every pair, added to its score after the softcap; minus
        infinity hides the pair. Any axis may be 1, and the first ones may be
        left out: nothing is repeated in memory. Where query has no batch axis,
        its batch is 1. Of query's dtype, and then cast with it, or float32. It
        can be differentiated: the gradient has its shape and dtype, and is the
        sum over what it is broadcast over.
    mask : array of bool, (batch, heads_q, seqlen_q, seqlen_kv), optional
        Which pairs take part, beside ``is_causal`` and a window: True does, False
        is hidden. Its axes are as those of ``bias``, and ``dtype`` does not cast it.
        It has no gradient.
    block_mask : cuflash.BlockMask, optional
        The same of blocks of queries and keys: a pytree whose leaf is ``blocks``,
        which broadcasts as ``mask`` does. The size of a block is compiled in.
    scale : float, optional
        Factor of the scores, a finite and positive number or an array without
        axes that holds one, compiled in; by default ``1 / sqrt(head_dim)``.
        Multiply ``query`` by a traced factor, and give ``scale=1``.
    is_causal : bool
        Query i sees key j iff ``j <= i + q_offset``.
    query_seq_lengths : array of integers, (batch,), optional
        How many queries of each entry take part, clamped to those there are:
        the rows of the others are 0, minus infinity in ``lse``, and neither
        give nor get a gradient, whatever they hold.
    key_value_seq_lengths : array of integers, (batch,), optional
        How many keys of each entry take part, likewise. With a q_offset of
        None the last of them is seen by the last query that takes part.
    local_window_size : int or (int, int), optional
        ``(left, right)``, or one number for both, compiled in: query i sees
        key j iff ``i + q_offset - left <= j <= i + q_offset + right``. Both
        ends are included, and a negative side is a bound like any other. With
        ``is_causal`` both masks apply.
    implementation : {None, "cuflash"}
        Both are this one. JAX's own, "xla" and "cudnn", are refused.
    return_residual : bool
        Also return the log-sum-exp as JAX does, a constant of :func:`jax.grad`;
        refused beside ``return_lse``.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` before the masks,
        compiled in. None and 0: no cap.
    score_mod : cuflash.ScoreMod, optional
        A function that scores go through before slopes, bias and masks; its
        arrays have no gradient. Not with ``softcap``. It is a pytree whose
        leaves are its arrays.
    q_offset : int or None
        Position of query 0 among the keys, compiled in. 0, the default, is
        the alignment of JAX: the first query sees the first key. None is
        ``seqlen_kv - seqlen_q``, the default of :func:`cuflash.attention`:
        the last query sees the last key. Without a mask, a window or ALiBi
        it changes nothing.
    return_lse : bool
        Also return the log-sum-exp of the scores, which can be differentiated.
    alibi_slopes : array, (heads_q,) or (batch, heads_q), optional
        ALiBi: a score loses ``alibi_slopes[h] * abs(i + q_offset - j)``, after
        the softcap and before the masks. With the default q_offset of 0 query
        i stands at key i. float32 (float64 for float64, and cast where ``dtype``
        casts query from one to the other), finite, of either sign; (heads_q,)
        where query has no batch axis. It can be differentiated.
    sinks : array, (heads_q,), optional
        One more score of every row of a head, not scaled, whose value is 0: it
        takes part in the softmax and in lse. Of query's dtype, and then cast
        with it, or float32 (float64 for float64). It can be differentiated;
        minus infinity is no sink.
    cu_seqlens_q, cu_seqlens_kv : array of int32, (sequences + 1,), optional
        Packed sequences, of arrays without a batch axis, as for
        :func:`cuflash.attention`, which see no keys of one another. The first
        query of each stands at its first key unless ``q_offset`` is None.
        :func:`cuflash.cu_seqlens_of` makes them from segment ids. Not with
        ``bias``, ``mask``, ``block_mask`` or lengths. Mapped by vmap, each
        entry takes a pass of its own.
    algorithm : {"auto", "fa1", "fa2", "fa3"}
        As for :func:`cuflash.attention`.
    deterministic_gradients : bool
        Gradients with the same bits from run to run, as ``deterministic`` of
        :func:`cuflash.attention_backward`.
    residual_dtype : dtype, optional
        Of the output that is kept for the backward pass, "float32" or query's
        dtype, which is the default. Of 16-bit arrays the gradients of query
        and key are then made from the output before it is rounded: more exact
        where keys have a large part in common, for 2 bytes more an element.
        What is returned has query's dtype all the same.
    dropout_rate : float
        The part of the weights that is left out, 0 to below 1, compiled in, as
        ``dropout_p`` of :func:`cuflash.attention`.
    dropout_rng : key, optional
        Of :mod:`jax.random`, typed or as 2 or 4 words of uint32; one is needed
        where weights are dropped. The same key drops the same weights.
    broadcast_dropout : bool
        Whether all entries of the batch and all heads drop the same weights,
        which is the default here as in Flax.
    deterministic : bool
        True: there is no dropout, whatever the rate.
    dtype : dtype, optional
        What query, key and value are cast to first, and the dtype of ``out``.
    precision, force_fp32_for_softmax
        Every setting of :class:`jax.lax.Precision` is taken: all are met.
        Products are summed, and weights formed, in float32 or float64.
    module, qk_attn_weights_einsum, attn_weights_value_einsum : None
        Anything else is refused: no weights are there to be sown, and the
        products cannot be replaced.

    Returns
    -------
    out : array, (batch, seqlen_q, heads_q, head_dim_v)
        Of query's dtype. A row that sees no key is 0 (JAX gives it the mean of
        all values).
    lse : array, (batch, heads_q, seqlen_q)
        Only with ``return_lse``: natural log of the sum of exp of the scaled,
        masked scores, and of the sink; float32, or float64 for float64; minus
        infinity, or the sink, for a row that sees no key.
    residual : array, (batch, seqlen_q, heads_q)
        Only with ``return_residual``: the same, rounded to the dtype of key.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, when the call is traced.
    UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
        As for :func:`cuflash.attention`, when JAX lowers the computation.
        UnsupportedError also for a TPU or ROCm, and under :mod:`jax.export`
        and when a compiled computation is serialised: its kernels are in this
        process.

    Notes
    -----
    A computation for CUDA runs the kernels of :func:`cuflash.prepare` on XLA's
    stream and buffers, and with Numba installed no Python is called between
    them; one for the CPU runs the tiled NumPy code. There are first derivatives
    of the reverse mode alone: the forward mode and second derivatives are
    refused. What :func:`jax.vmap` does not map is repeated for each mapped
    entry, but for ``sinks``, ``bias`` and both masks. Of several mapped axes,
    the last two are repeated along one that they lack between two that they
    have, the batch being the last. If ``sinks`` are mapped, or their gradient
    is, each mapped entry becomes heads of its own, for which arrays are copied.
    Under :func:`jax.vmap` the gradient of ``bias`` has an entry for each
    mapped entry, which JAX adds up if ``bias`` is not mapped.

    Arrays divided over several devices by batch, by heads or by both are
    computed where they are, forward and backward. Heads can be divided into as
    many parts as divide heads_kv. What is divided otherwise (by sequence, by
    width, into more parts than there are key heads) is gathered first; on a
    mesh of explicit axes it is refused. Axes of 1 of ``bias`` and ``mask`` are
    not divided, and the gradient of ``bias`` is summed over the devices that
    share it. :func:`jax.shard_map` works with and without ``check_vma``.

    The arrays of a ``score_mod`` are gathered where they are divided, and a
    mapped one takes a pass for each entry. What the text is given as ``batch``
    and ``head`` are those of the whole arrays, and of one mapped entry.

    Dropout draws for a pair of a query and a key by the entry, the head, the
    positions and the key's words, as :func:`cuflash.attention` does with those
    words as ``dropout_seed``. Mapped entries draw alike; where the keys are
    mapped, each entry takes a pass of its own. Divided arrays draw as whole
    ones. Inside :func:`jax.shard_map` each device draws as in a call of its own.

    Ctrl-C inside a computation on the CPU interrupts the callback, and JAX
    reports a ``RuntimeError`` that begins with INTERNAL and holds the traceback
    of KeyboardInterrupt, which an ``except KeyboardInterrupt`` does not catch.

    Examples
    --------
    >>> import jax, cuflash.jax
    >>> x = jax.numpy.ones((2, 128, 4, 64), "bfloat16")
    >>> cuflash.jax.attention(x, x, x, is_causal=True).shape
    (2, 128, 4, 64)
    """
    given = dict(locals())  # every argument by name
    call = call_of(**checked(given))
    with_lse, with_residual = check_returns(return_lse, return_residual)
    out, lse = _compute(given, call, check_cast(dtype))
    if with_residual:
        return out, _residual(lse, out.dtype)
    return (out, lse) if with_lse else out


def _residual(lse: Any, dtype: Any) -> Any:
    """The log-sum-exp as JAX returns it: heads last, rounded, and constant."""
    return jnp.swapaxes(jax.lax.stop_gradient(lse), -1, -2).astype(dtype)


def _compute(given: dict[str, Any], call: Call, dtype: str | None) -> tuple[Any, Any]:
    arrays = arrays_of(given, dtype)
    q = arrays["q"]
    if call.options.keyword("dropout_p"):
        arrays["dropout_seed"] = seed_of(given["dropout_rng"])
        call = call.drawing(*q.shape[-2:-1], alike=given["broadcast_dropout"])
    arrays, call = with_function(arrays, call, given["score_mod"])
    arrays |= offsets_of(given)
    check_arrays(arrays, call)
    one = q.ndim == 3
    lengths = lengths_of(given, 1 if one else q.shape[0])
    whole = {name: with_all_axes(name, a) for name, a in arrays.items() if broadcasts(name)}
    arrays |= whole
    if one:
        without = [name for name in arrays if has_batch(name) and name not in whole]
        arrays |= {name: arrays[name][None] for name in without}
    else:  # before the primitive, so that JAX sums what is shared over the batch
        shared = {name: a for name, a in arrays.items() if may_share_batch(name) and a.ndim == 1}
        arrays |= {name: repeated(a, q.shape[0], q) for name, a in shared.items()}
    arrays |= lengths
    joint = dict(zip(arrays, joined(list(arrays.values())), strict=True))
    out, lse = differentiable(joint, call)
    return (out[0], lse[0]) if one else (out, lse)
