"""Turns the arguments of a call into a problem, or raises an error that says what is wrong.

It works on descriptions only: it reads no array and touches no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .arrays.spec import LAYOUTS, Layout, TensorSpec, contiguous_strides, default_layout
from .errors import ArgumentTypeError, ArgumentValueError
from .features.cached_keys import pages_of, shape_of_entries
from .features.float8 import is_float8
from .features.packed_lengths import sequences_of
from .features.table import with_features
from .features.use import Operand
from .features.window import bounds_of, mask_of
from .options import Options, names_of
from .planning.problem import (
    DTYPES,
    ELEMENTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_SEQLEN,
    AttentionProblem,
    DType,
    DTypeName,
    ElementName,
    Operation,
)
from .tensors import QKV, argument_of, destinations, dtypes_of, shape_of, tensors

__all__ = ["CallProblem", "describe"]


@dataclass(frozen=True)
class CallProblem:
    """The problem of a call, and the layout of its arrays."""

    problem: AttentionProblem
    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor the call may have, in the layout
    allowed: Mapping[str, tuple[ElementName, ...]]  # dtypes of each; a new tensor has the first

    @property
    def dtypes(self) -> Mapping[str, ElementName]:
        """The dtype of every tensor that the call makes."""
        return {name: allowed[0] for name, allowed in self.allowed.items()}

    def fresh(self, name: str, device: int | None) -> TensorSpec:
        """A new C-contiguous tensor of the call, on a CUDA device or in host memory."""
        shape, dtype = self.shapes[name], self.allowed[name][0]
        return TensorSpec(shape, dtype, contiguous_strides(shape), ELEMENTS[dtype].itemsize, device)


class _Sizes(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int


def describe(
    operation: Operation, specs: Mapping[str, TensorSpec], options: Options
) -> CallProblem:
    """The problem of a call, from its tensors and keywords.

    Parameters
    ----------
    operation
        "forward" or "backward".
    specs
        Descriptions of the given arrays by argument name; at least q, k and v.
    options
        The checked keywords.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, its value and what is needed.
    """
    layout = _find_layout(specs["q"], options)
    float8 = is_float8(specs, dict(options.more))
    _check_dtypes(specs, float8)
    _check_devices(specs)
    plain = _problem(operation, _sizes(specs, layout), specs, options)
    plain = replace(plain, sequences=sequences_of(specs, layout.name), float8=float8)
    plain = replace(plain, pages=pages_of(specs))
    entries = dict(options.entries)
    call = _call_problem(plain, layout, specs, entries)
    for name, spec in specs.items():
        _check_tensor(name, spec, call)
    _check_wrt(operation, specs, options)
    operands = {
        name: Operand(name, spec.dtype, spec.shape, entries.get(name))
        for name, spec in specs.items()
    }
    position = plain.seqlen_kv - plain.seqlen_q if options.q_offset is None else options.q_offset
    shared = options.draws, options.places, options.q_offset is None
    problem = with_features(plain, dict(options.more), operands, position, *shared)
    return replace(call, problem=problem)


def _call_problem(
    problem: AttentionProblem,
    layout: Layout,
    specs: Mapping[str, TensorSpec],
    entries: Mapping[str, tuple[int, int]],
) -> CallProblem:
    given = {name: spec.dtype for name, spec in specs.items()}
    shapes = {name: spec.shape for name, spec in specs.items()}
    every = tensors()
    return CallProblem(
        problem,
        layout,
        {
            name: shape_of(tensor, problem, layout, shapes, entries)
            for name, tensor in every.items()
        },
        {name: dtypes_of(tensor, problem, given) for name, tensor in every.items()},
    )


def _check_wrt(operation: Operation, specs: Mapping[str, TensorSpec], options: Options) -> None:
    if operation == "backward":
        for name in options.wrt:
            if name not in specs:
                raise ArgumentValueError("wrt", f"{name!r} and no {name}", f"{name} as an argument")


def _find_layout(q: TensorSpec, options: Options) -> Layout:
    ndim = len(q.shape)
    if options.layout is None:
        layout = default_layout(ndim)
        if layout is not None:
            return layout
        if ndim == 3:
            raise ArgumentValueError(
                "layout", "None for arrays of 3 axes", "layout='shd' or layout='hsd'"
            )
        raise ArgumentValueError("q", f"{ndim} axes {q.shape}", "4, 3 or 2 axes")
    layout = LAYOUTS[options.layout]
    if len(layout.name) != ndim:
        expected = f"{len(layout.name)} axes, as layout={layout.name!r} says"
        raise ArgumentValueError("q", f"{ndim} axes {q.shape}", expected)
    return layout


def _check_dtypes(specs: Mapping[str, TensorSpec], float8: bool) -> None:
    stored, whose = ("uint8", "float8") if float8 else (specs["q"].dtype, "q")
    for name, spec in specs.items():
        own = (float8 and name in ("k", "v")) or _has_own_dtypes(name)
        if spec.dtype not in DTYPES and not own:
            expected = f"one of {names_of(DTYPES)}"
            raise ArgumentTypeError(argument_of(name), f"dtype {spec.dtype}", expected)
    for name in ("k", "v"):
        if (found := specs[name].dtype) != stored:
            raise ArgumentTypeError(name, f"dtype {found}", f"{stored}, as {whose} has")


def _has_own_dtypes(name: str) -> bool:
    """Whether the dtypes of a tensor do not depend on that of q."""
    tensor = tensors().get(name)
    return tensor is not None and all(rule in ELEMENTS for rule in tensor.dtypes)


def _check_devices(specs: Mapping[str, TensorSpec]) -> None:
    def place(spec: TensorSpec) -> str:
        return "host memory" if spec.device is None else f"CUDA device {spec.device}"

    for name, spec in specs.items():
        if spec.device != specs["q"].device:
            expected = f"{place(specs['q'])}, where q is"
            raise ArgumentValueError(argument_of(name), f"an array in {place(spec)}", expected)


def _sizes(specs: Mapping[str, TensorSpec], layout: Layout) -> _Sizes:
    """Sizes of every axis; checks k and v against q and each other, axis by axis."""
    shapes = {}
    for name in ("q", "k", "v"):
        shape = shape_of_entries(name, specs)
        if len(shape) != len(layout.name):
            raise ArgumentValueError(
                name, f"{len(shape)} axes {shape}", f"{len(layout.name)} axes, as q has"
            )
        shapes[name] = layout.canonical(shape, 1)
    (batch, seqlen_q, heads_q, head_dim) = shapes["q"]
    (k_batch, seqlen_kv, heads_kv, k_dim) = shapes["k"]
    (v_batch, v_seqlen, v_heads, head_dim_v) = shapes["v"]
    for name, axis, got, expected, other in (
        ("k", "batch", k_batch, batch, "q"),
        ("v", "batch", v_batch, batch, "q"),
        ("k", "head_dim", k_dim, head_dim, "q"),
        ("v", "seqlen_kv", v_seqlen, seqlen_kv, "k"),
        ("v", "heads_kv", v_heads, heads_kv, "k"),
    ):
        if got != expected:
            raise ArgumentValueError(name, f"{axis} {got}", f"{expected}, as {other} has")
    sizes = _Sizes(batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v)
    _check_ranges(sizes)
    return sizes


def _check_ranges(sizes: _Sizes) -> None:
    for name, dim in (("q", sizes.head_dim), ("v", sizes.head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ArgumentValueError(name, f"head_dim {dim}", f"1 to {MAX_HEAD_DIM}")
    for name, seqlen in (("q", sizes.seqlen_q), ("k", sizes.seqlen_kv)):
        if seqlen > MAX_SEQLEN:
            raise ArgumentValueError(name, f"a sequence of {seqlen}", f"at most {MAX_SEQLEN}")
    heads_q, heads_kv = sizes.heads_q, sizes.heads_kv
    if sizes.batch * heads_q > MAX_HEADS:
        raise ArgumentValueError(
            "q", f"batch {sizes.batch} of {heads_q} heads", f"at most {MAX_HEADS} heads in all"
        )
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ArgumentValueError(
            "k", f"{heads_kv} heads beside {heads_q} of q", "a number that divides q's heads"
        )


def _output_dtype(specs: Mapping[str, TensorSpec], options: Options) -> DTypeName:
    """The requested dtype, else that of the destination, else that of q."""
    storage = DTYPES[specs["q"].dtype]
    argument = "out" if options.out_dtype is None else "out_dtype"
    output = options.out_dtype or DTYPES[specs.get("out", specs["q"]).dtype].name
    allowed = (storage.name, "float32") if storage.itemsize == 2 else (storage.name,)
    if output not in allowed:
        raise ArgumentTypeError(
            argument, f"{output} for {storage.name} inputs", " or ".join(allowed)
        )
    return output


def _check_scale(scale: float | None, storage: DType) -> None:
    least, most = storage.scales
    if scale is not None and not least <= scale <= most:
        raise ArgumentValueError(
            "scale", repr(scale), f"{least:.3g} to {most:.3g} for {storage.name} inputs"
        )


def _problem(
    operation: Operation,
    sizes: _Sizes,
    specs: Mapping[str, TensorSpec],
    options: Options,
) -> AttentionProblem:
    _check_scale(options.scale, DTYPES[specs["q"].dtype])
    seqlen_q, seqlen_kv = sizes.seqlen_q, sizes.seqlen_kv
    window = options.keyword("window_size")
    most = options.keyword("most_queries") or 0
    bounds = bounds_of(seqlen_q, seqlen_kv, options.causal, options.q_offset, window, most > 0)
    return AttentionProblem(
        operation=operation,
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        heads_kv=sizes.heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        storage=DTYPES[specs["q"].dtype].name,
        output=_output_dtype(specs, options),
        mask=mask_of(bounds),
        scale=options.scale or 1.0 / math.sqrt(sizes.head_dim),
        q_offset=bounds[1] or 0,
        q_first=bounds[0] or 0,
        deterministic=options.deterministic,
        block=options.keyword("block_mask") or (0, 0),
        most_queries=most,
        wrt=QKV if operation == "forward" else tuple(n for n in tensors() if n in options.wrt),
    )


def _check_tensor(name: str, spec: TensorSpec, call: CallProblem) -> None:
    """Check the shape and dtype of one tensor against the problem."""
    tensor = tensors()[destinations(call.problem.operation).get(name, name)]
    shape = call.shapes[tensor.name]
    if spec.shape != shape:
        axes = f"layout {call.layout.name!r}"
        if tensor.role == "array":
            axes = ", ".join(tensor.axes)
            axes += "".join(f", {axis} may be left out" for axis in tensor.shared)
            axes += ", each may be 1, the first ones may be left out" * tensor.broadcast
        fitting = " or ".join(f"({n},)" for n in tensor.lengths) or f"{shape} ({axes})"
        if tensor.most_axes:
            most = "one axis" if tensor.most_axes == 1 else f"1 to {tensor.most_axes} axes"
            fitting = f"arrays of {most}, none of them empty"
        raise ArgumentValueError(argument_of(name), f"shape {spec.shape}", fitting)
    allowed = call.allowed[tensor.name]
    if spec.dtype not in allowed:
        expected = " or ".join(sorted(allowed))
        raise ArgumentTypeError(argument_of(name), f"dtype {spec.dtype}", expected)
