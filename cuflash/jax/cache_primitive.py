"""Attention over caches as a primitive of JAX, which has neither derivatives nor a mapped axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..errors import UnsupportedError
from .cached import CachedCall
from .lowering import eager, lower
from .types import joined, whole_types

__all__ = ["run_cached"]

_primitive = Primitive("cuflash_attention_with_kvcache")
_primitive.multiple_results = True


def run_cached(call: CachedCall, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Run a pass, and return its results by name.

    Parameters
    ----------
    call
        The pass.
    arrays
        Its arguments, JAX's arrays or tracers, in their order.
    """
    results = _primitive.bind(*joined(list(arrays.values())), call=call)
    return dict(zip(call.results, results, strict=True))


def _refuse_derivatives(*_: Any, call: CachedCall) -> Any:
    raise UnsupportedError(
        f"{call.function} has no derivatives: caches have no gradient. Use cuflash.jax.attention "
        "for what is differentiated, or jax.lax.stop_gradient of the arguments"
    )


def _refuse_mapped(*_: Any, call: CachedCall) -> Any:
    raise UnsupportedError(
        f"jax.vmap of {call.function}: its arrays have a batch axis, which is what you would map: "
        "pass the arrays whole"
    )


def _types(*arrays: Any, call: CachedCall) -> list[Any]:
    return whole_types(call, arrays, call.results_of(arrays))


_primitive.def_impl(eager(_primitive))
_primitive.def_abstract_eval(_types)
ad.primitive_jvps[_primitive] = _refuse_derivatives
batching.primitive_batchers[_primitive] = _refuse_mapped
mlir.register_lowering(_primitive, lower)
