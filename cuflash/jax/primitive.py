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

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .call import Call
from .device import prepare_device
from .host import prepare_host

__all__ = ["run"]

_primitive = Primitive("cuflash_attention")
_primitive.multiple_results = True


def run(call: Call, *arrays: Any) -> list[Any]:
    """One pass over JAX arrays or tracers.

    Parameters
    ----------
    call
        The pass.
    *arrays
        q, k and v (forward), or dout, q, k, v, out, lse and perhaps dlse
        (backward), in the layout "bshd".

    Returns
    -------
    list
        Out and lse, or dq, dk and dv.
    """
    results: list[Any] = _primitive.bind(*arrays, call=call)
    return results


def _shapes(*arrays: Any, call: Call) -> list[Any]:
    return [jax.core.ShapedArray(shape, jnp.dtype(kind)) for shape, kind in call.results_of(arrays)]


def _eagerly(*arrays: Any, call: Call) -> list[Any]:
    """Outside of every transformation: compiled all the same, for where the arrays are."""
    with jax.disable_jit(False):
        results: list[Any] = _compiled(call, *arrays)
    return results


_compiled = jax.jit(run, static_argnums=0)


def _batch(
    arrays: Sequence[Any], axes: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    """:func:`jax.vmap`: the mapped axis becomes the outer part of the batch.

    What is not mapped is repeated for each entry: XLA's buffers have no
    strides, and a kernel reads every batch entry at a place of its own.
    """
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    whole = [
        jnp.broadcast_to(array, (size, *array.shape))
        if axis is None
        else jnp.moveaxis(array, axis, 0)
        for array, axis in zip(arrays, axes, strict=True)
    ]
    batch = whole[0].shape[1]
    folded = [array.reshape(size * batch, *array.shape[2:]) for array in whole]
    results = [array.reshape(size, batch, *array.shape[1:]) for array in run(call, *folded)]
    return results, [0] * len(results)


def _on_host(*arrays: Any, call: Call) -> list[Any]:
    return _callback(prepare_host(call, arrays), 0, arrays, call)


def _on_device(*arrays: Any, call: Call) -> list[Any]:
    prepared = prepare_device(call, arrays)
    return _callback(prepared, prepared.scratch_bytes, arrays, call)


def _callback(
    function: Callable[..., None], scratch_bytes: int, arrays: Sequence[Any], call: Call
) -> list[Any]:
    """The call of a pass's callback in the computation.

    Its workspace is one more result, which nothing reads: XLA plans memory for
    it as for any other, and the callback has nothing to allocate.
    """
    wanted = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in call.results_of(arrays)]
    if all(0 in result.shape for result in wanted):
        return [jnp.zeros(result.shape, result.dtype) for result in wanted]
    scratch = [jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8)] if scratch_bytes else []
    fill = buffer_callback(function, [*wanted, *scratch], command_buffer_compatible=True)
    results: list[Any] = fill(*arrays)[: len(wanted)]
    return results


_primitive.def_impl(_eagerly)
_primitive.def_abstract_eval(_shapes)
batching.primitive_batchers[_primitive] = _batch
for _platform, _lowered in (("cpu", _on_host), ("cuda", _on_device)):
    mlir.register_lowering(
        _primitive, mlir.lower_fun(_lowered, multiple_results=True), platform=_platform
    )
