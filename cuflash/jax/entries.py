"""The entries of a batch that share an entry of an array that broadcasts.

A pass runs over one batch, made of the mapped axes of :func:`jax.vmap` and the
batch. An array that broadcasts may have 1 for any of these axes, and is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["holes", "sharing"]


def holes(own: Sequence[int], full: Sequence[int]) -> list[int]:
    """Return the axes that an array lacks between two that it has.

    :func:`sharing` cannot describe such an array by a number of neighbours.

    Parameters
    ----------
    own, full
        Sizes of the mapped axes and of the batch axis: of the array (``own``), and of the
        queries (``full``).
    """
    has = [axis for axis, size in enumerate(own) if size > 1]
    return [
        axis
        for axis, size in enumerate(full)
        if size > 1 and own[axis] == 1 and has and has[0] < axis < has[-1]
    ]


def sharing(
    own: Sequence[int], full: Sequence[int], differentiated: bool
) -> tuple[int, int] | None:
    """Return how many neighbours share an entry of an array, and an entry of its gradient.

    None if the array has one entry for the whole batch or one for each batch entry, and
    its gradient, if the pass computes it, has as many: the options then need no numbers.
    The gradient has every mapped axis, and the array's batch axis.

    Parameters
    ----------
    own, full
        As for :func:`holes`, for an array without holes.
    differentiated
        Whether the pass computes its gradient.
    """
    batch, entries = math.prod(full), math.prod(own)
    if not batch:
        return None
    has = [axis for axis, size in enumerate(own) if size > 1]
    of_array = math.prod(full[has[-1] + 1 :]) if has else 1
    of_gradient = full[-1] if own[-1] == 1 else 1
    plain = entries in (1, batch) and not (differentiated and batch // of_gradient != entries)
    return None if plain else (of_array, of_gradient)
