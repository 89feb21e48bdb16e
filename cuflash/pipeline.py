"""Decides everything about a call from the descriptions of its arrays."""

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
    """The plan of all calls of one signature, with the tensors that go in and out.

    Attributes
    ----------
    call
        The problem, and the shape and dtype of every tensor.
    plan
        The plan that runs.
    device
        The CUDA device that computes; None for the tiled NumPy code.
    tensors
        Every tensor where the caller's arrays are, or where it will be made.
    placed
        The same tensors as the kernels see them; tensors that differ are copied. On CUDA the
        gradients in ``scratch`` follow.
    scratch
        Gradients that the kernels write although the caller did not ask for them, and the offset of
        each in the workspace, in bytes.
    """

    call: CallProblem
    plan: Plan
    device: int | None
    tensors: Mapping[str, TensorSpec]
    placed: Mapping[str, TensorSpec]
    scratch: Mapping[str, int]

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Device memory beside the tensors: the plan's workspace, then the scratch."""
        ends = [at + self.placed[name].nbytes for name, at in self.scratch.items()]
        return max([self.plan.workspace_bytes, *ends])

    @property
    def eager_bytes(self) -> int:
        """Device memory besides the tensors while no CUDA graph is being captured."""
        return self.workspace_bytes if self.scratch else self.plan.eager_bytes

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the tensors that the kernels cannot use in place."""
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
        Name and description of every array of the call.
    options
        The checked keywords.
    device
        The CUDA device that computes; None for the tiled NumPy code.
    want_lse
        Whether the forward pass writes the log-sum-exp.
    """
    # The limits of a device never change; those of the host depend on the environment.
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
    # `out` is an input of the backward pass and a destination of the forward pass.
    argument_of = destinations(operation)
    seen = {argument_of.get(name, name): spec for name, spec in given}
    where = seen["q"].device
    for name in made_by(operation, options.wrt):
        if name not in seen and (name != "lse" or want_lse):
            seen[name] = call.fresh(name, where)
    placed = dict(seen)
    if device is not None:
        placed = {name: _placed(name, spec, call, device) for name, spec in seen.items()}
        if operation == "backward":  # its kernels always write the gradients of q, k and v
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
    """The plan; warns if a newer compiler would allow a better one."""
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
    """Forget every decision, so that the next calls decide in the environment of that time."""
    _decide.cache_clear()


def _frames_inside() -> int:
    """The ``stacklevel``, for the calling function, of the code that called the package."""
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
    """A use whose arrays say whether the copy engine can read them in place."""
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
        If CUDA is requested, or present, and unusable.
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
    """A tensor as the kernels of ``device`` see it: unchanged if they can read it."""
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


#: Tensors whose rows are queries, in the forward pass.
_OF_QUERIES = frozenset(("q", "out", "lse"))


def _of_group_rows(strides: tuple[int, ...], problem: AttentionProblem) -> tuple[int, ...]:
    """Strides (batch, row, head) of a packed group, whose heads are rows."""
    batch, _, head = strides
    return batch, head, head * problem.group_rows if problem.heads_kv > 1 else 0


def strides_of(name: str, spec: TensorSpec, layout: Layout) -> tuple[int, ...]:
    """The strides that a launch passes, (batch, row, head); 0 for an axis of at most one element.

    For a broadcast array they are (batch, row, head, column). Kernels compute addresses of rows
    beyond the end and read nothing there. The stride of a sequence of one row may be anything, so
    it is replaced by 0.
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
