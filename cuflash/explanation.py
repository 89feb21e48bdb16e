"""Explains what a call would run, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arrays.adopt import adopt
from .arrays.spec import LayoutName
from .block_mask import BlockMask
from .caches.given import length_of
from .caches.planned import CachePlan
from .config import Environment
from .cuda.available import require_cupy
from .errors import UnsupportedError
from .explained import Explanation, explained
from .options import (
    AlgorithmChoice,
    BackendChoice,
    Differentiable,
    Options,
    WindowSize,
    check_flag,
)
from .pipeline import choose_device, plan_call
from .plan_ahead import PlannedOperation, check_asked, plan_with_caches
from .score_mod import ScoreMod
from .signature import signature_of
from .tensors import QKV

__all__ = ["explain"]


def explain(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    operation: PlannedOperation = "forward",
    dtype: Any = None,
    k_cache: Any = None,
    v_cache: Any = None,
    cache_seqlens: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool | None = None,
    rotary_seqlens: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    cache_dtype: Any = None,
    max_seqlen_q: int | None = None,
    overflow: Any = None,
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
    out_dtype: Any = None,
    wrt: Sequence[Differentiable] = QKV,
    deterministic: bool = False,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
    compile: bool = False,  # noqa: A002  (what it says)
) -> Explanation:
    """Say what a call would run, without running it.

    Parameters
    ----------
    q, k, v : array or tuple of int
        The arrays of the call, or their shapes. Shapes need ``dtype``, and stand for
        contiguous arrays in the memory where the call would compute.
    operation : {"forward", "backward", "kvcache", "append"}
        The pass; or :func:`attention_with_kvcache` or :func:`append_kv`, with the arguments of
        these functions, planned for CUDA. Arguments that the operation does not take are refused.
    compile : bool
        Also compile, and report registers.
    k_cache, v_cache, page_table, cache_batch_idx, cache_leftpad : optional
        As for :func:`prepare`.
    rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, overflow : optional
        As for :func:`prepare`.
    k_scale, v_scale, cache_dtype, max_seqlen_q : optional
        As for :func:`prepare`.
    cache_seqlens : optional
        As for :func:`prepare`; or an int, as for the call.
    alibi_slopes, bias, mask, block_mask, sinks, dropout_seed : optional
        As for :func:`prepare`.
    seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv : optional
        As for :func:`prepare`.
    dtype, causal, window_size, softcap, score_mod, dropout_p, scale, q_offset, layout, out_dtype
        As for :func:`attention`, :func:`attention_backward` and :func:`prepare`.
    wrt, deterministic, backend, algorithm, blocks, kv_chunk
        As for :func:`attention`, :func:`attention_backward` and :func:`prepare`.

    Returns
    -------
    Explanation
        A frozen record that prints itself. With caches its kernels are those of the append, then
        those of attention; the rest is about attention, or about the append if it is alone. The
        workspace is that of full caches, whatever the lengths are.

    Raises
    ------
    CuflashError
        What the call itself would raise.
    UnsupportedError, BackendUnavailableError
        Also with caches where NumPy would compute. NumPy appends without kernels, and plans
        attention in the call, for the longest length or for one entry after the other.
    ArgumentTypeError
        Also for arrays in host memory beside caches; shapes take their place.

    Examples
    --------
    >>> import cuflash
    >>> shape = (1, 128, 8, 64)
    >>> said = cuflash.explain(shape, shape, shape, dtype="float32", backend="numpy")
    >>> said.algorithm, said.backend, said.workspace_bytes
    ('fa2', 'numpy', 0)
    """
    given = dict(locals())
    options, arrays = check_asked(given, explain)
    compiled = check_flag("compile", compile)
    if operation == "append" or operation == "kvcache":
        return explained(_with_caches(given, options), compiled)
    specs = signature_of(operation, arrays, dtype, options, choose_device(None, options))
    device = choose_device(specs[0][1].device, options)
    return explained(plan_call(operation, specs, options, device), compiled)


def _with_caches(given: Mapping[str, Any], options: Options) -> CachePlan:
    """The plan of an operation with caches, whose ``cache_seqlens`` may be a number."""
    where = _device_of_caches(given["operation"], given["k_cache"], options)
    length, lengths = length_of(given["cache_seqlens"])
    given = {**given, "cache_seqlens": "int32" if length is not None else lengths}
    return plan_with_caches(given, options, where, length)


def _device_of_caches(operation: str, cache: Any, options: Options) -> int:
    """The CUDA device of caches; without an array the current one, unless NumPy would compute."""
    described = cache is None or isinstance(cache, (tuple, list))
    where = choose_device(None if described else adopt("k_cache", cache).spec.device, options)
    if where is not None:
        return where
    if options.backend == "auto" and Environment.read().backend == "auto":
        require_cupy(f"CUDA, for which alone operation={operation!r} is explained,")
    raise UnsupportedError(
        f"operation={operation!r} is not explained for NumPy, where nothing is planned ahead of "
        "the call: it appends without kernels, and attends to as many keys as the lengths in "
        "cache_seqlens say then"
    )
