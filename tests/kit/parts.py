"""Plans of FlashAttention-3's gradients with a given number of blocks for a kv tile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import calls
from cuflash.planning import fa3
from cuflash.planning.key_parts import Parts
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3 import Fa3BackwardTile

__all__ = ["parts_forced"]


@contextmanager
def parts_forced(number: int, cut: bool = False, last: int = 0) -> Iterator[None]:
    """Use this many parts of every group of query heads, or the nearest divisor of the group.

    With ``cut`` this many blocks cut the steps of every kv tile, with ``last`` too only of so
    many of the last kv tiles: of no more than there are or run at a time, and without a mask. By
    default problems with enough tiles use one part, and small problems several.
    """

    def parts_of(problem: AttentionProblem, tile: Fa3BackwardTile, at_once: int) -> Parts:
        tiles = problem.tiles(problem.seqlen_kv, tile.block_kv)
        every = problem.batch * problem.heads_kv * tiles
        of_last = min(last, every, at_once) if problem.mask == "full" else 0
        return Parts(number, True, of_last) if cut else Parts(math.gcd(number, problem.group))

    with mock.patch.object(fa3, "parts_of", parts_of):
        calls.forget()
        yield
    calls.forget()
