"""What a traced call computes, in the words of the rest of the library; knows nothing of JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ..arrays.spec import TensorSpec, contiguous_strides
from ..checks import describe
from ..errors import ArgumentTypeError, ArgumentValueError
from ..options import AlgorithmChoice, Options, check_dtype, check_flag, check_options
from ..planning.problem import DTypeName, Operation

__all__ = ["Call", "call_of", "check_arrays", "folded", "renamed"]

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
_NAMES = {"q": "query", "k": "key", "v": "value", "out_dtype": "residual_dtype"}


@dataclass(frozen=True)
class Call:
    """One pass without its arrays: hashable, for it is a key of JAX's caches.

    Attributes
    ----------
    operation
        "forward" or "backward".
    options
        The checked keywords.
    residual
        The dtype of the output that is kept for the backward pass; None for query's.
    """

    operation: Operation
    options: Options
    residual: DTypeName | None = None

    @property
    def saving(self) -> Call:
        """The same pass where a backward pass follows it."""
        return replace(self, options=replace(self.options, out_dtype=self.residual))

    @property
    def backward(self) -> Call:
        """The pass that pulls gradients back through this one."""
        return replace(self.saving, operation="backward")

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results."""
        return _RESULTS[self.operation]

    def named(self, arrays: Sequence[_Item]) -> dict[str, _Item]:
        """The arguments of the pass by name; dlse, the last, may be absent."""
        return dict(zip(_ARGUMENTS[self.operation], arrays, strict=False))

    def mapped(self, arrays: Sequence[Any]) -> int:
        """How many axes of :func:`jax.vmap` stand before the batch, in every array."""
        return len(self.named(arrays)["q"].shape) - len(self.options.layout or "bshd")

    def specs(self, arrays: Sequence[Any]) -> dict[str, TensorSpec]:
        """Descriptions of its arguments by name, C-contiguous: the layout JAX asks XLA for.

        The mapped axes are part of the batch.
        """
        mapped = self.mapped(arrays)
        return {
            name: _spec_of(folded(array.shape, mapped), array.dtype)
            for name, array in self.named(arrays).items()
        }

    def results_of(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every result, with the mapped axes that the arguments have.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the arrays are of no such call.
        """
        described = describe(self.operation, self.specs(arrays), self.options)
        mapped = self.mapped(arrays)
        batch = tuple(arrays[0].shape[: mapped + 1])
        shapes = [described.shapes[name] for name in self.results]
        shapes = [(*batch, *shape[1:]) if mapped else shape for shape in shapes]
        kinds = [described.dtypes[name] for name in self.results]
        return list(zip(shapes, kinds, strict=True))


def folded(shape: Sequence[int], mapped: int) -> tuple[int, ...]:
    """A shape with the mapped axes made part of the batch."""
    return (math.prod(shape[: mapped + 1]), *shape[mapped + 1 :]) if mapped else tuple(shape)


def _spec_of(shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    dtype = np.dtype(dtype)
    return TensorSpec(shape, dtype.name, contiguous_strides(shape), dtype.itemsize)


def call_of(
    is_causal: Any,
    scale: Any,
    q_offset: Any,
    algorithm: AlgorithmChoice,
    deterministic_gradients: Any,
    residual_dtype: Any,
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
        deterministic=check_flag("deterministic_gradients", deterministic_gradients),
        layout="bshd",
    )
    return Call("forward", checked, check_dtype("residual_dtype", residual_dtype))


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
        replace(call, options=replace(call.options, layout=layout)).saving.results_of(arrays)
    except (ArgumentTypeError, ArgumentValueError) as error:
        argument, got, expected = map(renamed, (error.argument, error.got, error.expected))
        raise type(error)(argument, got, expected) from error


def renamed(text: str) -> str:
    """A text with the arguments named as they are here."""
    return re.sub(r"\b([qkv]|out_dtype)\b", lambda found: _NAMES[found[0]], text)
