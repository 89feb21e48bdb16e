"""A feature in the tiled NumPy code: its changes to a tile of scores or weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Given", "HostPart", "Kept", "Partial", "ScorePlace", "SlopeTerm", "Term"]

#: Constants, numbers and arrays of one use, by name; arrays are as the call gave them.
Given: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class ScorePlace:
    """The position of a tile of scores (batch, kv head, key, head of the group, query).

    Every array broadcasts against the scores.

    Attributes
    ----------
    batch
        Batch entry, (batch, 1, 1, 1, 1).
    head
        Query head, (1, kv head, 1, head of the group, 1).
    i, j
        Query, (query,), and key, (key, 1, 1).
    """

    batch: npt.NDArray[np.intp]
    head: npt.NDArray[np.intp]
    i: npt.NDArray[np.intp]
    j: npt.NDArray[np.intp]


#: Changes scores in place. They are in natural units, ``scale * q k^T``. A term adds a number that
#: does not depend on the score (so its slope is 1), or sets minus infinity, which hides a pair. A
#: number may have been subtracted from all scores of a row. A row whose pairs are all hidden is
#: dead, as under a mask. With sinks it still has a weight: its q and dout must then be finite.
Term: TypeAlias = Callable[[npt.NDArray[Any], ScorePlace, Given], None]

#: Changes scores in place by a function of them; returns the slopes at the old scores.
SlopeTerm: TypeAlias = Callable[[npt.NDArray[Any], ScorePlace, Given], npt.NDArray[Any]]

#: The derivative of scores by a term's number for each head; broadcasts against them.
Partial: TypeAlias = Callable[[ScorePlace, Given], npt.NDArray[Any]]

#: The pairs that keep their weights, as booleans that broadcast against the scores. Kept weights
#: are multiplied by the number ``inverse_keep`` of the use.
Kept: TypeAlias = Callable[[ScorePlace, Given], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class HostPart:
    """A feature's additions to the tiled NumPy code; they mirror seams of the device.

    Attributes
    ----------
    score
        Changes scores: the seam "Score".
    with_slope
        The same for the backward pass of a function of the scores; None for a term whose slope is
        1.
    partial
        For a term whose operand has a number for each head, and a gradient.
    kept
        The weights that are kept after the softmax: the seam "Weights".
    """

    score: Term | None = None
    with_slope: SlopeTerm | None = None
    partial: Partial | None = None
    kept: Kept | None = None
