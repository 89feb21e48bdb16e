"""Calls with everything decided ahead: what stands below the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .addresses import Addresses
from .arrays.adopt import adopt
from .arrays.spec import LayoutName, TensorSpec, contiguous_strides
from .checks import CallProblem, describe
from .cuda.available import device_count, require_device
from .cuda.current import current_stream
from .errors import ArgumentTypeError, ArgumentValueError
from .options import (
    AlgorithmChoice,
    Differentiable,
    Options,
    WindowSize,
    check_dtype,
    check_element,
    check_options,
)
from .pipeline import CallPlan, choose_device, plan_call
from .planning.plan import Plan
from .planning.problem import ELEMENTS, DTypeName, ElementName, Operation
from .tensors import QKV, tensors

__all__ = ["Prepared", "prepare", "signature_of"]


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
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: LayoutName | None = None,
    out_dtype: Any = None,
    wrt: Sequence[Differentiable] = QKV,
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
    alibi_slopes, bias, mask, sinks : array, tuple of int, dtype, or both, optional
        The array; or its shape, of the first dtype that the call takes; or its
        dtype, of the full shape, that of slopes (batch, heads_q); or both as a
        pair, ``(shape, dtype)``.
    causal, window_size, softcap, scale, q_offset, layout, out_dtype
        As for :func:`attention` and :func:`attention_backward`.
    wrt, deterministic, algorithm, blocks
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
    options = check_options(
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        scale=scale,
        q_offset=q_offset,
        layout=layout,
        out_dtype=out_dtype,
        wrt=wrt,
        deterministic=deterministic,
        algorithm=algorithm,
        blocks=blocks,
        backend="cuda",
    )
    of_features = {"alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "sinks": sinks}
    arrays = {"q": q, "k": k, "v": v, **{n: a for n, a in of_features.items() if a is not None}}
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


def signature_of(
    operation: Operation,
    arrays: Mapping[str, Any],
    dtype: Any,
    options: Options,
    where: int | None,
) -> tuple[tuple[str, TensorSpec], ...]:
    """Descriptions of a call's arrays, from arrays or shapes of q, k, v and those of features.

    What the backward pass takes besides is described as the forward pass
    would have made it, ``dout`` in the dtype of q, ``dlse`` included.
    """
    if not isinstance(operation, str) or operation not in ("forward", "backward"):
        raise ArgumentValueError("operation", repr(operation), "'forward' or 'backward'")
    given: dict[str, TensorSpec] = {}
    given |= {name: _spec_of(name, arrays[name], dtype, where) for name in QKV}
    if operation == "forward" and options.wrt != QKV:
        raise ArgumentValueError("wrt", repr(options.wrt), 'operation="backward" beside it')
    sizes = describe("forward", given, options)
    for name, array in arrays.items():
        if name not in given:
            given[name] = _spec_of_feature(name, array, sizes, given["q"].device)
    if operation == "backward":
        made = [n for n, t in tensors().items() if t.reads == ("backward",)]
        given |= {name: sizes.fresh(name, given["q"].device) for name in made}
    return tuple(given.items())


def _spec_of(name: str, tensor: Any, dtype: Any, where: int | None) -> TensorSpec:
    """Of q, k or v."""
    if not isinstance(tensor, (tuple, list)):
        spec = adopt(name, tensor).spec
        if dtype is not None and _dtype(dtype) != spec.dtype:
            raise ArgumentValueError("dtype", repr(dtype), f"{spec.dtype}, which {name} has")
        return spec
    return _fresh(_shape(name, tensor), _dtype(dtype), where)


def _shape(name: str, sizes: Sequence[Any]) -> tuple[int, ...]:
    if not all(_is_size(size) for size in sizes):
        raise ArgumentValueError(name, repr(sizes), "a shape: non-negative integers")
    return tuple(int(size) for size in sizes)


def _fresh(shape: tuple[int, ...], dtype: ElementName, where: int | None) -> TensorSpec:
    return TensorSpec(shape, dtype, contiguous_strides(shape), ELEMENTS[dtype].itemsize, where)


def _spec_of_feature(name: str, array: Any, sizes: CallProblem, where: int | None) -> TensorSpec:
    """Of an array of a feature; where its shape or its dtype is given, as the call needs it."""
    if _is_dtype(array):
        return _fresh(sizes.shapes[name], check_element(name, array), where)
    shape, dtype = array, sizes.allowed[name][0]
    if isinstance(array, (tuple, list)) and len(array) == 2 and _is_dtype(array[1]):
        shape, dtype = array[0], check_element(name, array[1])
    if isinstance(shape, (tuple, list)):
        return _fresh(_shape(name, shape), dtype, where)
    return adopt(name, shape).spec


def _is_dtype(value: Any) -> bool:
    """Whether it stands for an array by its dtype alone."""
    known = isinstance(value, (str, np.dtype, type))
    return known or type(value).__name__.lower() == "dtype"


def _is_size(size: Any) -> bool:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    return whole and size >= 0


def _dtype(dtype: Any) -> DTypeName:
    checked = check_dtype("dtype", dtype)
    if checked is None:
        raise ArgumentTypeError("dtype", "None", "a dtype, where shapes are given")
    return checked
