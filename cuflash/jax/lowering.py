"""Lowers a pass to a part of a computation for one platform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ..errors import UnsupportedError
from .passes import Pass
from .site import TARGETS, Site

__all__ = ["eager", "lower"]


def eager(primitive: Primitive) -> Callable[..., list[Any]]:
    """Return the function that runs a primitive outside of jax.jit: it is compiled too."""

    def bound(call: Pass, *arrays: Any) -> list[Any]:
        results: list[Any] = primitive.bind(*arrays, call=call)
        return results

    compiled = jax.jit(bound, static_argnums=0)

    def eagerly(*arrays: Any, call: Pass) -> list[Any]:
        with jax.disable_jit(False):
            results: list[Any] = compiled(call, *arrays)
        return results

    return eagerly


def lower(context: Any, *values: Any, call: Pass, divided: Callable[..., Any] | None = None) -> Any:
    """Return the lowered values of a pass in a computation for one platform.

    Parameters
    ----------
    context, values
        Context and values of the lowering.
    call
        The pass.
    divided
        Computes the pass from its :class:`~.site.Site` and arrays that XLA may divide
        over devices; None if divided arrays are gathered first.
    """
    module = context.module_context
    _refuse_elsewhere(module, call.function)
    _refuse_half_manual(module.axis_context, call.function)
    empty = all(0 in kind.shape for kind in context.avals_out)
    if empty or 0 in call.entries(context.avals_in):
        return mlir.lower_fun(_nothing, multiple_results=True)(context, *values, call=call)
    site = Site(call, module.platforms[0])
    site.prepare(context.avals_in)
    parts = divided is not None and _is_divided(module.axis_context)
    if site.is_native and not (parts and _may_be_taken()):
        module.add_keepalive(site)  # the site refuses serialisation
    else:
        module.add_host_callback(site)
        site.index = len(module.host_callbacks) - 1
    compute = functools.partial(divided, site) if divided and parts else site.compute
    return mlir.lower_fun(compute, multiple_results=True)(context, *values)


def _nothing(*arrays: Any, call: Pass) -> list[Any]:
    """Return results without elements or entries, which need no call."""
    made = [jnp.zeros(shape, kind) for shape, kind in call.results_of(arrays)]
    for argument, result in call.aliases.items():
        made[result] = arrays[argument]
    return made


def _refuse_elsewhere(module: Any, function: str) -> None:
    """Raise unless the computation is compiled in this process, for CPU or CUDA."""
    if getattr(module.lowering_parameters, "for_export", False):
        raise UnsupportedError(
            f"jax.export cannot take {function}: what is exported runs in other "
            "processes, and the kernels are in this one; "
            "export the model with jax.nn.dot_product_attention"
        )
    platforms = tuple(module.platforms)
    if len(platforms) > 1 or platforms[0] not in TARGETS:
        raise UnsupportedError(
            f"{function} is compiled for one platform, cpu or cuda; "
            f"this computation is for {', '.join(platforms)}: "
            "use jax.nn.dot_product_attention there"
        )


def _refuse_half_manual(where: Any, function: str) -> None:
    """Raise where the older partitioner of XLA would abort the process."""
    manual: frozenset[Any] = getattr(where, "manual_axes", frozenset())
    half = manual and manual != frozenset(where.mesh.axis_names)
    if half and not jax.config.jax_use_shardy_partitioner:
        raise UnsupportedError(
            f"{function} inside jax.shard_map over some axes of the mesh only needs "
            "the Shardy partitioner (jax_use_shardy_partitioner); "
            "name all axes of the mesh in axis_names"
        )


def _is_divided(where: Any) -> bool:
    """Return whether XLA divides the computation over devices.

    Inside :func:`jax.shard_map` the caller has divided it. If the caller names only
    some axes of the mesh, XLA could divide over the others, but JAX does not tell how
    arrays are divided over them.
    """
    return len(getattr(where, "device_assignment", None) or ()) > 1


def _may_be_taken() -> bool:
    """Return whether JAX may take a compiled divided computation from another process.

    The launch tables of the parts are made when XLA compiles the computation. A
    computation with a Python callback is compiled in every process.
    """
    names = ("remove_custom_partitioning_ptr_from_cache_key", "share_binary_between_hosts")
    return any(getattr(jax.config, f"jax_{name}", False) for name in names)
