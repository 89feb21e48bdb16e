"""The kernel before a pass that finds where packed sequences begin, and lists their tiles.

Blocks take the tiles in the order of the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .device import DeviceLimits
from .kernel import KernelLaunch, bare_config
from .problem import AttentionProblem
from .tiles import steps
from .tiles.common import Arithmetic

__all__ = ["ItemLists"]

#: Bytes of an item: a sequence, one of its tiles, and where its rows are.
_ITEM_BYTES = 24


@dataclass(frozen=True)
class ItemLists:
    """The lists of tiles of a pass; empty if no sequences are packed.

    Attributes
    ----------
    problem, limits, arithmetic
        Those of the pass.
    rows
        Rows of a tile: queries in a forward pass, keys in a backward pass; None
        if no tiles are listed, because a block takes whole sequences.
    last_first
        Whether the last tile of a sequence comes first; q tiles always do.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    arithmetic: Arithmetic
    rows: int | None
    last_first: bool = True

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The buffers of the workspace, and their bytes.

        The first item of a list is the number of items after it. The last element
        of ``q_begins`` and ``kv_begins`` is the end of all sequences.
        """
        if not self.problem.sequences:
            return []
        begins = 4 * (self.problem.sequences + 1)
        sizes = [("q_begins", begins)]
        if not self.problem.most_queries:
            sizes.append(("kv_begins", begins))
        if self.rows is not None:
            name, length = "q_items", self.problem.seqlen_q
            if self._of_keys:
                name, length = "kv_items", self.problem.seqlen_kv
            sizes.append((name, _ITEM_BYTES * (1 + self.problem.tiles(length, self.rows))))
        return sizes

    @property
    def before(self) -> Iterator[KernelLaunch]:
        """The first kernel of the pass, which writes the lists."""
        if not self.problem.sequences:
            return
        of_caches = self.problem.most_queries > 0
        tile = steps.ItemsTile(self.rows or 1, self._of_keys, self.last_first, of_caches)
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
