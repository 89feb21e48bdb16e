"""How a pass is divided over the devices of a computation: by batch and by heads.

Every head of every batch entry is computed by itself. So batch and heads may
be divided in any way, with the heads of keys and values divided as those of
the queries are. Sequence and width are needed whole. Which axes are batch and
heads the table of tensors says. An axis of 1 of an array that broadcasts is
not divided.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..features.score_text import PLACE
from .axes import HEADS, broadcasts, free_axes
from .call import Call
from .site import Site

__all__ = ["compute_divided"]


@functools.partial(custom_partitioning, static_argnums=(0,))
def compute_divided(site: Site[Call], *arrays: Any) -> list[Any]:
    """A pass over arrays that XLA may divide over several devices."""
    return site.compute(*arrays)


def _partition(
    site: Site[Call], mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Mesh, Any, list[NamedSharding], tuple[NamedSharding, ...]]:
    """What each device computes, and how the arrays have to be divided for it."""
    call, mesh = site.call, _mesh_of(mesh, operands)
    given, made = call.named(operands), dict(zip(call.results, results, strict=True))
    mapped = call.mapped(operands)
    divided = _division(mesh, mapped, {**given, **made})
    shared = [_shared(mapped, divided, *item) for item in made.items()]
    first = {"batch": divided["batch"], HEADS: divided[HEADS]} if call.counts_parts else {}
    return (
        mesh,
        functools.partial(_compute_part, site, shared, first),
        [_sharding(mesh, mapped, divided, *item) for item in made.items()],
        tuple(_sharding(mesh, mapped, divided, *item) for item in given.items()),
    )


def _compute_part(
    site: Site[Call],
    shared: Sequence[tuple[Any, ...]],
    first: Mapping[str, tuple[Any, ...]],
    *arrays: Any,
) -> list[Any]:
    """The results of a device, each summed over the axes of the mesh on which others share it.

    Where ``first`` says over which axes of the mesh entries and heads are
    divided, dropout and a function of scores are told at which the part begins.
    """
    given = site.call.named(arrays)
    for name in ("dropout_seed", PLACE) if first else ():
        if name in given:
            given[name] = _with_place(given, site.call.mapped(arrays), first, name)
    return [
        jax.lax.psum(result, names) if names else result
        for result, names in zip(site.compute(*given.values()), shared, strict=True)
    ]


def _with_place(
    given: Mapping[str, Any], mapped: int, divided: Mapping[str, tuple[Any, ...]], name: str
) -> Any:
    """An array whose last numbers are the entry and the head, of all, at which a part begins."""
    q, words = given["q"], given[name]
    axes = free_axes("q", mapped)
    begins = [
        q.shape[axes[counted]] * (jax.lax.axis_index(names) if names else 0)
        for counted, names in divided.items()
    ]
    return words.at[-len(begins) :].set(jnp.stack([jnp.asarray(n, words.dtype) for n in begins]))


def _shared(
    mapped: int, divided: Mapping[str, tuple[Any, ...]], name: str, array: Any
) -> tuple[Any, ...]:
    """Axes of the mesh that divide entries or heads which a result has not."""
    own = _divisible(mapped, name, array)
    return tuple(one for counted, names in divided.items() if counted not in own for one in names)


def _infer_results(
    site: Site[Call], mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> list[NamedSharding]:
    """How the results are divided where the arguments are as they are."""
    call, mesh = site.call, _mesh_of(mesh, operands)
    mapped = call.mapped(operands)
    divided = _division(mesh, mapped, call.named(operands))
    made = zip(call.results, results, strict=True)
    return [_sharding(mesh, mapped, divided, *item) for item in made]


def _mesh_of(mesh: Mesh, operands: Sequence[Any]) -> Mesh:
    """The mesh; without one, the devices in a row over which an array is divided.

    XLA also asks before it knows how any is: then nothing is divided, and any
    mesh will do to say so.
    """
    if not mesh.empty:
        return mesh
    known = [array for array in operands if array.sharding is not None]
    devices = list(known[0].sharding.devices_indices_map(tuple(known[0].shape))) if known else []
    return Mesh(np.array(devices or jax.local_devices()[:1]), ("devices",))


def _sharding(
    mesh: Mesh, mapped: int, divided: Mapping[str, tuple[Any, ...]], name: str, array: Any
) -> NamedSharding:
    spec: list[Any] = [None] * len(array.shape)
    for counted, axis in _divisible(mapped, name, array).items():
        spec[axis] = divided[counted] or None
    return NamedSharding(mesh, PartitionSpec(*spec))


def _divisible(mapped: int, name: str, array: Any) -> dict[str, int]:
    """The axes of an array that are divided where the pass is: not those of 1 that are shared."""
    return {
        counted: axis
        for counted, axis in free_axes(name, mapped).items()
        if not (broadcasts(name) and array.shape[axis] == 1)
    }


def _division(mesh: Mesh, mapped: int, arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Axes of the mesh for every axis that may be divided: the first that an array has and can be.

    It cannot where the parts would be unequal, or would part the queries of one
    key head: that axis is then whole on every device.
    """
    key = arrays["k"]
    free = {name: free_axes(name, mapped) for name in arrays}
    divided: dict[str, tuple[Any, ...]] = {}
    for counted, axis in free["k"].items():
        taken = {name for names in divided.values() for name in names}
        given = [
            _names(mesh, array, free[name][counted])
            for name, array in arrays.items()
            if counted in free[name]
        ]
        fitting = [_fitting(mesh, names, key.shape[axis], taken) for names in given]
        divided[counted] = next((names for names in fitting if names), ())
    return divided


