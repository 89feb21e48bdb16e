"""How a pass is divided over the devices of a computation: by batch and by heads.

Every head of every batch entry is computed by itself. So batch and heads may
be divided in any way, with the heads of keys and values divided as those of
the queries are. Sequence and width are needed whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .call import Call
from .site import Site
from .types import free_axes

__all__ = ["compute_divided"]


@functools.partial(custom_partitioning, static_argnums=(0,))
def compute_divided(site: Site, *arrays: Any) -> list[Any]:
    """A pass over arrays that XLA may divide over several devices."""
    return site.compute(*arrays)


def _partition(
    site: Site, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Mesh, Any, list[NamedSharding], tuple[NamedSharding, ...]]:
    """What each device computes, and how the arrays have to be divided for it."""
    mesh = _mesh_of(mesh, operands)
    divided = _division(site.call, mesh, [*operands, *results])
    return (
        mesh,
        site.compute,
        [_sharding(mesh, site.call, divided, operands, array) for array in results],
        tuple(_sharding(mesh, site.call, divided, operands, array) for array in operands),
    )


def _infer_results(
    site: Site, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> list[NamedSharding]:
    """How the results are divided where the arguments are as they are."""
    mesh = _mesh_of(mesh, operands)
    divided = _division(site.call, mesh, operands)
    return [_sharding(mesh, site.call, divided, operands, array) for array in results]


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
    mesh: Mesh, call: Call, divided: Sequence[Any], operands: Sequence[Any], array: Any
) -> NamedSharding:
    ndim = len(array.shape)
    spec: list[Any] = [None] * ndim
    for axis, names in zip(free_axes(call.mapped(operands), ndim), divided, strict=True):
        spec[axis] = names
    return NamedSharding(mesh, PartitionSpec(*spec))


def _division(call: Call, mesh: Mesh, arrays: Sequence[Any]) -> list[Any]:
    """Axes of the mesh for every axis that may be divided: the first that an array has and can be.

    It cannot where the parts would be unequal, or would part the queries of one
    key head: that axis is then whole on every device.
    """
    mapped, key = call.mapped(arrays), call.named(arrays)["k"]
    divided: list[tuple[Any, ...] | None] = []
    for place, axis in enumerate(free_axes(mapped, len(key.shape))):
        taken = {name for names in divided for name in names or ()}
        given = [
            _names(mesh, array, free_axes(mapped, len(array.shape))[place]) for array in arrays
        ]
        fitting = [_fitting(mesh, names, key.shape[axis], taken) for names in given]
        divided.append(next((names for names in fitting if names), None))
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


def _rule(site: Site, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """The same in the words of Shardy: which axes of which arrays are one factor.

    An axis that cannot be divided is a factor of its own.
    """
    call = site.call
    named = [*call.named(operands).items(), *zip(call.results, results, strict=True)]
    heads = {name: kind.shape[len(kind.shape) - 2] for name, kind in named}
    factor = _head_factors(heads["q"], heads["k"])
    own = itertools.count()
    mappings = []
    for name, kind in named:
        *batch, last = free_axes(call.mapped(operands), len(kind.shape))
        factors: list[Any] = [f"own{next(own)}" for _ in kind.shape]
        for axis in batch:
            factors[axis] = f"batch{axis}"
        factors[last] = factor[heads[name]]
        mappings.append(tuple(factors))
    grouped = heads["q"] > heads["k"] > 1
    sizes = {"group": heads["q"] // heads["k"]} if grouped else {}
    split = len(operands)
    return SdyShardingRule(tuple(mappings[:split]), tuple(mappings[split:]), **sizes)


def _head_factors(heads_q: int, heads_kv: int) -> dict[int, Any]:
    """The factor of an axis of heads, by how many there are.

    The heads of queries are those of keys and, within each, a group; a single
    key head is no factor to share.
    """
    of_queries = CompoundFactor("heads", "group") if heads_kv > 1 else "heads of queries"
    return {heads_q: of_queries, heads_kv: "heads"}


compute_divided.def_partition(
    partition=_partition,
    infer_sharding_from_operands=_infer_results,
    sharding_rule=_rule,
    decode_shardings=False,
)
