"""Passes over arrays divided over four devices of the CPU, compared with whole arrays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from .jax_case import alike, jax

__all__ = [
    "FREE",
    "GROUPED",
    "SINGLE",
    "WHOLE",
    "P",
    "attention_pass",
    "entries",
    "place",
    "run_divided",
]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

P = jax.sharding.PartitionSpec
COLLECTIVE = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter")
#: Shapes with eight heads, which the queries have, with four heads, and with one head.
WHOLE, GROUPED, SINGLE = (4, 6, 8, 8), (4, 6, 4, 8), (4, 6, 1, 8)
#: How the query, key, value and output are divided.
FREE = [
    P("x"),
    P(("x", "y")),
    P(("y", "x")),
    P(None, None, "x"),
    P(None, None, ("x", "y")),
    P("x", None, "y"),
    P("y", None, "x"),
]


def attention_pass(name: str) -> Any:
    """The forward pass, or the gradients of a loss of out ("dout"), of lse ("dlse") or of both."""
    if name == "forward":
        return lambda *qkv: attention(*qkv, is_causal=True, return_lse=True)

    def product(q: Any, k: Any, v: Any) -> Any:
        out, lse = attention(q, k, v, is_causal=True, return_lse=True)
        used = {"dout": (out,), "dlse": (lse,), "both": (out, lse)}[name]
        return sum((result * result).sum() for result in used)

    return jax.grad(product, (0, 1, 2))


def place(mesh: Any, arrays: Any, specs: Any) -> list[Any]:
    return [
        jax.device_put(np.asarray(array), jax.sharding.NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]


def run_divided(function: Any, mesh: Any, arrays: Any, specs: Any) -> tuple[list[Any], list[str]]:
    """Run a function on divided arrays, and check that whole arrays give almost the same results.

    Returns the results, and the names of the collectives in the compiled text.
    """
    divided = place(mesh, arrays, specs)
    compiled = jax.jit(function).lower(*divided).compile()
    results = jax.tree.leaves(compiled(*divided))
    for got, expected in zip(results, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        alike(got, expected)
    return results, COLLECTIVE.findall(compiled.as_text())


def entries(spec: Any, ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))
