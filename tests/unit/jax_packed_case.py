"""Packed sequences in JAX, and a loop over them that JAX itself differentiates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from .jax_case import formula, jax, jnp, loss

__all__ = ["HEADS", "KV", "LENGTHS", "SINKS", "Q", "looped", "offsets", "pulled"]

#: Queries and keys of every sequence. Some have no queries or no keys, and some have more queries
#: than keys.
LENGTHS = ((5, 6), (0, 3), (2, 0), (9, 4), (3, 12))
#: Shapes of q, and of k and v. The last rows belong to no sequence.
Q, KV = (20, 4, 8), (28, 2, 8)
HEADS = SINKS = (4,)


def offsets(lengths: Any = LENGTHS) -> dict[str, Any]:
    """The offsets of sequences of these lengths."""
    ends = np.cumsum([(0, 0), *lengths], axis=0).T
    named = zip(("cu_seqlens_q", "cu_seqlens_kv"), ends, strict=True)
    return {name: jnp.asarray(at, "int32") for name, at in named}


def _rows(at: Any) -> list[slice]:
    return [slice(int(begin), int(end)) for begin, end in pairwise(at)]


def looped(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    left: Any = None,
    table: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of each sequence by its definition.

    ``left`` holds dropout's factors for the weights of each sequence. ``table`` holds factors for
    the scores of each sequence and head; with a table, a cosine of the distance is added to them.
    """
    out = jnp.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    lse = jnp.full(q.shape[1::-1], -jnp.inf, q.dtype)
    for number, (i, j) in enumerate(zip(_rows(cu_seqlens_q), _rows(cu_seqlens_kv), strict=True)):
        rows, keys = i.stop - i.start, j.stop - j.start
        if not rows or not keys:
            if "sinks" in options:
                lse = lse.at[:, i].set(options["sinks"][:, None])
            continue
        more = dict(options)
        own = q[i]
        if left is not None:
            more["left"] = left[number][:, :rows, :keys]
        if table is not None:
            own = own * table[number][:, None]
            distances = keys - rows + np.arange(rows)[:, None] - np.arange(keys)
            more["bias"] = jnp.cos(jnp.asarray(distances, q.dtype))[None]
        found = formula(own, k[j], v[j], return_lse=True, **more)
        out, lse = out.at[i].set(found[0]), lse.at[:, i].set(found[1])
    return (out, lse) if return_lse else out


def pulled(
    function: Callable[..., Any], names: tuple[str, ...] = (), **options: Any
) -> Callable[..., Any]:
    """A function that returns a loss of both results, the results, and gradients of all arrays.

    It takes a sequence of q, k, v and the arrays in ``names``, and the offsets.
    """

    def total(arrays: Any, at: Any) -> Any:
        q, k, v, *others = arrays
        more = dict(zip(names, others, strict=True))
        out, lse = function(q, k, v, return_lse=True, **at, **options, **more)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return loss(lambda: (out, seen))(), (out, lse)

    def of(arrays: Any, at: Any) -> Any:
        return jax.value_and_grad(total, has_aux=True)(tuple(arrays), at)

    return of
