"""How a feature enters the tiled NumPy code: what it changes of a tile of scores or weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Given", "HostPart", "Kept", "Partial", "ScorePlace", "SlopeTerm", "Term"]

#: Of one use by name: its constants, its numbers, and its arrays as the call gave them.
Given: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class ScorePlace:
    """Where scores (batch, head of the keys, key, head of the group, query) stand.

    Every array broadcasts against the scores.

    Attributes
    ----------
    batch
        Entry of the batch, (batch, 1, 1, 1, 1).
    head
        Head of the queries, (1, head of the keys, 1, head of the group, 1).
    i, j
        Query, (query,), and key, (key, 1, 1).
    """

    batch: npt.NDArray[np.intp]
    head: npt.NDArray[np.intp]
    i: npt.NDArray[np.intp]
    j: npt.NDArray[np.intp]


#: Changes scores in place. They are in natural units, ``scale * q k^T``. A term adds what does not
#: depend on them (so its slope is 1), or sets minus infinity, which hides a pair; scores may then
#: lack a number that is the same for all of a row. A row whose pairs are all hidden is dead, as
#: under a mask. With sinks it has a weight all the same: the caller's q and dout of such a row have
#: to be finite then.
Term: TypeAlias = Callable[[npt.NDArray[Any], ScorePlace, Given], None]

#: Changes scores in place by a function of them; its slope at what they were.
SlopeTerm: TypeAlias = Callable[[npt.NDArray[Any], ScorePlace, Given], npt.NDArray[Any]]

#: The derivative of scores by the number that a term has for each head; broadcasts against them.
Partial: TypeAlias = Callable[[ScorePlace, Given], npt.NDArray[Any]]

#: Which pairs keep their weights, as booleans that broadcast against the scores. What is kept is
#: multiplied by the number ``inverse_keep`` of the use.
Kept: TypeAlias = Callable[[ScorePlace, Given], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class HostPart:
    """What a feature adds to the tiled NumPy code; the twin of seams of the device.

    Attributes
    ----------
    score
        What it does to scores: the seam "Score".
    with_slope
        The same for the backward pass, of a function of the scores; None of a
        term whose slope is 1.
    partial
        Of a term whose operand has a number for each head, and a gradient.
    kept
        What it leaves of the weights, after the softmax: the seam "Weights".
    """

    score: Term | None = None
    with_slope: SlopeTerm | None = None
    partial: Partial | None = None
    kept: Kept | None = None
