"""From the descriptions of a call's arrays to everything that is decided about it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .arrays.spec import Layout, TensorSpec, contiguous_strides
from .checks import CallProblem, describe
from .config import Environment
from .cuda.available import is_usable, require_device
from .cuda.compile import require_toolchain
from .cuda.launch import PreparedPlan
from .errors import ArgumentValueError
from .features.use import Use
from .options import Options
from .planning.device import DeviceLimits, HostLimits
from .planning.fa3 import needs_newer_compiler
from .planning.invariant import batch_invariant_plan
from .planning.kernel import lay_out
from .planning.plan import Plan, plan
from .planning.problem import DTYPES, Alignment, AttentionProblem, Operation
from .tensors import QKV, destinations, made_by, tensors

__all__ = ["CallPlan", "choose_device", "forget_decisions", "plan_call", "strides_of"]


@dataclass(frozen=True)
class CallPlan:
    """The plan of all calls of one signature, and how their arrays come to it.

    Attributes
    ----------
    call
        The problem, and the shape and dtype of every tensor.
    plan
        What runs.
    device
        The CUDA device that computes; None for the tiled NumPy code.
    tensors
        Every tensor as it is, or will be made, where the caller's arrays are.
    placed
        The same as the computation sees them: what differs is copied. On CUDA
        the gradients of ``scratch`` follow.
    scratch
        Gradients that the kernels write and nobody asked for, and where each
        of them lies in the workspace, in bytes.
    """

    call: CallProblem
    plan: Plan
    device: int | None
    tensors: Mapping[str, TensorSpec]
    placed: Mapping[str, TensorSpec]
    scratch: Mapping[str, int]

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Device memory beside the tensors: that of the plan, and the scratch behind it."""
        ends = [at + self.placed[name].nbytes for name, at in self.scratch.items()]
        return max([self.plan.workspace_bytes, *ends])

    @property
    def eager_bytes(self) -> int:
        """The same where no CUDA graph is captured."""
        return self.workspace_bytes if self.scratch else self.plan.eager_bytes

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the tensors that cannot be used where they are."""
        return tuple(name for name, spec in self.tensors.items() if self.placed[name] != spec)

    @functools.cached_property
    def launcher(self) -> PreparedPlan:
        """The compiled kernels of a call on CUDA, kept as long as this plan."""
        layout = self.call.layout
        strides = {name: strides_of(name, spec, layout) for name, spec in self.placed.items()}
        if self.plan.problem.group_rows > 1:
            strides |= {
                n: _of_group_rows(strides[n], self.plan.problem) for n in _OF_QUERIES & {*strides}
            }
        return PreparedPlan(self.plan, strides, self.device or 0)


def plan_call(
    operation: Operation,
    given: tuple[tuple[str, TensorSpec], ...],
    options: Options,
    device: int | None,
    want_lse: bool = True,
) -> CallPlan:
    """Check, describe and plan the calls of one signature.

    Parameters
    ----------
    operation
        "forward" or "backward".
    given
        Argument name and description of every array of the call.
    options
        The checked keywords.
    device
        The CUDA device that computes; None for the tiled NumPy code.
    want_lse
        Whether the forward pass writes the log-sum-exp.
    """
    # A device's limits never change; the environment may change the host's.
    host = HostLimits.query() if device is None else None
    return _decide(operation, given, options, device, want_lse, host)


@functools.lru_cache(maxsize=1024)
def _decide(
    operation: Operation,
    given: tuple[tuple[str, TensorSpec], ...],
    options: Options,
    device: int | None,
    want_lse: bool,
    host: HostLimits | None,
) -> CallPlan:
    call = describe(operation, dict(given), options)
    # `out` is an input of the backward pass, a destination of the forward one.
    argument_of = destinations(operation)
    seen = {argument_of.get(name, name): spec for name, spec in given}
    where = seen["q"].device
    for name in made_by(operation, options.wrt):
        if name not in seen and (name != "lse" or want_lse):
            seen[name] = call.fresh(name, where)
    placed = dict(seen)
    if device is not None:
        placed = {name: _placed(name, spec, call, device) for name, spec in seen.items()}
        if operation == "backward":  # whose kernels write the gradients of q, k and v in any case
            every = made_by(operation, QKV)
            placed |= {n: call.fresh(n, device) for n in every if n not in seen}
    alignment = "element" if device is None else _alignment(placed)
    uses = tuple(_with_maps(use, placed) for use in call.problem.uses)
    problem = replace(call.problem, alignment=alignment, uses=uses)
    chosen = _plan(problem, options, host or DeviceLimits.query(device or 0))
    extra = [(name, spec.nbytes) for name, spec in placed.items() if name not in seen]
    whole = [("", chosen.workspace_bytes), *extra]
    scratch = {buffer.name: buffer.offset for buffer in lay_out(whole) if buffer.name}
    call = replace(call, problem=problem)
    return CallPlan(call, chosen, device, seen, placed, scratch)


def _plan(problem: AttentionProblem, options: Options, limits: DeviceLimits | HostLimits) -> Plan:
    """The plan; a warning if a newer compiler would have given a better one."""
    planned = batch_invariant_plan if options.batch_invariant else plan
    chosen = planned(
        problem,
        limits,
        algorithm=options.algorithm,
        blocks=options.blocks,
        kv_chunk=options.kv_chunk,
    )
    anything = options.algorithm == "auto" and options.blocks is None
    if isinstance(limits, DeviceLimits) and anything:
        remedy = needs_newer_compiler(problem, limits)
        if remedy is not None:
            said = f"running {chosen.algorithm}: fa3 {remedy}"
            warnings.warn(said, stacklevel=_frames_inside())
    return chosen


def forget_decisions() -> None:
    """Decide about every signature anew, in the environment as it then is."""
    _decide.cache_clear()


def _frames_inside() -> int:
    """The ``stacklevel``, in the function that asks, of who called the package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    return level


