"""Divides a pass over the devices of a computation, by batch and by heads.

Heads of batch entries do not depend on each other. So batch and heads may be
divided in any way, with the heads of keys and values divided like those of the
queries. Sequence and width are not divided. The table of tensors says which axes
are batch and heads. An axis of 1 of an array that broadcasts is not divided.
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
    """Compute a pass over arrays that XLA may divide over several devices."""
    return site.compute(*arrays)


def _partition(
    site: Site[Call], mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Mesh, Any, list[NamedSharding], tuple[NamedSharding, ...]]:
    """Return the computation of each device, and the division of the arrays for it."""
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
    """Return the results of a device, summed over the axes of the mesh that share them.

    ``first`` has the axes of the mesh that divide entries and heads; with it, dropout
    and a function of scores get the part's first entry and head.
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
    """Return an array whose last two numbers are the part's first entry and first head."""
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
    """Return the axes of the mesh that divide entries or heads that a result does not have."""
    own = _divisible(mapped, name, array)
    return tuple(one for counted, names in divided.items() if counted not in own for one in names)


def _infer_results(
    site: Site[Call], mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> list[NamedSharding]:
    """Return the division of the results that follows from that of the arguments."""
    call, mesh = site.call, _mesh_of(mesh, operands)
    mapped = call.mapped(operands)
    divided = _division(mesh, mapped, call.named(operands))
    made = zip(call.results, results, strict=True)
    return [_sharding(mesh, mapped, divided, *item) for item in made]


def _mesh_of(mesh: Mesh, operands: Sequence[Any]) -> Mesh:
    """Return the mesh; without one, a row of the devices that an array is divided over.

    XLA also asks before any array has a division. Then nothing is divided, and every
    mesh can describe that.
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
    """Return the axes of an array that may be divided, without axes of 1 that are shared."""
    return {
        counted: axis
        for counted, axis in free_axes(name, mapped).items()
        if not (broadcasts(name) and array.shape[axis] == 1)
    }


def _division(mesh: Mesh, mapped: int, arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the axes of the mesh for every axis that may be divided.

    The first array with a possible division decides. A division is impossible if parts
    would be unequal, or would separate query heads of one kv head. Without a possible
    division the axis is whole on every device.
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
    """Return the axes of the mesh over which an axis of an array is divided, outermost first.

    They follow from the parts that the devices hold. XLA may suggest a division over
    a part of a mesh axis, after a reshape for example, which JAX cannot name. That
    counts as not divided, and so do unequal parts.
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
    """Return the most of the first axes that are free and divide ``size`` evenly."""
    for count in range(len(names), 0, -1):
        few = names[:count]
        if not taken & set(few) and size % math.prod(mesh.shape[name] for name in few) == 0:
            return few
    return ()


def _rule(site: Site[Call], mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return the division as a rule of Shardy: axes of different arrays that are one factor.

    An axis that cannot be divided is a separate factor.
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
    """Return the factor of an axis of ``count`` heads.

    Query heads are kv heads times a group. A single kv head is no factor that query
    heads could share.
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
