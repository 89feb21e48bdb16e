"""Which entries of a batch share one of an array that broadcasts.

The mapped axes of :func:`jax.vmap` and the batch are one batch where a pass
runs. Such an array may have 1 in place of any of them, and is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["holes", "sharing"]


def holes(own: Sequence[int], full: Sequence[int]) -> list[int]:
    """Axes that an array lacks between two that it has: no number of neighbours says that.

    Parameters
    ----------
    own, full
        Sizes of the mapped axes and of the batch, of the array and of the queries.
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
    """How many neighbours share an entry of an array, and of its gradient, as the options say it.

    None where they need not say it: the array has one entry for all or one for
    each, and the gradient has as many. The gradient has every mapped axis, and
    of the batch what the array has.

    Parameters
    ----------
    own, full
        As of :func:`holes`, of an array that has none.
    differentiated
        Whether there is a gradient.
    """
    batch, entries = math.prod(full), math.prod(own)
    if not batch:
        return None
    has = [axis for axis, size in enumerate(own) if size > 1]
    of_array = math.prod(full[has[-1] + 1 :]) if has else 1
    of_gradient = full[-1] if own[-1] == 1 else 1
    plain = entries in (1, batch) and not (differentiated and batch // of_gradient != entries)
    return None if plain else (of_array, of_gradient)
