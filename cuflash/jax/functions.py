"""A function of scores under JAX: a pytree whose arrays are leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..features.score_text import PLACE, uses
from ..score_mod import ScoreMod, with_arrays
from .arguments import as_array
from .call import Call

__all__ = ["with_function"]


def with_function(
    arrays: dict[str, Any], call: Call, score_mod: Any
) -> tuple[dict[str, Any], Call]:
    """Return the arrays of a call with those of its function of scores, and the call for them.

    A function that reads the entry or the head also takes an array with the first
    entry and head, which differ between parts of divided arrays.
    """
    score, given = with_arrays(score_mod)
    if score is None:
        return arrays, call
    arrays = {**arrays, **{name: as_array("score_mod", array) for name, array in given.items()}}
    if score.numpy is not None or uses(score.text, "batch", "head"):
        arrays[PLACE] = jnp.zeros(2, jnp.uint32)
        call = call.counting(arrays["q"].shape[-2])
    return arrays, call


jax.tree_util.register_pytree_node(
    ScoreMod,
    lambda score_mod: (score_mod.parts[1], score_mod.parts[0]),
    lambda score, arrays: ScoreMod.of(score, tuple(arrays)),
)
