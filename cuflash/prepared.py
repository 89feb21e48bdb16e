"""Calls with everything decided ahead: what stands below the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .addresses import Addresses
from .arrays.adopt import adopt
from .arrays.spec import TensorSpec, contiguous_strides
from .cuda.available import device_count, require_device
from .cuda.current import current_stream
from .errors import ArgumentTypeError, ArgumentValueError
from .options import AlgorithmChoice, Options, check_dtype, check_options
from .pipeline import Pipeline, choose_device, pipeline_of
from .planning.plan import Plan
from .planning.problem import DTYPES, DTypeName, Operation

__all__ = ["Prepared", "prepare", "signature_of"]


class Prepared:
    """A pass over arrays of known shapes on a CUDA device, compiled and ready.

    Made by :func:`prepare`.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._launcher = pipeline.launcher
        self._addresses = Addresses(pipeline)
        self._empty = pipeline.plan.problem.empty

    @property
    def plan(self) -> Plan:
        """What runs."""
        return self._pipeline.plan

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that :meth:`run` needs."""
        return self.plan.workspace_bytes

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Shape, dtype and strides of every array whose address :meth:`run` takes."""
        return self._pipeline.tensors

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
    scale: float | None = None,
    q_offset: int | None = None,
    layout: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
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
    causal, scale, q_offset, layout, out_dtype, deterministic, algorithm, blocks
        As for :func:`attention` and :func:`attention_backward`.

    Returns
    -------
    Prepared
        With ``plan``, ``workspace_bytes``, ``tensors`` and ``run``. All arrays
        but q, k and v are C-contiguous; ``dout`` has the dtype of q, whatever
        ``out_dtype`` is.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError, BackendUnavailableError, ToolchainError
        As for :func:`attention`.
    """
    options = check_options(
        causal=causal,
        scale=scale,
        q_offset=q_offset,
        layout=layout,
        out_dtype=out_dtype,
        deterministic=deterministic,
        algorithm=algorithm,
        blocks=blocks,
        backend="cuda",
    )
    where = _check_device(device)
    given = signature_of(operation, (q, k, v), dtype, options, where)
    for name, spec in given:
        _check_place(name, spec, device)
    chosen = choose_device(given[0][1].device, options)
    return Prepared(_check_copies(pipeline_of(operation, given, options, chosen)))


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


def _check_copies(pipeline: Pipeline) -> Pipeline:
    """Refuse what needs a copy: a prepared run makes none."""
    if pipeline.copied:
        raise ArgumentValueError(
            ", ".join(pipeline.copied),
            "strides or an address that the kernels cannot read",
            "rows of consecutive elements, each at a multiple of its size",
        )
    return pipeline


def signature_of(
    operation: Operation,
    tensors: Sequence[Any],
    dtype: Any,
    options: Options,
    where: int | None,
) -> tuple[tuple[str, TensorSpec], ...]:
    """Descriptions of a call's arrays, from arrays or shapes of q, k and v.

    What the backward pass takes besides is described as the forward pass
    would have made it, ``dout`` in the dtype of q, ``dlse`` included.
    """
    if not isinstance(operation, str) or operation not in ("forward", "backward"):
        raise ArgumentValueError("operation", repr(operation), "'forward' or 'backward'")
    names = ("q", "k", "v")
    given = tuple(
        (name, _spec_of(name, tensor, dtype, where))
        for name, tensor in zip(names, tensors, strict=True)
    )
    if operation == "forward":
        return given
    forward = pipeline_of("forward", given, _forward_options(options), given[0][1].device)
    out, lse = forward.tensors["out"], forward.tensors["lse"]
    q = given[0][1]
    dout = replace(out, dtype=q.dtype, itemsize=q.itemsize)
    return (*given, ("out", out), ("dout", dout), ("lse", lse), ("dlse", lse))


def _forward_options(options: Options) -> Options:
    return Options(
        causal=options.causal,
        scale=options.scale,
        q_offset=options.q_offset,
        layout=options.layout,
        out_dtype=options.out_dtype,
        backend=options.backend,
    )


def _spec_of(name: str, tensor: Any, dtype: Any, where: int | None) -> TensorSpec:
    if not isinstance(tensor, (tuple, list)):
        spec = adopt(name, tensor).spec
        if dtype is not None and _dtype(dtype) != spec.dtype:
            raise ArgumentValueError("dtype", repr(dtype), f"{spec.dtype}, which {name} has")
        return spec
    if not all(_is_size(size) for size in tensor):
        raise ArgumentValueError(name, repr(tensor), "a shape: non-negative integers")
    shape = tuple(int(size) for size in tensor)
    kind = _dtype(dtype)
    return TensorSpec(shape, kind, contiguous_strides(shape), DTYPES[kind].itemsize, where)


def _is_size(size: Any) -> bool:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    return whole and size >= 0


def _dtype(dtype: Any) -> DTypeName:
    checked = check_dtype("dtype", dtype)
    if checked is None:
        raise ArgumentTypeError("dtype", "None", "a dtype, where shapes are given")
    return checked
