"""Calls decided and compiled ahead of time, which take addresses instead of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .addresses import addresses_of
from .arrays.spec import LayoutName, TensorSpec
from .block_mask import BlockMask
from .caches.planned import CachePlan
from .cuda.available import device_count, require_device
from .cuda.current import current_stream
from .errors import ArgumentTypeError, ArgumentValueError
from .html_table import html_table
from .options import AlgorithmChoice, Differentiable, WindowSize
from .pipeline import CallPlan, choose_device, plan_call
from .plan_ahead import PlannedOperation, check_asked, plan_with_caches
from .planning.plan import Plan
from .score_mod import ScoreMod
from .signature import check_copies, check_place, signature_of
from .tensors import QKV

__all__ = ["Prepared", "prepare"]


class Prepared:
    """A pass over arrays of known shapes on a CUDA device, compiled and ready.

    Made by :func:`prepare`.
    """

    def __init__(self, planned: CallPlan | CachePlan) -> None:
        self._planned = planned
        self._launcher = planned.launcher
        if isinstance(planned, CachePlan):
            self._addresses, self._empty = planned.addresses, not planned.launcher.steps
        else:
            self._addresses, self._empty = addresses_of(planned), planned.plan.problem.empty

    def _repr_html_(self) -> str:
        tensors = ", ".join(f"{n} {spec.dtype} {spec.shape}" for n, spec in self.tensors.items())
        rows = [("plan", str(self.plan)), ("workspace", f"{self.workspace_bytes:,} bytes")]
        return html_table([*rows, ("tensors", tensors)])

    @property
    def plan(self) -> Plan:
        """The plan that runs; with caches, that of attention, or of the append if it is alone."""
        return self._planned.plan

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that :meth:`run` needs."""
        return self._planned.workspace_bytes

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Shape, dtype and strides of every array whose address :meth:`run` takes."""
        return self._planned.tensors

    def run(
        self, pointers: Mapping[str, int], stream: int | None = None, workspace: int = 0
    ) -> None:
        """Launch the kernels; allocates nothing, decides nothing and waits for nothing.

        One exception: the first fa3 forward launch on a stream allocates the counter from which the
        launches of that stream draw their tiles.

        Parameters
        ----------
        pointers
            Device address of every array in :attr:`tensors`, by name. ``lse``
            (forward, with caches) and ``dlse`` (backward) may be left out or 0.
        stream
            Address of a CUDA stream of the plan's device; by default CuPy's
            current one there.
        workspace
            Address of :attr:`workspace_bytes` bytes, a multiple of 256, not
            used by anything else until the kernels have run.

        Raises
        ------
        ArgumentTypeError
            If ``pointers`` is no mapping, or an address not an integer.
        ArgumentValueError
            If an address is missing, belongs to no array of the plan, or is not aligned as the plan
            needs.
        """
        addresses = self._addresses.of(pointers, workspace)
        if self._empty:
            return
        launcher = self._launcher
        if stream is None:  # CuPy has a current one for each device
            stream = current_stream(launcher.device_id)
        launcher.run(addresses, workspace, stream)

    def bound(self, pointers: Mapping[str, int], workspace: int = 0) -> Callable[[int], None]:
        """Check addresses, and return the run with them: a function of the address of a stream.

        Errors are those of :meth:`run`.
        """
        addresses = self._addresses.of(pointers, workspace)
        if self._empty:
            return lambda stream: None
        launch = self._launcher.run
        return lambda stream: launch(addresses, workspace, stream)


def prepare(
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
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
    device: int | None = None,
) -> Prepared:
    """Plan and compile a pass from shapes alone.

    CUDA graphs and other libraries call the result with addresses.

    Parameters
    ----------
    q, k, v : tuple of int, or array
        Shapes, as :func:`attention` takes them, of C-contiguous arrays whose addresses will be
        multiples of 16; or arrays in CUDA memory, whose strides and alignment the plan then
        assumes. Arrays that the kernels could only read as a copy are refused: those with a last
        stride of more than one element, and those whose addresses are not multiples of the element
        size.
    operation : {"forward", "backward", "kvcache", "append"}
        The pass; or :func:`attention_with_kvcache` or :func:`append_kv`, with the arguments of
        these functions. Arguments that the operation does not take are refused.
    dtype : dtype
        Dtype of the arrays; needed where shapes are given.
    device : int, optional
        The CUDA device; by default the arrays', or the current one.
    alibi_slopes, bias, mask, sinks, seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv : optional
        The array; or its shape, with the first dtype that the call takes; or its dtype, with the
        full shape (for slopes (batch, heads_q)); or both as a pair ``(shape, dtype)``.
    block_mask : BlockMask, optional
        Its blocks may be given in any of these ways.
    k_cache, v_cache : tuple of int, or array
        Caches, or their pages, given in these ways.
    page_table, rotary_cos, rotary_sin : optional
        The array, its shape, or a pair; the default dtype follows from that of q or k.
    cache_seqlens, cache_batch_idx, cache_leftpad, rotary_seqlens, overflow : optional
        The array, its shape, or its dtype. ``cache_seqlens`` is needed and cannot be an int,
        because a run reads it on the device.
    rotary_interleaved, max_seqlen_q
        As for :func:`append_kv` and :func:`attention_with_kvcache`.
    k_scale, v_scale : optional
        Scales of float8 caches: a number for all runs; or a float32 array, its shape,
        or a pair.
    cache_dtype
        As for :func:`append_kv`; caches given by their shapes then hold float8 bytes.
    dropout_seed : int, array, tuple of int, dtype, or both, optional
        An integer for all runs; or an array, given in any of these ways.
    causal, window_size, softcap, score_mod, dropout_p, scale, q_offset, layout, out_dtype
        As for :func:`attention` and :func:`attention_backward`.
    wrt, deterministic, algorithm, blocks, kv_chunk
        As for :func:`attention` and :func:`attention_backward`.

    Returns
    -------
    Prepared
        With ``plan``, ``workspace_bytes``, ``tensors`` and ``run``. Arrays that are not given here
        are C-contiguous; ``dout`` has the dtype of q, whatever ``out_dtype`` is. The kernels always
        write the gradients of q, k and v; a gradient that ``wrt`` does not name is in the
        workspace. With caches ``tensors`` has the names of the arguments, and ``out`` and ``lse``
        of "kvcache"; the workspace is that of full caches, whatever the lengths are.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`, and for :func:`attention_with_kvcache`.
    """
    given = dict(locals())
    options, arrays = check_asked(given, prepare)
    where = _check_device(device)
    if operation == "append" or operation == "kvcache":
        with_caches = plan_with_caches(given, options, where)
        check_copies(with_caches.copied)
        return Prepared(with_caches)
    specs = signature_of(operation, arrays, dtype, options, where)
    for name, spec in specs:
        check_place(name, spec, device)
    planned = plan_call(operation, specs, options, choose_device(specs[0][1].device, options))
    check_copies(planned.copied)
    return Prepared(planned)


def _check_device(device: Any) -> int:
    """The given device, else the current one."""
    if device is None:
        return require_device()
    if isinstance(device, (bool, np.bool_)) or not isinstance(device, (int, np.integer)):
        raise ArgumentTypeError("device", repr(device), "the number of a CUDA device, or None")
    require_device()
    if not 0 <= device < device_count():
        raise ArgumentValueError("device", repr(device), f"0 to {device_count() - 1}")
    return int(device)