def _names(mesh: Mesh, array: Any, axis: int) -> tuple[Any, ...]:
    """Axes of the mesh over which an axis of an array is divided, from the outermost on.

    Read off the parts that the devices hold: XLA may suggest to divide over a
    part of a mesh axis, after a reshape for example, and JAX cannot name that.
    It counts as not divided, as unequal parts do.
    """
    try:
        indices = array.sharding.devices_indices_map(tuple(array.shape))
    except (AttributeError, ValueError):  # no suggestion; unequal parts
        return ()
    starts = [indices[device][axis].start or 0 for device in mesh.devices.flat]
    _, place = np.unique(starts, return_inverse=True)
    place = place.reshape(mesh.devices.shape)
    long = [number for number, size in enumerate(place.shape) if size > 1]
    ahead = {number: int(place.take(1, number).flat[0]) for number in long}
    steps = {number: step for number, step in ahead.items() if step}
    order = sorted(steps, key=steps.__getitem__, reverse=True)
    sizes = [place.shape[number] for number in order]
    coordinates = np.indices(place.shape)
    expected = sum((steps[number] * coordinates[number] for number in order), np.zeros_like(place))
    whole = math.prod(sizes) == place.max() + 1 and (expected == place).all()
    return tuple(mesh.axis_names[number] for number in order) if whole else ()


def _fitting(mesh: Mesh, names: tuple[Any, ...], size: int, taken: set[Any]) -> tuple[Any, ...]:
    """As many of the axes, from the first on, as are free and divide ``size`` evenly."""
    for count in range(len(names), 0, -1):
        few = names[:count]
        if not taken & set(few) and size % math.prod(mesh.shape[name] for name in few) == 0:
            return few
    return ()


def _rule(site: Site[Call], mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """The same in the words of Shardy: which axes of which arrays are one factor.

    An axis that cannot be divided is a factor of its own.
    """
    call = site.call
    given = call.named(operands)
    named = [*given.items(), *zip(call.results, results, strict=True)]
    mapped = call.mapped(operands)
    heads_q, heads_kv = (given[name].shape[free_axes(name, mapped)[HEADS]] for name in "qk")
    own = itertools.count()
    mappings = []
    for name, kind in named:
        factors: list[Any] = [f"own{next(own)}" for _ in kind.shape]
        for counted, axis in _divisible(mapped, name, kind).items():
            of_heads = _head_factor(kind.shape[axis], heads_q, heads_kv)
            factors[axis] = of_heads if counted == HEADS else counted
        mappings.append(tuple(factors))
    grouped = heads_q > heads_kv > 1
    sizes = {"group": heads_q // heads_kv} if grouped else {}
    split = len(operands)
    return SdyShardingRule(tuple(mappings[:split]), tuple(mappings[split:]), **sizes)


def _head_factor(count: int, heads_q: int, heads_kv: int) -> Any:
    """The factor of an axis of so many heads.

    The heads of queries are those of keys and, within each, a group; a single
    key head is no factor to share.
    """
    if count == heads_kv:
        return "heads"
    return CompoundFactor("heads", "group") if heads_kv > 1 else "heads of queries"


compute_divided.def_partition(
    partition=_partition,
    infer_sharding_from_operands=_infer_results,
    sharding_rule=_rule,
    decode_shardings=False,
)
