"""Calls of ``cuflash.jax`` with a mask, and masks of every shape."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .jax_bias_case import KV, WHOLE, Q, four, observed
from .jax_case import formula, jax, jnp

__all__ = [
    "KINDS",
    "KV",
    "QKV",
    "WHOLE",
    "Q",
    "draw_mask",
    "each_entry",
    "four",
    "mask_batches",
    "observed",
    "pulled",
]

QKV = (0, 1, 2)
#: Every axis whole or 1, and the first ones left out.
KINDS = [
    *itertools.product(*[(size, 1) for size in WHOLE]),
    *[WHOLE[lacking:] for lacking in range(1, 5)],
    (1, 11),
    (4, 1, 1),
]


def draw_mask(shape: tuple[int, ...], seed: int = 0, share: float = 0.6) -> Any:
    """True for a share of pairs; some rows and some keys are hidden whole."""
    rng = np.random.default_rng(seed)
    seen = np.asarray(rng.random(shape) < share)
    if len(shape) > 1:
        *ahead, rows, keys = shape
        seen &= (rows == 1) | (rng.random((*ahead, rows, 1)) < 0.85)
        seen &= (keys == 1) | (rng.random((*ahead, 1, keys)) < 0.85)
    return jnp.asarray(seen)


def pulled(function: Any, wanted: tuple[int, ...] = QKV, **options: Any) -> Any:
    """Gradients of a number made of both results of a call with a mask, and the results."""

    def loss(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        out, lse = function(q, k, v, mask=mask, return_lse=True, **options, **more)
        given = jnp.sin(2 * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()
        return given, (out, lse)

    return jax.grad(loss, wanted, has_aux=True)


def each_entry(
    arrays: Sequence[Any], axes: Sequence[int | None], size: int, **options: Any
) -> tuple[Any, Any]:
    """Gradients and results by the formula, one mapped entry after another."""
    entries = []
    for index in range(size):
        own = [
            array if axis is None else jnp.take(array, index, axis)
            for array, axis in zip(arrays, axes, strict=True)
        ]
        entries.append(pulled(formula, **options)(*own))
    stacked: tuple[Any, Any] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)
    return stacked


def mask_batches(problems: Sequence[Any]) -> set[int]:
    """How many entries the masks of the passes have: more than were given are repeated ones."""
    return {problem.operands["mask"].pairs[0] for problem in problems}
