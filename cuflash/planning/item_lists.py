"""The tiles of packed sequences, listed before a pass, whose blocks take them in that order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .device import DeviceLimits
from .kernel import KernelLaunch, bare_config
from .problem import AttentionProblem
from .tiles import steps
from .tiles.common import Arithmetic

__all__ = ["ItemLists"]

#: Bytes of an item: a sequence and one of its tiles.
_ITEM_BYTES = 8


@dataclass(frozen=True)
class ItemLists:
    """Of a pass: nothing where no sequences are packed.

    Attributes
    ----------
    problem, limits, arithmetic
        Those of the pass.
    rows
        Of a tile: queries in a forward pass, keys in a backward pass.
    last_first
        Whether the last tile of a sequence comes first; of queries it always does.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    arithmetic: Arithmetic
    rows: int
    last_first: bool = True

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The buffer of the workspace, and its bytes: an item says how many follow."""
        if not self.problem.sequences:
            return []
        name, length = "q_items", self.problem.seqlen_q
        if self._of_keys:
            name, length = "kv_items", self.problem.seqlen_kv
        return [(name, _ITEM_BYTES * (1 + self.problem.tiles(length, self.rows)))]

    @property
    def before(self) -> Iterator[KernelLaunch]:
        """What lists them."""
        if not self.problem.sequences:
            return
        tile = steps.ItemsTile(self.rows, self._of_keys, self.last_first)
        config = bare_config(
            self.problem,
            self.limits,
            ("steps", "list_items"),
            self.arithmetic,
            tile.constants(),
            tile.footprint,
        )
        yield KernelLaunch(config, 1, (("entries", self.problem.sequences - 1),))

    @property
    def _of_keys(self) -> bool:
        return self.problem.operation == "backward"
