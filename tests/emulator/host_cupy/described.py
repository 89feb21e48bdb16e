"""The tensors that the parameters of a launch describe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cuflash.cuda.parameters import PAIRS, ROW_VECTOR, TENSOR, TENSOR_MAP, fields_of
from cuflash.features.use import Operand
from cuflash.planning.plan import Plan
from cuflash.planning.problem import ELEMENTS

from .runtime import Launch

__all__ = ["Axes", "Tensor", "axes_of", "is_dense", "operands_of", "tensors_of"]

#: Axes longer than 1, each with its stride in bytes, in no order.
Axes = list[tuple[int, int]]


@dataclass(frozen=True)
class Tensor:
    """A tensor as a launch describes it."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, of all axes
    dtype: str

    @property
    def axes(self) -> Axes:
        return axes_of(self.shape, self.strides)

    @property
    def is_vector(self) -> bool:
        """Whether its rows begin at, and are a multiple of, 16 bytes."""
        whole = [
            self.address,
            *(stride for _, stride in axes_of(self.shape[:-1], self.strides[:-1])),
        ]
        whole.append(self.shape[-1] * ELEMENTS[self.dtype].itemsize)
        return all(number % 16 == 0 for number in whole)


def _dense(shape: tuple[int, ...], itemsize: int) -> Iterator[int]:
    """Strides of a contiguous array in a launch's form: 0 along axes of one element."""
    for axis, size in enumerate(shape):
        last = axis == len(shape) - 1
        yield 0 if size == 1 and not last else itemsize * math.prod(shape[axis + 1 :])


def is_dense(tensor: Tensor) -> bool:
    """Whether it is contiguous with rows before heads, or with heads before rows."""
    batch, rows, heads, depth = tensor.shape
    itemsize = ELEMENTS[tensor.dtype].itemsize
    batches, by_row, by_head, last = tensor.strides
    turned = (batches, by_head, by_row, last)
    return tensor.strides == tuple(_dense(tensor.shape, itemsize)) or turned == tuple(
        _dense((batch, heads, rows, depth), itemsize)
    )


def axes_of(shape: Any, strides: Any) -> Axes:
    return sorted((n, int(s)) for n, s in zip(shape, strides, strict=True) if n > 1)


def tensors_of(launch: Launch, plan: Plan) -> Iterator[Tensor]:
    """Every tensor that the parameters of a launch describe."""
    problem, parameters = plan.problem, launch.parameters
    output = {"out": problem.output, "lse": problem.statistics, "dlse": problem.statistics}
    rows = (problem.batch, problem.seqlen_q, problem.heads_q)
    for name, (kind, _) in fields_of(parameters.dtype).items():
        field_of, short = parameters[name], name.removesuffix("_map")
        stored = short in ("k_cache", "v_cache") or name in ("k_map", "v_map")
        stored |= launch.config.kernel == "forward_few" and name in ("k", "v")
        dtype = problem.stored if stored else output.get(short, problem.storage)
        size = ELEMENTS[dtype].itemsize
        if kind == TENSOR_MAP:
            words = [int(word) for word in field_of["opaque"][:8]]
            sizes = (words[1], *words[2:5])
            yield _mapped(short, words, problem.shapes[short], sizes, dtype)
        elif kind in (TENSOR, ROW_VECTOR):
            address = int(field_of["data"])
            strides = [size * int(field_of[f"{axis}_stride"]) for axis in ("batch", "row", "head")]
            if kind == TENSOR:
                yield Tensor(name, address, problem.shapes[name], (*strides, size), dtype)
            elif address or name not in ("lse", "dlse"):
                yield Tensor(name, address, rows, tuple(strides), dtype)


def operands_of(parameters: Any, feature: str, operand: Operand) -> Iterator[Tensor]:
    """A feature's array and its gradient, if the parameters of a launch describe them."""
    name, gradient, names = operand.name, f"d{operand.name}", parameters.dtype.names
    if feature in names:
        block = parameters[feature]
        own = block.dtype.names
        if block.dtype == PAIRS:
            strides = {axis: block[f"{axis}_stride"] for axis in _PAIR_AXES}
            yield _of_pairs(name, block["data"], operand, strides)
        elif f"{name}_map" in own:
            words = [int(word) for word in block[f"{name}_map"]["opaque"][:8]]
            entries, heads, rows, keys = operand.pairs
            sizes = (words[1], *words[2:5])
            yield _mapped(name, words, (entries, rows, heads, keys), sizes, operand.dtype)
        elif f"{name}_row_stride" in own:
            strides = {axis: block[f"{name}_{axis}_stride"] for axis in _PAIR_AXES}
            yield _of_pairs(name, block[name], operand, strides)
        elif name in own:
            yield _contiguous(name, block[name], operand)
    elif feature in _LISTED and name in names:  # of the kernel that lists tiles
        yield _contiguous(name, parameters[name], operand)
    if gradient in names:
        field_of = parameters[gradient]
        if field_of.dtype == PAIRS:
            strides = {axis: field_of[f"{axis}_stride"] for axis in _PAIR_AXES}
            yield _of_pairs(gradient, field_of["data"], operand, strides)
        else:
            yield _contiguous(gradient, field_of, operand)


_PAIR_AXES = ("batch", "head", "row", "column")
#: Features whose arrays the kernel reads that lists tiles.
_LISTED = ("packed_lengths", "packed_queries", "used_lengths")


def _of_pairs(name: str, address: Any, operand: Operand, strides: Mapping[str, Any]) -> Tensor:
    """An array that broadcasts: its strides are 0 along axes of one element."""
    own = [ELEMENTS[operand.dtype].itemsize * int(strides[axis]) for axis in _PAIR_AXES]
    for axis, size, stride in zip(_PAIR_AXES, operand.pairs, own, strict=True):
        assert size > 1 or stride == 0, f"{name}: stride {stride} of one {axis}"
    return Tensor(name, int(address), operand.pairs, tuple(own), operand.dtype)


def _contiguous(name: str, address: Any, operand: Operand) -> Tensor:
    strides = tuple(_dense(operand.shape, ELEMENTS[operand.dtype].itemsize))
    return Tensor(name, int(address), operand.shape, strides, operand.dtype)


def _mapped(
    name: str, words: list[int], shape: tuple[int, ...], sizes: tuple[int, ...], dtype: str
) -> Tensor:
    """The tensor that a map describes: columns, rows, heads, batch."""
    batch, rows, heads, columns = shape
    assert sizes == (columns, rows, heads, batch), f"{name}: a map of {sizes} for {shape}"
    by_row, by_head, by_batch = words[5:8]
    strides = (by_batch, by_row, by_head, ELEMENTS[dtype].itemsize)
    return Tensor(name, words[0], shape, strides, dtype)