def _alignment(placed: Mapping[str, TensorSpec]) -> Alignment:
    table = tensors()
    matrices = [spec for name, spec in placed.items() if table[name].role == "matrix"]
    if all(spec.mappable for spec in matrices):
        return "tensor_map"
    return "vector" if all(spec.aligned for spec in matrices) else "element"


def _with_maps(use: Use, placed: Mapping[str, TensorSpec]) -> Use:
    """A use whose arrays say whether the copy engine can read them where they lie."""
    if not any(operand.staged for operand in use.operands):
        return use
    specs = ((operand, placed[operand.name]) for operand in use.operands)
    return replace(
        use,
        operands=tuple(replace(operand, mappable=spec.boxable) for operand, spec in specs),
    )


def choose_device(where: int | None, options: Options) -> int | None:
    """The CUDA device that computes for arrays at ``where``; None for the tiled NumPy code.

    Raises
    ------
    ArgumentValueError
        If the backend cannot reach the arrays.
    BackendUnavailableError, ToolchainError
        If CUDA is asked for, or there, and cannot be used.
    """
    backend: str = options.backend
    if where is None:
        if backend == "auto":
            backend = Environment.read().backend
        if backend == "numpy" or (backend == "auto" and not is_usable()):
            return None
        where = require_device()
    elif backend == "numpy":
        raise ArgumentValueError("backend", "'numpy' for arrays in CUDA memory", "'auto' or 'cuda'")
    require_device()
    require_toolchain()
    return where


def _placed(name: str, spec: TensorSpec, call: CallProblem, device: int) -> TensorSpec:
    """How a tensor looks to the kernels of ``device``: as it is if they can take it."""
    storage = DTYPES[call.problem.storage]
    if name == "dout" and spec.dtype != storage.name:
        spec = replace(spec.contiguous(), dtype=storage.name, itemsize=storage.itemsize)
    if spec.device is None:
        return spec.on_device(device)
    tensor = tensors()[name]
    in_order = {
        "matrix": spec.rows_are_unit,
        "rows": True,
        "array": tensor.broadcast or spec.is_contiguous,
    }
    usable = spec.whole_elements and in_order[tensor.role]
    return spec if usable else spec.contiguous()


#: Tensors whose rows are queries, in a forward pass.
_OF_QUERIES = frozenset(("q", "out", "lse"))


def _of_group_rows(strides: tuple[int, ...], problem: AttentionProblem) -> tuple[int, ...]:
    """Strides, (batch, row, head), where the heads of a group are rows."""
    batch, _, head = strides
    return batch, head, head * problem.group_rows if problem.heads_kv > 1 else 0


def strides_of(name: str, spec: TensorSpec, layout: Layout) -> tuple[int, ...]:
    """What a launch is told, (batch, row, head); 0 of an axis of one element or of none.

    Of an array that broadcasts (batch, row, head, column). Kernels form
    addresses of rows that are not there, and read nothing from them. Of a
    sequence of one row they would lie wherever its stride says.
    """
    given = spec.strides or contiguous_strides(spec.shape)
    strides = tuple(
        0 if size == 1 else stride for size, stride in zip(spec.shape, given, strict=True)
    )
    tensor = tensors()[name]
    if tensor.role == "matrix":
        return layout.canonical(strides, 0)[:3]
    if tensor.role == "rows":
        return layout.canonical_rows(strides, 0)
    if tensor.has_own_axes:
        return 0, 0, 0
    axes = tensor.axes[len(tensor.axes) - len(strides) :]
    named = dict(zip(axes, strides, strict=True))
    rows = named.get("seqlen_q", named.get("q_blocks", 0))
    first = named.get("batch", 0), rows, named.get("heads_q", 0)
    columns = named.get("seqlen_kv", named.get("kv_blocks", 0))
    return (*first, columns) if tensor.broadcast else first
