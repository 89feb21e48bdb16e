"""Calls of ``cuflash.jax`` with a bias, and the results that the formula gives."""

from __future__ import annotations

import functools
from typing import Any

from cuflash import dispatch

from .jax_case import formula, jax, jnp

__all__ = ["ALL", "FEW", "KV", "WHOLE", "Q", "expected", "four", "observed", "pulled", "total"]

Q, KV = (3, 7, 4, 8), (3, 11, 2, 8)
WHOLE = (3, 4, 7, 11)
ALL = (0, 1, 2, 3)
#: Shapes of a bias, one for each way to sum its gradient.
FEW = [WHOLE, (1, 1, 7, 11), (3, 1, 1, 11), (7, 1)]


def _loss(function: Any, **options: Any) -> Any:
    def of(q: Any, k: Any, v: Any, bias: Any, *others: Any) -> Any:
        more = {"sinks": others[0]} if others else {}
        out, lse = function(q, k, v, bias, return_lse=True, **options, **more)
        given = jnp.sin(2 * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()
        return given, (out, lse)

    return of


def total(function: Any, **options: Any) -> Any:
    """A function that returns a loss of the output and of the log-sum-exp."""
    return lambda *arrays: _loss(function, **options)(*arrays)[0]


def pulled(function: Any, wanted: tuple[int, ...] = ALL, **options: Any) -> Any:
    """A function that returns the gradients of :func:`total`, and both results."""
    return jax.grad(_loss(function, **options), wanted, has_aux=True)


@functools.cache
def _of_formula(mapped: int, options: tuple[tuple[str, Any], ...]) -> Any:
    function = pulled(formula, **dict(options))
    for _ in range(mapped):
        function = jax.vmap(function)
    return jax.jit(function)


def expected(
    *arrays: Any, axes: tuple[int, ...], full: tuple[int, ...], **options: Any
) -> tuple[list[Any], Any]:
    """The gradients and results that the formula gives for every mapped entry.

    ``axes`` is the shape of the bias with as many axes as ``full``. The formula takes the bias
    repeated to ``full``. The gradient is summed to ``axes``, except along the mapped axes.
    """
    *qkv, bias = arrays
    mapped = len(full) - 4
    whole = jnp.broadcast_to(bias.reshape(axes), full)
    (*gradients, dbias), results = _of_formula(mapped, tuple(options.items()))(*qkv, whole)
    lacking = [axis for axis in range(mapped, len(full)) if axes[axis] == 1]
    return [*gradients, dbias.sum(lacking, keepdims=True)], results


def four(kind: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a bias with all four axes."""
    return (1,) * (4 - len(kind)) + kind


def observed(function: Any, *arrays: Any) -> tuple[Any, list[Any]]:
    """The result of a function, and the problems of the passes that ran."""
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        results = jax.block_until_ready(function(*arrays))
    return results, [plan.problem for plan in ran]
