"""What a traced call computes, in the words of the rest of the library; knows nothing of JAX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ..arrays.spec import TensorSpec, contiguous_strides
from ..checks import describe
from ..errors import ArgumentTypeError, ArgumentValueError
from ..options import AlgorithmChoice, Options, check_flag, check_options
from ..planning.problem import Operation

__all__ = ["Call", "call_of", "check_arrays", "spec_of"]

_Item = TypeVar("_Item")

_ARGUMENTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse", "dlse"),
}
_RESULTS: dict[Operation, tuple[str, ...]] = {
    "forward": ("out", "lse"),
    "backward": ("dq", "dk", "dv"),
}
#: Names of the arguments here, by those that the rest of the library gives them.
_NAMES = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Call:
    """One pass without its arrays: hashable, for it is a key of JAX's caches.

    Attributes
    ----------
    operation
        "forward" or "backward".
    options
        The checked keywords.
    """

    operation: Operation
    options: Options

    @property
    def backward(self) -> Call:
        """The pass that pulls gradients back through this one."""
        return Call("backward", self.options)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results."""
        return _RESULTS[self.operation]

    def named(self, arrays: Sequence[_Item]) -> dict[str, _Item]:
        """The arguments of the pass by name; dlse, the last, may be absent."""
        return dict(zip(_ARGUMENTS[self.operation], arrays, strict=False))

    def specs(self, arrays: Sequence[Any]) -> dict[str, TensorSpec]:
        """Descriptions of its arguments by name, C-contiguous: the layout JAX asks XLA for."""
        return {name: spec_of(array) for name, array in self.named(arrays).items()}

    def results_of(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every result.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the arrays are of no such call.
        """
        described = describe(self.operation, self.specs(arrays), self.options)
        return [(described.shapes[name], described.dtypes[name]) for name in self.results]


def spec_of(array: Any) -> TensorSpec:
    """The description of anything with a shape and a dtype, as a C-contiguous array."""
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    return TensorSpec(shape, dtype.name, contiguous_strides(shape), dtype.itemsize)


def call_of(
    is_causal: Any, scale: Any, q_offset: Any, algorithm: AlgorithmChoice, deterministic: Any
) -> Call:
    """The forward pass that the keywords ask for.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the keyword.
    """
    checked = check_options(
        causal=check_flag("is_causal", is_causal),
        scale=scale,
        q_offset=q_offset,
        algorithm=algorithm,
        deterministic=deterministic,
        layout="bshd",
    )
    return Call("forward", checked)


def check_arrays(arrays: Sequence[Any], call: Call) -> None:
    """Hold query, key and value against each other and the keywords.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument as it is named here.
    """
    shape = tuple(arrays[0].shape)
    if len(shape) not in (3, 4):
        expected = "(batch, seqlen, heads, head_dim) or (seqlen, heads, head_dim)"
        raise ArgumentValueError("query", f"{len(shape)} axes {shape}", expected)
    layout = "shd" if len(shape) == 3 else "bshd"
    try:
        replace(call, options=replace(call.options, layout=layout)).results_of(arrays)
    except (ArgumentTypeError, ArgumentValueError) as error:
        argument, got, expected = map(_renamed, (error.argument, error.got, error.expected))
        raise type(error)(argument, got, expected) from error


def _renamed(text: str) -> str:
    return re.sub(r"\b[qkv]\b", lambda found: _NAMES[found[0]], text)
