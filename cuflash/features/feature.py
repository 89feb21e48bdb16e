"""The host's description of a feature."""

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
#: A dtype rule: that of q, of k and v, of the output, or of the softmax; or a fixed dtype.
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
        The dtypes it may have.
    differentiable
        Whether ``wrt`` may name it; its gradient is then named ``d`` plus its name, with the same
        shape and dtype.
    shared
        Leading axes that an array may lack; it is then the same along them.
    broadcast
        Whether it may lack any leading axes, and have size 1 along any other. Its elements may then
        have any strides.
    lengths
        For an array with one axis that is not an axis of the problem: the lengths it may have; a
        new array has the first.
    part_length
        The length of an array that also holds the entry and the head of a larger call at which the
        arrays begin; no public function uses this.
    most_axes
        For an array with axes of its own, of any sizes: their largest number.
    argument
        The argument of which it is a part; empty if it is an argument itself.
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
        """The axis that counts batch entries; None if they share the array."""
        return self.axes.index("batch") if "batch" in self.axes else None

    @property
    def heads_axis(self) -> int | None:
        """The axis that counts heads; None if they share the array."""
        found = [i for i, axis in enumerate(self.axes) if axis in ("heads_q", "heads_kv")]
        return found[0] if found else None


@dataclass(frozen=True)
class Request:
    """A call's request to a feature.

    Attributes
    ----------
    problem
        What is known so far: the bounds of the keys, and the earlier features.
    keywords
        The feature's own keywords, checked; absent ones are left out.
    operands
        Its given arrays, checked against their rules.
    position
        The position of query 0 among the keys, whatever the mask.
    draws
        For dropout: the numbers of batch entries and of query heads after which draws repeat; None
        for those of the problem.
    places
        The same for the entries and heads that a score function sees.
    bottom_right
        Whether the position is the default, with the last query at the last key.
    """

    problem: AttentionProblem
    keywords: Mapping[str, Any] = field(default_factory=dict)
    operands: Mapping[str, Operand] = field(default_factory=dict)
    position: int = 0
    draws: tuple[int, int] | None = None
    places: tuple[int, int] | None = None
    bottom_right: bool = False


@dataclass(frozen=True, eq=False)  # compared by identity: tables are cached by their rows
class Feature:
    """A row of the table of features.

    Attributes
    ----------
    name
        Its name in uses, kernels and refusals.
    use
        Its addition to the problem of a call; None if the call does not use it.
    device
        How it enters kernels.
    keywords
        Checks of its keywords that are not arrays: each takes the name and a value other than None,
        and returns the value or raises.
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
        """The names of its arguments; one that may be a number or an array appears once."""
        arrays = (rule.argument or name for name, rule in self.arrays.items())
        return tuple(dict.fromkeys((*self.keywords, *arrays)))
