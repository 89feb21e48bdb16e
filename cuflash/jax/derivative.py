"""The pass with its derivative, as a function of JAX."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..errors import ArgumentValueError, UnsupportedError
from ..features.score_text import SLOTS
from .call import Call
from .primitive import run

__all__ = ["differentiable"]


def _mark(perturbed: Iterable[bool]) -> Any:
    """Return an array without elements whose last size encodes the wanted gradients.

    JAX requires the same structure of saved values in every trace, but shapes may
    differ between traces.
    """
    return jnp.zeros((0, sum(flag << i for i, flag in enumerate(perturbed))), bool)


def _marked(mark: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names whose gradients are wanted."""
    return tuple(name for i, name in enumerate(names) if mark.shape[-1] >> i & 1)


def _forward(arrays: dict[str, Any], call: Call) -> tuple[Any, Any]:
    results = run(call, arrays)
    return results["out"], results["lse"]


def _save(arrays: dict[str, Any], call: Call) -> tuple[Any, Any]:
    """Run the forward pass, and return its results and the arrays for the backward pass.

    Raises
    ------
    ArgumentValueError
        If the gradient of an array of a function of scores is asked for.
    """
    values = {name: array.value for name, array in arrays.items()}
    if any(arrays[name].perturbed for name in SLOTS if name in arrays):
        expected = "jax.lax.stop_gradient of them; an array that is added has one as bias"
        raise ArgumentValueError("score_mod", "arrays whose gradients are asked for", expected)
    mark = _mark(array.perturbed for array in arrays.values())
    results = run(call.saving, values)
    out = results["out"].astype(values["q"].dtype)
    return (out, results["lse"]), (mark, values, results)


def _pull_back(call: Call, saved: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any]:
    """Return the wanted gradients; None, which means zero, for the other arguments.

    If lse is not used, its gradient is symbolic zero and costs nothing.
    """
    mark, values, results = saved
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(results["out"], dout.dtype)  # divided as the output is
    given = {"dout": dout, **values, **results}
    if not isinstance(dlse, SymbolicZero):
        given["dlse"] = dlse
    gradients = run(call.backward(_marked(mark, values)), given)
    return ({name: gradients.get(f"d{name}") for name in values},)


_attention = jax.custom_vjp(_forward, nondiff_argnums=(1,))
_attention.defvjp(_save, _pull_back, symbolic_zeros=True)
# Without jax.jit, jax.shard_map refuses the function because of its symbolic zeros.
_compiled = jax.jit(_attention, static_argnums=1, inline=True)


def differentiable(arrays: dict[str, Any], call: Call) -> tuple[Any, Any]:
    """Run the pass; :func:`jax.grad` and :func:`jax.vjp` can take first derivatives of it.

    Raises
    ------
    UnsupportedError
        In forward mode. Inside :func:`jax.jit` JAX raises an error later.
    """
    try:
        out, lse = _compiled(arrays, call)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise UnsupportedError(
            "cuflash.jax.attention has no forward mode (jax.jvp, jax.jacfwd): "
            "use jax.grad, jax.vjp or jax.jacrev"
        ) from error
    return out, lse
