"""Runs a call: adopts its arrays, plans, copies if necessary, launches, and returns results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from . import tiled_numpy
from .arrays.adopt import (
    Adopted,
    address,
    adopt,
    contiguous,
    empty,
    fill,
    to_device,
    to_host,
)
from .arrays.mapped import Mappings
from .arrays.overlap import overlaps_itself, share_memory
from .arrays.spec import Layout, TensorSpec
from .calls import Arrays, find, keep, see
from .cuda.current import current_stream, is_capturing
from .errors import ArgumentTypeError, ArgumentValueError
from .options import Options, check_flag, check_options
from .pipeline import CallPlan, choose_device, plan_call
from .planning.plan import Plan
from .planning.problem import Operation
from .tensors import QKV, argument_of, destinations, made_by, tensors

__all__ = ["call", "check_destinations", "observe", "run", "run_numpy", "tell"]

_observers: list[Callable[[Plan], None]] = []
#: Arrays that captured calls allocated: their graphs may run as long as the process does.
_kept_for_graphs: list[Any] = []


@contextlib.contextmanager
def observe(callback: Callable[[Plan], None]) -> Iterator[None]:
    """Call ``callback`` with the plan of every pass that runs inside the block."""
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


def call(operation: Operation, arrays: Arrays, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Run one pass for a public function; a repeated call is not planned again.

    Parameters
    ----------
    operation
        "forward" or "backward".
    arrays
        The given inputs by argument name, then the given destinations, then the
        workspace, if given.
    keywords
        As the caller gave them: the keywords of :func:`check_options`, and
        ``return_lse`` for a forward pass. Those that are left out have their defaults.

    Returns
    -------
    dict
        As for :func:`run`.
    """
    seen = see(operation, keywords, arrays)
    if seen is not None:
        signature, addresses = seen
        ready = find(signature, keywords)
        results = None if ready is None else ready.run(arrays, addresses, tell)
        if results is not None:
            return results
    options = {name: value for name, value in keywords.items() if name != "return_lse"}
    checked = check_options(**options)
    want_lse = check_flag("return_lse", keywords.get("return_lse", True))
    targets = destinations(operation)
    return run(
        operation,
        {name: array for name, array in arrays.items() if name not in (*targets, "workspace")},
        {name: array for name, array in arrays.items() if name in targets},
        checked,
        want_lse=want_lse,
        workspace=arrays.get("workspace"),
        decided=None if seen is None else functools.partial(keep, seen, keywords, arrays),
    )


def tell(plan: Plan) -> None:
    """Call the observers with a plan that will run."""
    for observer in _observers:
        observer(plan)


def run(
    operation: Operation,
    inputs: Arrays,
    targets: Arrays,
    options: Options,
    *,
    want_lse: bool = True,
    workspace: Any = None,
    decided: Callable[[CallPlan], None] | None = None,
) -> dict[str, Any]:
    """Run one pass over arrays of any kind.

    Parameters
    ----------
    operation
        "forward" or "backward".
    inputs, targets
        The caller's arrays by argument name: the inputs, and the destinations.
    options
        The checked keywords.
    want_lse
        Whether a forward pass gives the log-sum-exp.
    workspace
        Memory for the kernels instead of a fresh allocation.
    decided
        Called with the plan after the pass has run.

    Returns
    -------
    dict
        The results by name: first the given destinations, in their order, then new
        arrays of q's kind, in the order of ``wrt``.
    """
    adopted = {name: adopt(argument_of(name), value) for name, value in inputs.items()}
    written = {name: adopt(name, value) for name, value in targets.items()}
    specs = tuple((name, array.spec) for name, array in {**adopted, **written}.items())
    device = choose_device(adopted["q"].spec.device, options)
    planned = plan_call(operation, specs, options, device, want_lse or "lse_out" in written)
    check_destinations(adopted, written)
    _check_workspace(workspace, planned, {**adopted, **written})

    natives = {name: array.native for name, array in adopted.items()}
    tensor_of = destinations(operation)
    results = {tensor_of[name]: target.native for name, target in written.items()}
    for name, spec in planned.tensors.items():
        if name not in natives and name not in results:
            results[name] = empty(natives["q"], spec.shape, spec.dtype)
    if device is None:
        run_numpy(planned, natives, results)
    elif not planned.plan.problem.empty:
        tell(planned.plan)
        _run_cuda(planned, device, natives, results, workspace)
    if decided is not None:
        decided(planned)
    given = {tensor_of[name]: target.given for name, target in written.items()}
    answer = adopted["q"].answer
    return {
        name: given[name] if name in given else answer(array) for name, array in results.items()
    }


