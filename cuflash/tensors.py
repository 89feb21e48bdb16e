"""The table of tensors: every array of a call, its content, and the passes that use it.

Arrays of features come from the table of features. The fields of kernels' parameters are in
``cuda/parameters.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .arrays.spec import Layout
from .features.feature import Axis, DTypeRule, Feature
from .features.table import every_feature
from .planning.problem import ELEMENTS, AttentionProblem, ElementName, Operation

__all__ = [
    "QKV",
    "Role",
    "Tensor",
    "argument_of",
    "destinations",
    "differentiable",
    "dtypes_of",
    "made_by",
    "shape_of",
    "tensors",
]

#: A matrix has rows of head_dim or head_dim_v numbers, as q has. Rows hold one number for each row
#: of q. An array is that of a feature, which lists its axes.
Role = Literal["matrix", "rows", "array"]

#: The arrays that every call has.
QKV: tuple[Literal["q"], Literal["k"], Literal["v"]] = ("q", "k", "v")


@dataclass(frozen=True)
class Tensor:
    """A row of the table.

    Attributes
    ----------
    name
        Its name; an input argument has the same name.
    role, axes
        Its role, and the sizes of its axes: in the order "bshd" for a matrix, "bhs" for rows.
    dtypes
        The dtypes it may have; a new tensor has the first.
    reads
        Passes that take it as an input.
    written
        The pass that makes it, or None.
    optional
        Passes that may go without it: they do not read it, or do not make it.
    destination
        The argument that names its destination; empty if there is none.
    gradient_of
        The tensor whose gradient it is.
    shared, broadcast
        The leading axes that an array may lack, and whether it may broadcast: it may then lack any
        leading axes, have size 1 along any other axis, and have any strides.
    lengths, part_length
        For an array with one axis that is not an axis of the problem: the lengths it may have; and
        its length if it also holds the entry and the head of a larger call at which the arrays
        begin.
    most_axes
        For an array with axes of its own, of any sizes: their largest number.
    argument
        The argument that brings the array.
    """

    name: str
    role: Role
    axes: tuple[Axis, ...]
    dtypes: tuple[DTypeRule, ...]
    reads: tuple[Operation, ...] = ()
    written: Operation | None = None
    optional: tuple[Operation, ...] = ()
    destination: str = ""
    gradient_of: str | None = None
    shared: tuple[Axis, ...] = ()
    broadcast: bool = False
    lengths: tuple[int, ...] = ()
    part_length: int | None = None
    most_axes: int = 0
    argument: str = ""

    @property
    def has_own_axes(self) -> bool:
        """Whether its sizes are independent of the problem."""
        return bool(self.lengths) or self.most_axes > 0

    def fits(self, shape: tuple[int, ...], sizes: tuple[int, ...], entries: int = 0) -> bool:
        """Whether the shape of an array that broadcasts fits these sizes.

        With ``entries``, that many neighbouring batch entries share one entry of the array.
        """
        lacking = len(sizes) - len(shape)
        if entries and lacking == 0:
            return sizes[0] % (shape[0] * entries) == 0 and self.fits(shape[1:], sizes[1:])
        own = zip(shape, sizes[lacking:], strict=True) if lacking >= 0 else ()
        return lacking >= 0 and all(has in (1, size) for has, size in own)


_BOTH: tuple[Operation, ...] = ("forward", "backward")
_Q: tuple[Axis, ...] = ("batch", "seqlen_q", "heads_q", "head_dim")
_K: tuple[Axis, ...] = ("batch", "seqlen_kv", "heads_kv", "head_dim")
_V: tuple[Axis, ...] = ("batch", "seqlen_kv", "heads_kv", "head_dim_v")
_OUT: tuple[Axis, ...] = ("batch", "seqlen_q", "heads_q", "head_dim_v")
_ROWS: tuple[Axis, ...] = ("batch", "heads_q", "seqlen_q")


def _gradient(tensor: Tensor) -> Tensor:
    name = f"d{tensor.name}"
    return Tensor(
        name,
        tensor.role,
        tensor.axes,
        tensor.dtypes,
        written="backward",
        destination=name,
        gradient_of=tensor.name,
        shared=tensor.shared,
        broadcast=tensor.broadcast,
    )


_INPUTS = (
    Tensor("q", "matrix", _Q, ("storage",), _BOTH),
    Tensor("k", "matrix", _K, ("stored",), _BOTH),
    Tensor("v", "matrix", _V, ("stored",), _BOTH),
)
_BASE = (
    *_INPUTS,
    Tensor("out", "matrix", _OUT, ("output",), ("backward",), "forward", destination="out"),
    Tensor("lse", "rows", _ROWS, ("compute",), ("backward",), "forward", ("forward",), "lse_out"),
    Tensor("dout", "matrix", _OUT, ("storage", "output"), ("backward",)),
    Tensor("dlse", "rows", _ROWS, ("compute",), ("backward",), optional=("backward",)),
    *map(_gradient, _INPUTS),
)


def tensors() -> Mapping[str, Tensor]:
    """Every tensor by name."""
    return _tensors(*every_feature())


def destinations(operation: Operation) -> Mapping[str, str]:
    """The destination arguments of a pass, and the tensor of each."""
    return _destinations(operation, *every_feature())


@functools.cache
def _tensors(*features: Feature) -> Mapping[str, Tensor]:
    every = list(_BASE)
    for feature in features:
        for name, rule in feature.arrays.items():
            array = Tensor(
                name,
                "array",
                rule.axes,
                rule.dtypes,
                _BOTH,
                optional=_BOTH,
                shared=rule.shared,
                broadcast=rule.broadcast,
                lengths=rule.lengths,
                part_length=rule.part_length,
                most_axes=rule.most_axes,
                argument=rule.argument,
            )
            every += [array, *([_gradient(array)] if rule.differentiable else [])]
    return {tensor.name: tensor for tensor in every}


@functools.cache
def _destinations(operation: Operation, *features: Feature) -> Mapping[str, str]:
    table = _tensors(*features).values()
    return {t.destination: t.name for t in table if t.written == operation}


def argument_of(name: str) -> str:
    """The argument that holds an array of this name."""
    tensor = tensors().get(name)
    return tensor.argument or name if tensor is not None else name


def made_by(operation: Operation, wrt: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the results of a pass; for the backward pass the gradients in the given order."""
    if operation == "backward":
        return tuple(f"d{name}" for name in wrt)
    return tuple(name for name, t in tensors().items() if t.written == operation)


