"""What the host has to know of a feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..planning.problem import AttentionProblem
from .device import DevicePart
from .use import Operand, Use

__all__ = ["ArrayRule", "Axis", "DTypeRule", "Feature", "Request"]

#: An axis of an array, by the field of the problem that holds its size.
Axis = Literal[
    "batch",
    "heads_q",
    "heads_kv",
    "seqlen_q",
    "seqlen_kv",
    "head_dim",
    "head_dim_v",
    "q_blocks",
    "kv_blocks",
]
#: A dtype of the problem: of q, of k and v, of the output, or of the softmax; or one whatever they
#: are.
DTypeRule = Literal[
    "storage", "stored", "output", "compute",
    "float16", "bfloat16", "float32", "float64", "bool", "int32", "int64", "uint8", "uint32",
]  # fmt: skip


@dataclass(frozen=True)
class ArrayRule:
    """An array argument of a feature; the forward and the backward pass take it.

    Attributes
    ----------
    axes
        Sizes of its axes, in order. "batch" and "heads_q" or "heads_kv" also
        say which axes may be divided over devices and mapped by ``vmap``.
    dtypes
        Those that it may have.
    differentiable
        Whether ``wrt`` may name it; its gradient is then ``d`` and its name,
        of the same shape and dtype.
    shared
        Axes that an array may lack, from the first on: it then holds the same
        for all of them.
    broadcast
        Whether it may lack any axes, from the first on, and have 1 in place of
        the size of any other. Its elements may then lie at any strides.
    lengths
        Of an array with one axis that is none of the problem: how many
        elements it may have, the first of a new one.
    part_length
        How many where it also says at which part of a larger call the arrays
        begin, which no public function asks for.
    most_axes
        Of an array with axes of its own, of any sizes: how many it may have.
    argument
        The argument that it is a part of; empty: it is one itself.
    """

    axes: tuple[Axis, ...]
    dtypes: tuple[DTypeRule, ...]
    differentiable: bool = False
    shared: tuple[Axis, ...] = ()
    broadcast: bool = False
    lengths: tuple[int, ...] = ()
    part_length: int | None = None
    most_axes: int = 0
    argument: str = ""

    @property
    def batch_axis(self) -> int | None:
        """Which axis counts batch entries; None if they share the array."""
        return self.axes.index("batch") if "batch" in self.axes else None

    @property
    def heads_axis(self) -> int | None:
        """Which axis counts heads; None if they share the array."""
        found = [i for i, axis in enumerate(self.axes) if axis in ("heads_q", "heads_kv")]
        return found[0] if found else None


@dataclass(frozen=True)
class Request:
    """What a call asks of a feature.

    Attributes
    ----------
    problem
        Everything that is known so far: the bounds of the keys, and the features before this one.
    keywords
        The feature's own, checked; those that were not given are absent.
    operands
        Its arrays that were given, checked against their rules.
    position
        Of query 0 among the keys, whatever the mask.
    draws
        Of dropout: after how many entries of the batch, and after how many
        query heads, draws repeat; None for those of the problem.
    places
        The same of the entries and heads that a function of scores is given.
    bottom_right
        Whether the position is where the last query stands at the last key, and not asked for.
    """

    problem: AttentionProblem
    keywords: Mapping[str, Any] = field(default_factory=dict)
    operands: Mapping[str, Operand] = field(default_factory=dict)
    position: int = 0
    draws: tuple[int, int] | None = None
    places: tuple[int, int] | None = None
    bottom_right: bool = False


@dataclass(frozen=True, eq=False)  # a row is itself: tables are kept by their rows
class Feature:
    """A row of the table of features.

    Attributes
    ----------
    name
        By which uses, kernels and refusals name it.
    use
        What it adds to the problem of a call; None if this call does not use it.
    device
        How it enters kernels.
    keywords
        Checks of its keywords that are not arrays: each takes the name and the
        value, which is not None, and returns the value or raises.
    arrays
        Rules of its array arguments.
    """

    name: str
    use: Callable[[Request], Use | None]
    device: DevicePart | None = None
    keywords: Mapping[str, Callable[[str, Any], Any]] = field(default_factory=dict)
    arrays: Mapping[str, ArrayRule] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of its arguments: of one that is a number or an array, once."""
        arrays = (rule.argument or name for name, rule in self.arrays.items())
        return tuple(dict.fromkeys((*self.keywords, *arrays)))
