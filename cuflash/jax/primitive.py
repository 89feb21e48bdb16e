"""The two passes as one primitive of JAX: shapes, batching, and what each platform runs.

A primitive of our own rather than :func:`jax.lax.platform_dependent` over
callbacks. That one traces the branch of every platform wherever it is used, so
that a computation on the CPU would plan and compile CUDA kernels, and fail
where they cannot be had. A lowering rule is asked only for the platform that a
computation is compiled for, whatever is installed, and is where an error can
still be raised as itself. A batching rule composes with :func:`jax.custom_vjp`
in either order; :func:`jax.custom_batching.custom_vmap` would have to be
wrapped around each pass to do so.
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
from .partition import compute_divided
from .site import TARGETS, Site
from .types import filled, joined, repeated, result_types, with_heads, without_heads

try:
    # custom_partitioning has to know the devices. It says so here of its own primitive.
    from jax._src.dispatch import prim_requires_devices_during_lowering
except ImportError:  # elsewhere in another JAX: then divided arrays are gathered
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
        Its arguments by the names of their tensors, in the layout "bshd", each
        that has a batch with the axes of :func:`jax.vmap` before it.

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


def _eagerly(*arrays: Any, call: Call) -> list[Any]:
    """Outside of every transformation: compiled all the same, for where the arrays are."""
    with jax.disable_jit(False):
        results: list[Any] = _compiled(call, *arrays)
    return results


def _bound(call: Call, *arrays: Any) -> list[Any]:
    results: list[Any] = _primitive.bind(*arrays, call=call)
    return results


_compiled = jax.jit(_bound, static_argnums=0)


def _batch(
    arrays: Sequence[Any], axes: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    """:func:`jax.vmap`: the mapped axis stands before the batch, and joins it where a pass runs.

    What is not mapped is repeated for each entry: XLA's buffers have no
    strides, and a kernel reads every batch entry at a place of its own. An
    array that broadcasts has an axis of 1 instead. What all batch entries share
    cannot be mapped so: then each mapped entry has heads of its own. A mapped
    seed takes a pass for each entry, and so do mapped lengths beside those heads,
    and packed sequences.
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
        return _one_by_one(arrays, axes, call)  # lengths, which heads of one entry share
    else:
        results = _by_heads(call, named, is_mapped, like)
    return results, [0] * len(results)


def _one_by_one(
    arrays: Sequence[Any], axes: Sequence[int | None], call: Call
) -> tuple[list[Any], list[int]]:
    """The same by a pass for each entry, where each has numbers that a whole pass shares."""
    named, of = call.named(arrays), call.named(axes)
    moved = {
        name: jnp.moveaxis(named[name], axis, 0) for name, axis in of.items() if axis is not None
    }

    def one(mapped: Mapping[str, Any]) -> list[Any]:
        return list(run(call, {**named, **mapped}).values())

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


def _without_holes(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a pass, those that broadcast repeated along axes between two they have."""
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
    """The results of a pass whose mapped entries have heads of their own.

    Parameters
    ----------
    call
        The pass of one entry.
    arrays
        Its arguments by name, the mapped axis of those that have it first.
    is_mapped
        Which have it.
    like
        One that has it.
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
        if one and not mapped and name not in wanted:  # one head for all, of every entry
            heads[name] = array
            continue
        whole = array if mapped else repeated(array, size, like)
        if one:  # heads of one entry share it: there is no stride for that, and each has a copy
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
    """The axis of heads of a tensor, or an error if it has none."""
    axis = free_axes(name, mapped).get(HEADS)
    if axis is None:
        raise UnsupportedError(f"jax.vmap over {name}, which all entries and heads share")
    return axis


def _lower(context: Any, *values: Any, call: Call) -> Any:
    """What a pass is in a computation for one platform."""
    module = context.module_context
    _refuse_elsewhere(module)
    _refuse_half_manual(module.axis_context)
    batch = call.named(context.avals_in)["q"].shape[: call.mapped(context.avals_in) + 1]
    if 0 in batch or all(0 in kind.shape for kind in context.avals_out):
        return mlir.lower_fun(_nothing, multiple_results=True)(context, *values, call=call)
    site = Site(call, module.platforms[0])
    site.prepare(context.avals_in)
    divided = _is_divided(module.axis_context)
    if site.is_native and not (divided and _may_be_taken()):
        module.add_keepalive(site)  # refuses to be serialised
    else:
        module.add_host_callback(site)
        site.index = len(module.host_callbacks) - 1
    compute = functools.partial(compute_divided, site) if divided else site.compute
    return mlir.lower_fun(compute, multiple_results=True)(context, *values)


def _nothing(*arrays: Any, call: Call) -> list[Any]:
    """Results without elements, or of no entries: nothing is called for them."""
    return [jnp.zeros(shape, kind) for shape, kind in call.results_of(arrays)]


def _refuse_elsewhere(module: Any) -> None:
    """Raise unless the computation is compiled here and now, for CPU or CUDA."""
    if getattr(module.lowering_parameters, "for_export", False):
        raise UnsupportedError(
            "jax.export cannot take cuflash.jax.attention: what is exported runs in other "
            "processes, and the kernels are in this one; "
            "export the model with jax.nn.dot_product_attention"
        )
    platforms = tuple(module.platforms)
    if len(platforms) > 1 or platforms[0] not in TARGETS:
        raise UnsupportedError(
            f"cuflash.jax.attention is compiled for one platform, cpu or cuda; "
            f"this computation is for {', '.join(platforms)}: "
            "use jax.nn.dot_product_attention there"
        )


def _refuse_half_manual(where: Any) -> None:
    """Raise where the older partitioner of XLA would end the process."""
    manual: frozenset[Any] = getattr(where, "manual_axes", frozenset())
    half = manual and manual != frozenset(where.mesh.axis_names)
    if half and not jax.config.jax_use_shardy_partitioner:
        raise UnsupportedError(
            "cuflash.jax.attention inside jax.shard_map over some axes of the mesh only needs "
            "the Shardy partitioner (jax_use_shardy_partitioner); "
            "name all axes of the mesh in axis_names"
        )


def _is_divided(where: Any) -> bool:
    """Whether XLA divides the computation over devices.

    Inside :func:`jax.shard_map` the caller has. If only over some axes of the
    mesh, XLA could still divide over the others, but JAX cannot be asked how
    arrays are divided there.
    """
    return len(getattr(where, "device_assignment", None) or ()) > 1


def _may_be_taken() -> bool:
    """Whether JAX may take a divided computation from another process, compiled.

    The launch tables of the parts are made when XLA compiles it and says what
    they are. What has a callback JAX compiles in every process.
    """
    names = ("remove_custom_partitioning_ptr_from_cache_key", "share_binary_between_hosts")
    return any(getattr(jax.config, f"jax_{name}", False) for name in names)


_primitive.def_impl(_eagerly)
_primitive.def_abstract_eval(_types)
ad.primitive_jvps[_primitive] = _refuse_derivatives
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, _lower)
prim_requires_devices_during_lowering.add(_primitive)