def check_destinations(inputs: Mapping[str, Adopted], targets: Mapping[str, Adopted]) -> None:
    """Check that destinations overlap neither inputs, nor one another, nor themselves."""
    taken: dict[str, Any] = {name: array.native for name, array in inputs.items()}
    mappings = Mappings()
    for name, target in targets.items():
        array = target.native
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ArgumentValueError(name, "a read-only array", "one that can be written")
        if overlaps_itself(array):
            raise ArgumentValueError(
                name, "an array whose elements share memory", "one place for each element"
            )
        for other, native in taken.items():
            if share_memory(array, native, mappings):
                used = f"memory that {argument_of(other)} uses"
                raise ArgumentValueError(name, used, "memory of its own")
        taken[name] = array


def _check_workspace(workspace: Any, planned: CallPlan, others: Mapping[str, Adopted]) -> None:
    if workspace is None:
        return
    if planned.device is None:
        raise ArgumentValueError("workspace", "an array for the NumPy backend", "None")
    needed = planned.workspace_bytes
    expected = f"a CuPy array of at least {needed} uint8, 256-byte aligned, on the same device"
    array = adopt("workspace", workspace)
    spec = array.spec
    if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.device != planned.device:
        raise ArgumentTypeError("workspace", f"{spec.dtype} of shape {spec.shape}", expected)
    place = address(array.native)
    if spec.shape[0] < needed or not spec.rows_are_unit or place % 256:
        raise ArgumentValueError("workspace", f"{spec.shape[0]} bytes at {place:#x}", expected)
    for name, other in others.items():
        if share_memory(array.native, other.native):
            used = f"memory that {argument_of(name)} uses"
            raise ArgumentValueError("workspace", used, "memory of its own")


def run_numpy(planned: CallPlan, inputs: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Run a planned pass of the tiled NumPy code, without further checks.

    Parameters
    ----------
    planned
        A plan for the CPU.
    inputs, results
        NumPy arrays by the tensors' names; results overlap no other array.
    """
    if planned.plan.problem.empty:
        return
    tell(planned.plan)
    layout = planned.call.layout
    arrays = {name: _canonical(name, a, layout) for name, a in {**inputs, **results}.items()}
    if planned.plan.problem.operation == "forward":
        tiled_numpy.forward(planned.plan, **{"lse": None, **arrays})
    else:
        absent = dict.fromkeys(("dlse", *made_by("backward", QKV)))
        tiled_numpy.backward(planned.plan, **{**absent, **arrays})


def _canonical(name: str, array: Any, layout: Layout) -> Any:
    """Return a view with all axes in the order of the kernels: "bshd", and "bhs" for rows."""
    role = tensors()[name].role
    if role == "array":
        return array
    wanted = "bhs" if role == "rows" else "bshd"
    present = [axis for axis in wanted if axis in layout.name]
    order = present if role == "rows" else list(layout.name)
    view = array.transpose([order.index(axis) for axis in present])
    return np.expand_dims(view, [i for i, axis in enumerate(wanted) if axis not in present])


def _run_cuda(
    planned: CallPlan,
    device: int,
    inputs: Mapping[str, Any],
    results: Mapping[str, Any],
    workspace: Any,
) -> None:
    import cupy

    copied = planned.copied
    with cupy.cuda.Device(device):
        makes = bool(copied) or (workspace is None and planned.workspace_bytes > 0)
        stream = current_stream(device)
        capturing = makes and is_capturing(stream)
        if capturing:
            _refuse_host_arrays({**inputs, **results})
        arrays = {
            name: _copy(array, planned.placed[name], device) if name in copied else array
            for name, array in inputs.items()
        }
        # A result that the kernels cannot write in place is written elsewhere and copied.
        aside = {
            name: cupy.empty(array.shape, array.dtype)
            for name, array in results.items()
            if name in copied
        }
        arrays |= {name: aside.get(name, array) for name, array in results.items()}
        if workspace is None:
            needed = planned.workspace_bytes if capturing else planned.eager_bytes
            workspace = cupy.empty(needed, np.uint8) if needed else None
        if capturing:
            made = [*(arrays[name] for name in copied), workspace]
            _kept_for_graphs.extend(array for array in made if array is not None)
        place = 0 if workspace is None else address(workspace)
        addresses = [address(arrays[name]) for name in planned.tensors]
        addresses += [place + offset for offset in planned.scratch.values()]
        planned.launcher.run(tuple(addresses), place, stream)
        for name, array in aside.items():
            _bring(array, results[name])


def _bring(array: Any, destination: Any) -> None:
    """Copy a device array to its destination."""
    if isinstance(destination, np.ndarray):
        to_host(array, destination)
    else:
        fill(destination, array)


def _refuse_host_arrays(arrays: Mapping[str, Any]) -> None:
    """Refuse host arrays: a graph would copy them every time it runs, and wait for the copies."""
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            raise ArgumentTypeError(
                name,
                "an array in host memory while a CUDA graph is captured",
                "one in CUDA memory",
            )


def _copy(array: Any, placed: TensorSpec, device: int) -> Any:
    """Return a C-contiguous copy of an input on the device, in the dtype of ``placed``."""
    if isinstance(array, np.ndarray):
        return to_device(array.astype(placed.dtype, copy=False), device)
    return contiguous(array).astype(placed.dtype, copy=False)
