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
    """Return exact attention like :func:`jax.nn.dot_product_attention`, in linear memory.

    ``softmax(scale * query key^T + mask) value`` of every head; memory is linear in
    the sequence length, forward and backward. Works under :func:`jax.jit`,
    :func:`jax.grad`, :func:`jax.vmap` and their combinations, and as
    ``attention_fn`` of Flax's modules.

    Parameters
    ----------
    query : array, (batch, seqlen_q, heads_q, head_dim)
        Queries, of JAX or what :func:`jax.numpy.asarray` takes. The batch axis
        may be absent from all arrays. float16, bfloat16, float32,
        or float64 where ``jax_enable_x64`` is set; head_dim 1 to 256.
    key : array, (batch, seqlen_kv, heads_kv, head_dim)
        Keys, of query's dtype. heads_kv divides heads_q; query head h reads
        head ``h // (heads_q // heads_kv)``.
    value : array, (batch, seqlen_kv, heads_kv, head_dim_v)
        Values, of query's dtype. head_dim_v may differ from head_dim.
    bias : array, (batch, heads_q, seqlen_q, seqlen_kv), optional
        A number for every pair, added to its score after the softcap; minus
        infinity hides the pair. Any axis may be 1, and the first ones may be
        left out: no axis is repeated in memory. If query has no batch axis, the
        batch of ``bias`` is 1. Of float32, or of query's dtype; ``dtype`` then casts
        it too. It can be differentiated: the gradient has its shape and dtype, summed
        over the axes that it is broadcast along.
    mask : array of bool, (batch, heads_q, seqlen_q, seqlen_kv), optional
        False hides a pair, besides ``is_causal`` and a window. Its axes are as
        those of ``bias``, and ``dtype`` does not cast it. It has no gradient.
    block_mask : cuflash.BlockMask, optional
        A mask of blocks of queries and keys: a pytree whose leaf is ``blocks``,
        which broadcasts as ``mask`` does. The size of a block is compiled in.
    scale : float, optional
        Factor of the scores, a finite and positive number or an array without
        axes that holds one, compiled in; by default ``1 / sqrt(head_dim)``.
        Multiply ``query`` by a traced factor, and give ``scale=1``.
    is_causal : bool
        Query i sees key j iff ``j <= i + q_offset``.
    query_seq_lengths : array of integers, (batch,), optional
        Number of queries that each entry uses, clamped to seqlen_q. The other
        rows of ``out`` are 0, of ``lse`` minus infinity, and neither give nor get
        a gradient, whatever these queries hold.
    key_value_seq_lengths : array of integers, (batch,), optional
        Number of keys that each entry uses, likewise. With a q_offset of
        None the last used query sees the last used key.
    local_window_size : int or (int, int), optional
        ``(left, right)``, or one number for both, compiled in: query i sees
        key j iff ``i + q_offset - left <= j <= i + q_offset + right``. Both
        ends are included, and a negative side is a bound like any other. With
        ``is_causal`` both masks apply.
    implementation : {None, "cuflash"}
        Both mean cuflash. JAX's "xla" and "cudnn" are refused.
    return_residual : bool
        Also return the log-sum-exp as JAX does; :func:`jax.grad` treats it as a
        constant. Refused beside ``return_lse``.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` before the masks,
        compiled in. None and 0: no cap.
    score_mod : cuflash.ScoreMod, optional
        A function that is applied to scores before slopes, bias and masks; its
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
        ALiBi: ``alibi_slopes[h] * abs(i + q_offset - j)`` is subtracted from a
        score, after the softcap and before the masks. With the default q_offset
        of 0 query i is at key i. float32, or float64 for float64; if ``dtype``
        casts query from or to float64, it casts the slopes too. Finite, of either
        sign; (heads_q,) if query has no batch axis. It can be differentiated.
    sinks : array, (heads_q,), optional
        One more score for every row of a head, not scaled, whose value is 0: it
        enters the softmax and lse. Of float32 (float64 for float64), or of query's
        dtype; ``dtype`` then casts it too. It can be differentiated; minus
        infinity is no sink.
    cu_seqlens_q, cu_seqlens_kv : array of int32, (sequences + 1,), optional
        Offsets of packed sequences in arrays without a batch axis, as for
        :func:`cuflash.attention`. A sequence sees only its own keys. Its first
        query is at its first key unless ``q_offset`` is None.
        :func:`cuflash.cu_seqlens_of` makes them from segment ids. Not with
        ``bias``, ``mask``, ``block_mask`` or lengths. Under vmap each entry
        takes a separate pass.
    algorithm : {"auto", "fa1", "fa2", "fa3"}
        As for :func:`cuflash.attention`.
    deterministic_gradients : bool
        Gradients have the same bits from run to run, as with ``deterministic`` of
        :func:`cuflash.attention_backward`.
    residual_dtype : dtype, optional
        Dtype of the output that is kept for the backward pass: "float32" or query's
        dtype, the default. With "float32" the gradients of 16-bit query and key are
        computed from the output before it is rounded: they are more exact if keys
        have a large component in common, for 2 more bytes an element. The returned
        output has query's dtype in any case.
    dropout_rate : float
        Fraction of the weights that is dropped, 0 to below 1, compiled in, as
        ``dropout_p`` of :func:`cuflash.attention`.
    dropout_rng : key, optional
        A key of :mod:`jax.random`, typed or as 2 or 4 words of uint32; needed
        if weights are dropped. The same key drops the same weights.
    broadcast_dropout : bool
        Whether all entries of the batch and all heads drop the same weights,
        which is the default here as in Flax.
    deterministic : bool
        True: no dropout, whatever the rate.
    dtype : dtype, optional
        Dtype that query, key and value are cast to first, and the dtype of ``out``.
    precision, force_fp32_for_softmax
        Every setting of :class:`jax.lax.Precision` is accepted and met.
        Products are summed, and weights formed, in float32 or float64.
    module, qk_attn_weights_einsum, attn_weights_value_einsum : None
        Anything else is refused: weights are never formed, so they cannot be sown,
        and the products cannot be replaced.

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
        Only with ``return_residual``: the log-sum-exp, rounded to the dtype of key.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, when the call is traced.
    UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
        As for :func:`cuflash.attention`, when JAX lowers the computation.
        UnsupportedError also for a TPU or ROCm, under :mod:`jax.export`, and
        when a compiled computation is serialised: its kernels are in this
        process.

    Notes
    -----
    A computation for CUDA runs the kernels of :func:`cuflash.prepare` on XLA's
    stream and buffers, and with Numba installed no Python is called between
    them; one for the CPU runs the tiled NumPy code. Only first derivatives in
    reverse mode exist: forward mode and second derivatives are refused. Under
    :func:`jax.vmap` arrays that are not mapped are repeated for each mapped
    entry, except ``sinks``, ``bias`` and both masks. With several mapped axes,
    ``bias`` and masks are repeated along a missing axis between two present ones;
    the batch counts as the last of these axes. If ``sinks`` or their
    gradient are mapped, each mapped entry becomes separate heads, for which arrays
    are copied. Under :func:`jax.vmap` the gradient of ``bias`` has an entry for
    each mapped entry, and JAX adds these up if ``bias`` is not mapped.

    Arrays divided over several devices by batch, by heads or by both are
    computed where they are, forward and backward. The number of parts of heads
    must divide heads_kv. Arrays that are divided otherwise (by sequence, by
    width, into more parts than kv heads) are gathered first; on a mesh of
    explicit axes they are refused. Axes of 1 of ``bias`` and ``mask`` are
    not divided, and the gradient of ``bias`` is summed over the devices that
    share it. :func:`jax.shard_map` works with and without ``check_vma``.

    Divided arrays of a ``score_mod`` are gathered. If its arrays are mapped, each
    entry takes a separate pass. ``batch`` and ``head`` in its text are indices in
    the whole arrays, within one mapped entry.

    The dropout of a pair of a query and a key depends on the entry, the head, the
    positions and the words of ``dropout_rng``, as in :func:`cuflash.attention` with
    those words as ``dropout_seed``. Mapped entries drop alike; if ``dropout_rng`` is
    mapped, each entry takes a separate pass. Divided arrays drop as whole arrays do.
    Inside :func:`jax.shard_map` each device drops as in a separate call.

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
    """Return the log-sum-exp as JAX does: heads last, rounded, and constant."""
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
    else:  # repeated outside the primitive, so that JAX sums their gradients over the batch
        shared = {name: a for name, a in arrays.items() if may_share_batch(name) and a.ndim == 1}
        arrays |= {name: repeated(a, q.shape[0], q) for name, a in shared.items()}
    arrays |= lengths
    joint = dict(zip(arrays, joined(list(arrays.values())), strict=True))
    out, lse = differentiable(joint, call)
    return (out[0], lse[0]) if one else (out, lse)
