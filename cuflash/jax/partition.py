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
    divided = _division(site.call, mesh, operands)
    return [_sharding(mesh, site.call, divided, operands, array) for array in results]


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
        given = [_names(array, free_axes(mapped, len(array.shape))[place]) for array in arrays]
        fitting = [_fitting(mesh, names, key.shape[axis], taken) for names in given]
        divided.append(next((names for names in fitting if names), None))
    return divided


def _names(array: Any, axis: int) -> tuple[Any, ...]:
    """Axes of the mesh over which an axis of an array is divided, as XLA suggests."""
    if not isinstance(array.sharding, NamedSharding):
        return ()
    spec = array.sharding.spec
    names = spec[axis] if axis < len(spec) else None
    return () if names is None else names if isinstance(names, tuple) else (names,)


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
    factor = _head_factors(mesh, heads["q"], heads["k"])
    own = itertools.count()
    mappings = []
    for name, kind in named:
        *batch, last = free_axes(call.mapped(operands), len(kind.shape))
        factors: list[Any] = [f"own{next(own)}" for _ in kind.shape]
        for axis in batch:
            factors[axis] = f"batch{axis}"
        factors[last] = factor[heads[name]]
        mappings.append(tuple(factors))
    sizes = {"group": heads["q"] // heads["k"]} if "group" in factor[heads["q"]] else {}
    split = len(operands)
    return SdyShardingRule(tuple(mappings[:split]), tuple(mappings[split:]), **sizes)


def _head_factors(mesh: Mesh, heads_q: int, heads_kv: int) -> dict[int, Any]:
    """The factor of an axis of heads, by how many there are.

    The heads of queries are those of keys and, within each, a group. Shardy
    divides a factor over a part of a mesh axis where it is too small for the
    whole one, and JAX has no name for such a part. So where that could happen
    the heads of queries are a factor by themselves.
    """
    sizes = mesh.shape.values()
    whole = all(heads_kv % size == 0 or math.gcd(heads_kv, size) == 1 for size in sizes)
    linked = heads_q > heads_kv > 1 and whole
    of_queries = CompoundFactor("heads", "group") if linked else "heads of queries"
    return {heads_q: of_queries, heads_kv: "heads"}


compute_divided.def_partition(
    partition=_partition, infer_sharding_from_operands=_infer_results, sharding_rule=_rule
)