def differentiable() -> tuple[str, ...]:
    """Names that ``wrt`` may hold, in the order of the table."""
    return tuple(t.gradient_of for t in tensors().values() if t.gradient_of is not None)


def shape_of(
    tensor: Tensor,
    problem: AttentionProblem,
    layout: Layout,
    given: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[int, ...]:
    """The shape that the problem gives a tensor, in the layout of the call.

    Parameters
    ----------
    given
        Shapes of all given tensors, by name: an array may lack its shared axes, or broadcast, and
        its gradient then has the same shape.
    entries
        For broadcast arrays, as in :class:`~cuflash.options.Options`.
    """
    sizes: list[int] = [getattr(problem, axis) for axis in tensor.axes]
    if tensor.role == "array" and "batch" in tensor.axes:
        sizes[tensor.axes.index("batch")] = problem.num_entries
    if tensor.role == "matrix":
        return layout.shape(*problem.shapes[tensor.name])
    if tensor.role == "rows":
        batch, heads, seqlen = sizes
        return layout.rows_shape(batch, heads, seqlen)
    if tensor.lengths:
        found = given.get(tensor.name)
        fitting = (found == (length,) for length in (*tensor.lengths, tensor.part_length))
        return found if found is not None and any(fitting) else (tensor.lengths[0],)
    source = given.get(tensor.gradient_of or tensor.name, tuple(sizes))
    if tensor.most_axes:
        sizes_fit = 0 not in source or not problem.has_pairs
        return source if 0 < len(source) <= tensor.most_axes and sizes_fit else (1,)
    if tensor.broadcast:
        of_array, of_gradient = (entries or {}).get(tensor.gradient_of or tensor.name, (0, 0))
        if not tensor.fits(source, tuple(sizes), of_array):
            return tuple(sizes)
        own = of_array and tensor.gradient_of
        return (problem.batch // of_gradient, *source[1:]) if own else source
    lacking = len(sizes) - len(source)
    return tuple(sizes[lacking if 0 < lacking <= len(tensor.shared) else 0 :])


def dtypes_of(
    tensor: Tensor, problem: AttentionProblem, given: Mapping[str, str]
) -> tuple[ElementName, ...]:
    """Dtypes that a tensor of the problem may have; a gradient has the dtype of its array.

    Parameters
    ----------
    given
        Dtypes of all given tensors, by name.
    """
    allowed = dict.fromkeys(
        ELEMENTS[rule].name if rule in ELEMENTS else getattr(problem, rule)
        for rule in tensor.dtypes
    )
    source = given.get(tensor.gradient_of or "")
    return tuple(name for name in allowed if source in (None, name))
