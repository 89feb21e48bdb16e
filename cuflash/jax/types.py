"""Types of arrays inside JAX: the axes of a mesh over which they vary, and their division.

Inside :func:`jax.shard_map` a type names the axes of the mesh over which its
values vary. On a mesh of explicit axes a type also names the axes of the mesh
that divide each axis of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import ArgumentValueError, UnsupportedError
from .axes import broadcasts, free_axes, source_of
from .call import Call, renamed
from .passes import Pass

__all__ = [
    "filled",
    "joined",
    "repeated",
    "result_types",
    "whole_types",
    "with_heads",
    "without_heads",
]


def joined(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, all varying over every axis of the mesh that one of them varies over.

    JAX's functions do the same before they compute. The transpose of this
    step sums a gradient over the axes that its argument does not vary over.
    """
    varying = [_varying(jax.typeof(array)) for array in arrays]
    everywhere = frozenset().union(*varying)
    return [
        _vary(array, tuple(sorted(everywhere - axes, key=str)))
        for array, axes in zip(arrays, varying, strict=True)
    ]


def _varying(kind: Any) -> frozenset[Any]:
    """Return the axes of the mesh over which a type varies, in old and new versions of JAX."""
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(kind.vma if manual is None else manual.varying)


def _vary(array: Any, axes: tuple[Any, ...]) -> Any:
    if not axes:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)


def repeated(array: Any, size: int, like: Any, axis: int = 0) -> Any:
    """Return the array ``size`` times, along a first axis divided like ``axis`` of ``like``."""
    first = _spec(jax.typeof(like))[axis]
    if first is None:
        return jax.numpy.broadcast_to(array, (size, *array.shape))
    kind = jax.typeof(array)
    sharding = NamedSharding(kind.sharding.mesh, PartitionSpec(first, *_spec(kind)))
    return jax.lax.broadcast(array, (size,), out_sharding=sharding)


def filled(array: Any, axis: int, like: Any, like_axis: int) -> Any:
    """Return the array repeated along an axis of 1, to the size of ``like_axis`` of ``like``."""
    one = jax.numpy.squeeze(array, axis)
    whole = repeated(one, like.shape[like_axis], like, like_axis)
    return jax.numpy.moveaxis(whole, 0, axis)


def with_heads(array: Any, axis: int) -> Any:
    """Return the array with its first axis merged into its heads, which are ``axis`` without it.

    The heads of an entry stay together.

    Raises
    ------
    UnsupportedError
        If the type says that the heads are divided: no type can say how the merged axis is
        divided.
    """
    if _spec(jax.typeof(array))[axis + 1] is not None:
        raise UnsupportedError(
            "jax.vmap cannot map the gradient of an array that all batch entries share if a mesh "
            "of explicit axes divides the heads; divide the batch, or map inside jax.shard_map"
        )
    shape = array.shape[1:]
    merged = (*shape[:axis], array.shape[0] * shape[axis], *shape[axis + 1 :])
    return jax.numpy.moveaxis(array, 0, axis).reshape(merged)


def without_heads(array: Any, size: int, axis: int) -> Any:
    """Return the inverse of :func:`with_heads`, with ``size`` entries along a first axis."""
    shape = array.shape
    parted = array.reshape(*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :])
    return jax.numpy.moveaxis(parted, axis, 0)


def result_types(call: Call, types: Sequence[Any]) -> list[Any]:
    """Return the types of the results, from those of the arguments.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the arguments do not fit the call, or no pass supports their division.
    """
    shapes = call.results_of(types)
    q, mapped = call.named(types)["q"], call.mapped(types)
    divided = _division(call, types)
    given = {name: _spec(kind) for name, kind in call.named(types).items()}
    results = []
    for name, (shape, kind) in zip(call.results, shapes, strict=True):
        spec: list[Any] = [None] * len(shape)
        for counted, axis in free_axes(name, mapped).items():
            spec[axis] = divided[counted]
        if broadcasts(name):  # only the mapped axes are divided like query's
            spec[mapped:] = given[source_of(name)][mapped:]
        sharding = NamedSharding(q.sharding.mesh, PartitionSpec(*spec))
        results.append(
            q.update(shape=shape, dtype=jax.numpy.dtype(kind), weak_type=False, sharding=sharding)
        )
    return results


def whole_types(
    call: Pass, types: Sequence[Any], shapes: Sequence[tuple[tuple[int, ...], str]]
) -> list[Any]:
    """Return types of results of these shapes and dtypes, for arrays that are not divided.

    Raises
    ------
    ArgumentValueError
        If a type says that an array is divided.
    """
    for name, kind in call.named(types).items():
        if any(_spec(kind)):
            got = f"an array divided as {PartitionSpec(*_spec(kind))}"
            raise ArgumentValueError(name, got, "a whole one; or a call inside jax.shard_map")
    first = types[0]
    mesh = first.sharding.mesh
    return [
        first.update(
            shape=shape,
            dtype=jax.numpy.dtype(kind),
            weak_type=False,
            sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(shape))),
        )
        for shape, kind in shapes
    ]


def _division(call: Call, types: Sequence[Any]) -> dict[str, Any]:
    """Return the division of the axes that may be divided, which all arguments must share.

    Axes of 1 of arrays that broadcast are not divided.
    """
    mapped, given = call.mapped(types), call.named(types)
    divided = {name: _spec(kind) for name, kind in given.items()}
    wanted = {counted: divided["q"][axis] for counted, axis in free_axes("q", mapped).items()}
    for name, spec in divided.items():
        free = free_axes(name, mapped)
        others = [names for axis, names in enumerate(spec) if axis not in free.values()]
        ones = broadcasts(name)
        shared = {axis for axis, size in enumerate(given[name].shape) if ones and size == 1}
        unlike = [
            axis
            for counted, axis in free.items()
            if spec[axis] != wanted[counted] and not (axis in shared and spec[axis] is None)
        ]
        if any(others) or unlike:
            raise ArgumentValueError(
                renamed(name),
                f"an array divided as {PartitionSpec(*spec)}",
                "batch and heads divided as query's, sequence and width whole: "
                "use jax.sharding.reshard",
            )
    return wanted


def _spec(kind: Any) -> tuple[Any, ...]:
    spec = tuple(kind.sharding.spec)
    return (*spec, *[None] * (len(kind.shape) - len(spec)))
