"""Describes a call's arrays, from arrays or from shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .arrays.adopt import adopt
from .arrays.spec import TensorSpec, contiguous_strides
from .checks import CallProblem, describe
from .errors import ArgumentTypeError, ArgumentValueError
from .features.packed_lengths import NAMES as _OFFSETS
from .options import Options, check_dtype, check_element
from .planning.problem import ELEMENTS, DTypeName, ElementName, Operation
from .tensors import QKV, argument_of, tensors

__all__ = [
    "check_copies",
    "check_place",
    "signature_of",
    "spec_of_array",
    "spec_of_feature",
    "spec_of_matrix",
]


def signature_of(
    operation: Operation,
    arrays: Mapping[str, Any],
    dtype: Any,
    options: Options,
    where: int | None,
) -> tuple[tuple[str, TensorSpec], ...]:
    """Descriptions of a call's arrays, from arrays or shapes of q, k, v and of features.

    Other inputs of the backward pass are described as results of the forward pass, with ``dout`` in
    the dtype of q and with ``dlse``.
    """
    if not isinstance(operation, str) or operation not in ("forward", "backward"):
        raise ArgumentValueError("operation", repr(operation), "'forward' or 'backward'")
    given: dict[str, TensorSpec] = {}
    given |= {name: spec_of_matrix(name, arrays[name], dtype, where) for name in QKV}
    if operation == "forward" and options.wrt != QKV:
        raise ArgumentValueError("wrt", repr(options.wrt), 'operation="backward" beside it')
    # Keywords of features may belong to arrays that are not described yet.
    more = tuple((name, value) for name, value in options.more if name == "block_mask")
    sizes = describe("forward", given, replace(options, more=more))
    for name, array in arrays.items():
        if name not in given:
            given[name] = spec_of_feature(name, array, sizes, given["q"].device)
    if operation == "backward":
        made = [n for n, t in tensors().items() if t.reads == ("backward",)]
        given |= {name: sizes.fresh(name, given["q"].device) for name in made}
    return tuple(given.items())


def spec_of_matrix(name: str, tensor: Any, dtype: Any, where: int | None) -> TensorSpec:
    """The description of q, k, v or a cache, from an array, or from a shape and a dtype.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is neither, or the dtype is not that of the array.
    """
    if not isinstance(tensor, (tuple, list)):
        spec = adopt(name, tensor).spec
        if dtype is not None and _dtype(dtype) != spec.dtype:
            raise ArgumentValueError("dtype", repr(dtype), f"{spec.dtype}, which {name} has")
        return spec
    return _fresh(_shape(name, tensor), _dtype(dtype), where)


def _shape(name: str, sizes: Sequence[Any]) -> tuple[int, ...]:
    if not all(_is_size(size) for size in sizes):
        raise ArgumentValueError(name, repr(sizes), "a shape: non-negative integers")
    return tuple(int(size) for size in sizes)


def _fresh(shape: tuple[int, ...], dtype: ElementName, where: int | None) -> TensorSpec:
    return TensorSpec(shape, dtype, contiguous_strides(shape), ELEMENTS[dtype].itemsize, where)


def spec_of_feature(name: str, array: Any, sizes: CallProblem, where: int | None) -> TensorSpec:
    """The description of a feature's array; a missing shape or dtype is what the call needs."""
    if _is_dtype(array) and name in _OFFSETS:
        expected = "a shape: it says how many sequences there are"
        raise ArgumentValueError(name, f"the dtype {array} alone", expected)
    return spec_of_array(name, array, sizes.shapes.get(name), sizes.allowed[name][0], where)


def spec_of_array(
    name: str, array: Any, shape: tuple[int, ...] | None, dtype: ElementName, where: int | None
) -> TensorSpec:
    """The description of an array that is given as itself, its shape, its dtype, or both as a pair.

    Parameters
    ----------
    shape, dtype
        Used where the other one alone is given; a shape of None means that the shape must be given.
    where
        The device of an array that does not exist yet.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is given in none of these ways, or its shape is missing.
    """
    if _is_dtype(array):
        if shape is None:
            raise ArgumentValueError(name, f"the dtype {array} alone", "a shape")
        return _fresh(shape, check_element(name, array), where)
    if isinstance(array, (tuple, list)) and len(array) == 2 and _is_dtype(array[1]):
        array, dtype = array[0], check_element(name, array[1])
    if isinstance(array, (tuple, list)):
        return _fresh(_shape(name, array), dtype, where)
    return adopt(argument_of(name), array).spec


def _is_dtype(value: Any) -> bool:
    """Whether it is a dtype, which stands for an array."""
    known = isinstance(value, (str, np.dtype, type))
    return known or type(value).__name__.lower() == "dtype"


def _is_size(size: Any) -> bool:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    return whole and size >= 0


def _dtype(dtype: Any) -> DTypeName:
    checked = check_dtype("dtype", dtype)
    if checked is None:
        raise ArgumentTypeError("dtype", "None", "a dtype, where shapes are given")
    return checked


def check_copies(names: Sequence[str]) -> None:
    """Refuse arrays that need a copy: a prepared run makes none.

    Raises
    ------
    ArgumentValueError
        If there are such arrays; ``names`` names them.
    """
    if names:
        raise ArgumentValueError(
            ", ".join(names),
            "strides or an address that the kernels cannot read",
            "rows of consecutive elements, each at a multiple of its size",
        )


def check_place(name: str, spec: TensorSpec, device: int | None) -> None:
    """Raise if an array, or a shape, is not of the device that was asked for."""
    if spec.device is None:
        raise ArgumentTypeError(name, "an array in host memory", "a shape, or one in CUDA memory")
    if device is not None and spec.device != device:
        raise ArgumentValueError("device", str(device), f"{spec.device}, where {name} is")
