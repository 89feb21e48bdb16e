"""The two passes as one primitive of JAX: shapes, batching, and lowering for each platform.

A primitive is used instead of :func:`jax.lax.platform_dependent` over callbacks,
which traces the branches of all platforms: a computation on the CPU would plan and
compile CUDA kernels, and fail where CUDA is missing. JAX calls a lowering rule only
for the platform that a computation is compiled for, and the rule can raise typed
errors. A batching rule composes with :func:`jax.custom_vjp` in either order;
:func:`jax.custom_batching.custom_vmap` would have to wrap each pass for that.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..errors import UnsupportedError
from .axes import HEADS, broadcasts, free_axes, has_batch, source_of
from .call import Call
from .entries import holes
from .lowering import eager, lower
from .partition import compute_divided
from .types import filled, joined, repeated, result_types, with_heads, without_heads

try:
    # custom_partitioning needs the devices, and adds its primitive to this set.
    from jax._src.dispatch import prim_requires_devices_during_lowering
except ImportError:  # another version of JAX has it elsewhere: divided arrays are then gathered
    prim_requires_devices_during_lowering = set()

__all__ = ["run"]

_primitive = Primitive("cuflash_attention")
_primitive.multiple_results = True


def run(call: Call, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """One pass over JAX arrays or tracers.

    Parameters
    ----------
    call
        The pass.
    arrays
        Its arguments by the names of their tensors, in the layout "bshd". The axes
        of :func:`jax.vmap` are before the batch axis.

    Returns
    -------
    dict
        The results by name.
    """
    taking = call.taking(arrays)
    results = _primitive.bind(*joined(list(arrays.values())), call=taking)
    return dict(zip(call.results, results, strict=True))


def _refuse_derivatives(*_: Any, call: Call) -> Any:
    raise UnsupportedError(
        "cuflash.jax.attention has first derivatives alone: "
        "take second ones of jax.nn.dot_product_attention"
    )


def _types(*arrays: Any, call: Call) -> list[Any]:
    return result_types(call, arrays)


def _batch(
    arrays: Sequence[Any], axes: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    """Apply :func:`jax.vmap`: the mapped axis is put before the batch, and a pass merges both.

    Arrays that are not mapped are repeated for each entry: XLA's buffers have no
    strides, and a kernel reads every batch entry at a separate address. An array that
    broadcasts gets an axis of 1 instead. A mapped array without a batch axis, such as
    sinks, becomes separate heads for each mapped entry. A mapped seed takes a pass for
    each entry, and so do mapped lengths together with such heads, and packed sequences.
    """
    is_mapped = {name: axis is not None for name, axis in call.named(axes).items()}
    alone = any(mapped and not free_axes(name, 0) for name, mapped in is_mapped.items())
    if alone or call.packed:
        return _one_by_one(arrays, axes, call)
    first = [
        array if axis is None else jnp.moveaxis(array, axis, 0)
        for array, axis in zip(arrays, axes, strict=True)
    ]
    like = next(a for a, axis in zip(first, axes, strict=True) if axis is not None)
    named = call.named(first)
    by_entry = [*(name for name in named if is_mapped[name]), *call.results]
    if all(has_batch(name) for name in by_entry):
        for name, array in named.items():
            if not is_mapped[name] and broadcasts(name):
                named[name] = jnp.expand_dims(array, 0)
            elif not is_mapped[name] and has_batch(name):
                named[name] = repeated(array, like.shape[0], like)
        results = list(run(call, _without_holes(named)).values())
    elif any(is_mapped[name] and HEADS not in free_axes(name, 0) for name in named):
        return _one_by_one(arrays, axes, call)  # all heads of an entry share its lengths
    else:
        results = _by_heads(call, named, is_mapped, like)
    return results, [0] * len(results)


def _one_by_one(
    arrays: Sequence[Any], axes: Sequence[int | None], call: Call
) -> tuple[list[Any], list[int]]:
    """Apply :func:`jax.vmap` by a pass for each entry, for arrays that a whole pass shares."""
    named, of = call.named(arrays), call.named(axes)
    moved = {
        name: jnp.moveaxis(named[name], axis, 0) for name, axis in of.items() if axis is not None
    }

    def one(mapped: Mapping[str, Any]) -> list[Any]:
        return list(run(call, {**named, **mapped}).values())

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


def _without_holes(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a pass, with the :func:`~.entries.holes` of arrays filled."""
    q = arrays["q"]
    entries = q.shape[: q.ndim - len("shd")]
    filling = dict(arrays)
    for name in filter(broadcasts, arrays):
        for axis in holes(arrays[name].shape[: len(entries)], entries):
            filling[name] = filled(filling[name], axis, q, axis)
    return filling


def _by_heads(
    call: Call, arrays: Mapping[str, Any], is_mapped: Mapping[str, bool], like: Any
) -> list[Any]:
    """Return the results of a pass in which mapped entries are separate heads.

    Parameters
    ----------
    call
        The pass of one entry.
    arrays
        Its arguments by name; the mapped axis is the first, if they have it.
    is_mapped
        Whether an argument has the mapped axis.
    like
        An argument with the mapped axis.
    """
    q, size = arrays["q"], like.shape[0]
    inner = q.ndim - len("bshd") - is_mapped["q"]
    wanted = {source_of(name) for name in call.results}
    heads, alone = {}, set()
    for name, array in arrays.items():
        if HEADS not in free_axes(name, inner):
            heads[name] = array
            continue
        axis, mapped = _heads_axis(name, inner), is_mapped[name]
        one = broadcasts(name) and array.shape[axis + mapped] == 1
        if one and not mapped and name not in wanted:  # all heads and entries share it
            heads[name] = array
            continue
        whole = array if mapped else repeated(array, size, like)
        if one:  # the heads of an entry share it, which no stride can express: each gets a copy
            alone.add(name)
            whole = filled(whole, axis + 1, q, _heads_axis("q", inner) + is_mapped["q"])
        heads[name] = with_heads(whole, axis)
    results = []
    for name, result in run(call, heads).items():
        axis = _heads_axis(name, inner)
        entries = without_heads(result, size, axis)
        if source_of(name) in alone:
            entries = entries.sum(axis + 1, keepdims=True)
        results.append(entries)
    return results


def _heads_axis(name: str, mapped: int) -> int:
    """Return the axis of heads of a tensor; raise if it has none."""
    axis = free_axes(name, mapped).get(HEADS)
    if axis is None:
        raise UnsupportedError(f"jax.vmap over {name}, which all entries and heads share")
    return axis


_primitive.def_impl(eager(_primitive))
_primitive.def_abstract_eval(_types)
ad.primitive_jvps[_primitive] = _refuse_derivatives
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, functools.partial(lower, divided=compute_divided))
prim_requires_devices_during_lowering.add(_primitive)
