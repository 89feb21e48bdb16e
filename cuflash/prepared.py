"""Calls with everything decided ahead: what stands below the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .addresses import Addresses
from .arrays.spec import LayoutName, TensorSpec
from .block_mask import BlockMask, split_block_mask
from .cuda.available import device_count, require_device
from .cuda.current import current_stream
from .errors import ArgumentTypeError, ArgumentValueError
from .given import add_given
from .options import AlgorithmChoice, Differentiable, WindowSize, check_options, seed_of
from .pipeline import CallPlan, choose_device, plan_call
from .planning.plan import Plan
from .planning.problem import Operation
from .score_mod import ScoreMod, with_arrays
from .signature import signature_of
from .tensors import QKV

__all__ = ["Prepared", "prepare"]


class Prepared:
    """A pass over arrays of known shapes on a CUDA device, compiled and ready.

    Made by :func:`prepare`.
    """

    def __init__(self, planned: CallPlan) -> None:
        self._planned = planned
        self._launcher = planned.launcher
        self._addresses = Addresses(planned)
        self._empty = planned.plan.problem.empty

    @property
    def plan(self) -> Plan:
        """What runs."""
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
        """Launch; allocates nothing, decides nothing, waits for nothing.

        But for the first fa3 forward launch of a stream, which allocates the counter
        that the stream's launches draw their tiles from.

        Parameters
        ----------
        pointers
            Device address of every array in :attr:`tensors`, by name. ``lse``
            (forward) and ``dlse`` (backward) may be left out or 0.
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
            If an address is missing, of no array of the plan, or not aligned
            as the plan needs it.
        """
        addresses = self._addresses.of(pointers, workspace)
        if self._empty:
            return
        launcher = self._launcher
        if stream is None:  # CuPy has a current one for each device
            stream = current_stream(launcher.device_id)
        launcher.run(addresses, workspace, stream)


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    operation: Operation = "forward",
    dtype: Any = None,
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

    CUDA graphs and other libraries call what it returns with addresses.

    Parameters
    ----------
    q, k, v : tuple of int, or array
        Shapes, as :func:`attention` takes them, of C-contiguous arrays whose
        addresses will be multiples of 16; or arrays in CUDA memory, whose
        strides and alignment are then planned for. What the kernels would need
        a copy of is refused: a last stride of more than one element,
        elements at addresses that are not multiples of their size.
    operation : {"forward", "backward"}
        Which pass.
    dtype : dtype
        Of the arrays; needed where shapes are given.
    device : int, optional
        The CUDA device; by default the arrays', or the current one.
    alibi_slopes, bias, mask, sinks, seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv : optional
        The array; or its shape, of the first dtype that the call takes; or its
        dtype, of the full shape, that of slopes (batch, heads_q); or both as a
        pair, ``(shape, dtype)``.
    block_mask : BlockMask, optional
        With blocks in any of these ways.
    dropout_seed : int, array, tuple of int, dtype, or both, optional
        An integer that all runs have; or an array, in any of these ways.
    causal, window_size, softcap, score_mod, dropout_p, scale, q_offset, layout, out_dtype
        As for :func:`attention` and :func:`attention_backward`.
    wrt, deterministic, algorithm, blocks, kv_chunk
        As for :func:`attention` and :func:`attention_backward`.

    Returns
    -------
    Prepared
        With ``plan``, ``workspace_bytes``, ``tensors`` and ``run``. All arrays
        that are not given here are C-contiguous; ``dout`` has the dtype of q,
        whatever ``out_dtype`` is. The kernels write the gradients of q, k and
        v in any case: one that ``wrt`` does not name lies in the workspace.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`.
    """
    block, shown = split_block_mask(block_mask)
    seed, seeds = seed_of(dropout_seed)
    score, of_score = with_arrays(score_mod)
    options = check_options(
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        score_mod=score,
        block_mask=block,
        dropout_p=dropout_p,
        dropout_seed=seed,
        scale=scale,
        q_offset=q_offset,
        layout=layout,
        out_dtype=out_dtype,
        wrt=wrt,
        deterministic=deterministic,
        algorithm=algorithm,
        blocks=blocks,
        kv_chunk=kv_chunk,
        backend="cuda",
    )
    arrays = {"q": q, "k": k, "v": v}
    lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
    add_given(arrays, (alibi_slopes, bias, mask, shown, sinks, seeds, *lengths), of_score)
    given = signature_of(operation, arrays, dtype, options, _check_device(device))
    for name, spec in given:
        _check_place(name, spec, device)
    chosen = choose_device(given[0][1].device, options)
    return Prepared(_check_copies(plan_call(operation, given, options, chosen)))


def _check_device(device: Any) -> int:
    """The device that was named, else the current one."""
    if device is None:
        return require_device()
    if isinstance(device, (bool, np.bool_)) or not isinstance(device, (int, np.integer)):
        raise ArgumentTypeError("device", repr(device), "the number of a CUDA device, or None")
    require_device()
    if not 0 <= device < device_count():
        raise ArgumentValueError("device", repr(device), f"0 to {device_count() - 1}")
    return int(device)


def _check_place(name: str, spec: TensorSpec, device: int | None) -> None:
    if spec.device is None:
        raise ArgumentTypeError(name, "an array in host memory", "a shape, or one in CUDA memory")
    if device is not None and spec.device != device:
        raise ArgumentValueError("device", str(device), f"{spec.device}, where {name} is")


def _check_copies(planned: CallPlan) -> CallPlan:
    """Refuse what needs a copy: a prepared run makes none."""
    if planned.copied:
        raise ArgumentValueError(
            ", ".join(planned.copied),
            "strides or an address that the kernels cannot read",
            "rows of consecutive elements, each at a multiple of its size",
        )
    return planned
