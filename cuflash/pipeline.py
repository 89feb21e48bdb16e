"""From the descriptions of a call's arrays to everything that is decided about it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .arrays.spec import Layout, TensorSpec, contiguous_strides
from .checks import Described, describe
from .config import Environment
from .cuda.available import is_usable, require_device
from .cuda.compile import require_toolchain
from .cuda.launch import PreparedPlan
from .errors import ArgumentValueError
from .options import Options
from .planning.device import DeviceLimits, HostLimits
from .planning.fa3 import needs_newer_compiler
from .planning.plan import Plan, plan
from .planning.problem import DTYPES, Alignment, Operation

__all__ = [
    "DESTINATIONS",
    "ROWS",
    "TARGETS",
    "Pipeline",
    "choose_device",
    "forget_decisions",
    "pipeline_of",
]

#: Arguments that name destinations, and which tensor each of them is.
DESTINATIONS = {"out": "out", "lse_out": "lse", "dq": "dq", "dk": "dk", "dv": "dv"}
#: Those of each pass: what is an input of the one may be a destination of the other.
TARGETS: dict[Operation, tuple[str, ...]] = {
    "forward": ("out", "lse_out"),
    "backward": ("dq", "dk", "dv"),
}
#: Tensors of one number a row.
ROWS = ("lse", "dlse")
_RESULTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("out", "lse"),
    "backward": ("dq", "dk", "dv"),
}


@dataclass(frozen=True)
class Pipeline:
    """Everything decided about the calls of one signature.

    Attributes
    ----------
    described
        The problem and the shape and dtype of every tensor.
    plan
        What runs.
    device
        The CUDA device that computes; None for the tiled NumPy code.
    tensors
        Every tensor as it is, or will be made, where the caller's arrays are.
    placed
        The same as the computation sees them: what differs is copied.
    """

    described: Described
    plan: Plan
    device: int | None
    tensors: Mapping[str, TensorSpec]
    placed: Mapping[str, TensorSpec]

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the tensors that cannot be used where they are."""
        return tuple(name for name, spec in self.tensors.items() if self.placed[name] != spec)

    @functools.cached_property
    def launcher(self) -> PreparedPlan:
        """The compiled kernels of a CUDA pipeline, for as long as it is kept."""
        layout = self.described.layout
        strides = {name: _strides(name, spec, layout) for name, spec in self.placed.items()}
        return PreparedPlan(self.plan, strides, self.device or 0)


def pipeline_of(
    operation: Operation,
    given: tuple[tuple[str, TensorSpec], ...],
    options: Options,
    device: int | None,
    want_lse: bool = True,
) -> Pipeline:
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
) -> Pipeline:
    described = describe(operation, dict(given), options)
    # `out` is an input of the backward pass, a destination of the forward one.
    tensors = {DESTINATIONS.get(name, name): spec for name, spec in given}
    where = tensors["q"].device
    for name in _RESULTS[operation]:
        if name not in tensors and (name != "lse" or want_lse):
            tensors[name] = _fresh(name, described, where)
    placed = {
        name: spec if device is None else _placed(name, spec, described, device)
        for name, spec in tensors.items()
    }
    matrices = [spec for name, spec in placed.items() if name not in ROWS]
    alignment = "element" if device is None else _alignment(matrices)
    problem = replace(described.problem, alignment=alignment)
    limits = host or DeviceLimits.query(device or 0)
    chosen = plan(problem, limits, algorithm=options.algorithm, blocks=options.blocks)
    anything = options.algorithm == "auto" and options.blocks is None
    if isinstance(limits, DeviceLimits) and anything:
        remedy = needs_newer_compiler(problem, limits)
        if remedy is not None:
            said = f"running {chosen.algorithm}: fa3 {remedy}"
            warnings.warn(said, stacklevel=_frames_inside())
    return Pipeline(replace(described, problem=problem), chosen, device, tensors, placed)


def forget_decisions() -> None:
    """Decide about every signature anew, in the environment as it then is."""
    _decide.cache_clear()


def _frames_inside() -> int:
    """The ``stacklevel``, in the function that asks, of who called the package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    return level


def _alignment(matrices: Sequence[TensorSpec]) -> Alignment:
    if all(spec.mappable for spec in matrices):
        return "tensor_map"
    return "vector" if all(spec.aligned for spec in matrices) else "element"


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


def _fresh(name: str, described: Described, where: int | None) -> TensorSpec:
    shape, dtype = described.shapes[name], described.dtypes[name]
    return TensorSpec(shape, dtype, contiguous_strides(shape), DTYPES[dtype].itemsize, where)


def _placed(name: str, spec: TensorSpec, described: Described, device: int) -> TensorSpec:
    """How a tensor looks to the kernels of ``device``: as it is if they can take it."""
    storage = DTYPES[described.problem.storage]
    if name == "dout" and spec.dtype != storage.name:
        spec = replace(spec.contiguous(), dtype=storage.name, itemsize=storage.itemsize)
    if spec.device is None:
        return spec.on_device(device)
    usable = spec.whole_elements and (name in ROWS or spec.rows_are_unit)
    return spec if usable else spec.contiguous()


def _strides(name: str, spec: TensorSpec, layout: Layout) -> tuple[int, int, int]:
    """What a launch is told; 0 of an axis of one element.

    Kernels form addresses of rows that are not there, and read nothing from
    them. Of a sequence of one row they would lie wherever its stride says.
    """
    given = spec.strides or contiguous_strides(spec.shape)
    strides = tuple(
        0 if size == 1 else stride for size, stride in zip(spec.shape, given, strict=True)
    )
    if name in ROWS:
        return layout.canonical_rows(strides, 0)
    return layout.canonical(strides, 0)[:3]
