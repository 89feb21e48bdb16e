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
#: Shapes of a mask: each axis has its whole size or 1, and the first axes may be left out.
KINDS = [
    *itertools.product(*[(size, 1) for size in WHOLE]),
    *[WHOLE[lacking:] for lacking in range(1, 5)],
    (1, 11),
    (4, 1, 1),
]


def draw_mask(shape: tuple[int, ...], seed: int = 0, share: float = 0.6) -> Any:
    """A random mask: ``share`` of it is True, except for some rows and keys that are all False."""
    rng = np.random.default_rng(seed)
    seen = np.asarray(rng.random(shape) < share)
    if len(shape) > 1:
        *ahead, rows, keys = shape
        seen &= (rows == 1) | (rng.random((*ahead, rows, 1)) < 0.85)
        seen &= (keys == 1) | (rng.random((*ahead, 1, keys)) < 0.85)
    return jnp.asarray(seen)


def pulled(function: Any, wanted: tuple[int, ...] = QKV, **options: Any) -> Any:
    """A function that returns gradients of a loss of both results with a mask, and the results."""

    def loss(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        out, lse = function(q, k, v, mask=mask, return_lse=True, **options, **more)
        given = jnp.sin(2 * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()
        return given, (out, lse)

    return jax.grad(loss, wanted, has_aux=True)


def each_entry(
    arrays: Sequence[Any], axes: Sequence[int | None], size: int, **options: Any
) -> tuple[Any, Any]:
    """The formula's gradients and results for every mapped entry, stacked."""
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
    """The numbers of batch entries in the masks of the passes.

    A number above that of the given mask shows that the mask was repeated.
    """
    return {problem.operands["mask"].pairs[0] for problem in problems}
