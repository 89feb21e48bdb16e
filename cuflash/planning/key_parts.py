"""Divides the query heads of a kv tile among blocks, and adds their partial gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .problem import AttentionProblem
from .row_steps import launchable
from .tiles import fa3
from .tiles.common import ceil_div
from .tiles.sum_parts import SUM_COLUMNS, SUM_ROWS, SumTile

__all__ = ["KeyParts", "parts_of"]

#: Time of a block's begin and end, in steps: a step is a q tile of a query head and a kv tile.
_STEPS_OF_BLOCK = 2
#: Fraction of the longest block's steps that is added as tail. Blocks run longest first.
_OF_LONGEST = 1 / 3
#: Time to write, read and add one partial tile, in steps of a multiprocessor:
#: 8 bytes a number at 4 TB/s against products at 600 TFLOP/s.
_STEPS_OF_PART = 0.028
#: Largest cost, relative to that without parts, for which parts are worth one more kernel.
_WORTH = 0.95


def parts_of(problem: AttentionProblem, tile: fa3.Fa3BackwardTile, at_once: int) -> int:
    """Return the number of blocks that share a kv tile, with equally many query heads each.

    For example, 32 query heads on one kv head, two batch entries and 64 tiles give 128
    blocks of very unequal length for 132 multiprocessors: one block computes the
    longest tile for all heads long after others have ended. ``bench/NOTES.md``
    compares the predicted and measured times.

    Parameters
    ----------
    problem
        A backward pass.
    tile
        The tile of the main kernel.
    at_once
        Number of blocks that run at a time.
    """
    heads, group = problem.batch * problem.heads_kv, problem.group
    if group == 1:
        return 1
    lengths = _lengths(problem, tile)
    longest, total = max(lengths, default=0), heads * group * sum(lengths)
    equal = min(lengths, default=0) == longest
    if total == 0:
        return 1

    def cost(parts: int) -> float:
        """Return the predicted time, in steps."""
        blocks, block = heads * len(lengths) * parts, longest * group // parts + _STEPS_OF_BLOCK
        sums = _STEPS_OF_PART * blocks * (parts > 1)
        if equal:  # blocks run in rounds
            return ceil_div(blocks, at_once) * block + sums
        share = (total + _STEPS_OF_BLOCK * blocks) / at_once
        return max(block, share + _OF_LONGEST * block) + sums

    best = min((p for p in range(1, group + 1) if group % p == 0), key=cost)  # the first of equals
    return best if cost(best) < _WORTH * cost(1) else 1


def _lengths(problem: AttentionProblem, tile: fa3.Fa3BackwardTile) -> list[int]:
    """Return for each kv tile of a head the number of q tiles of a query head that see it."""
    keys = range(0, problem.seqlen_kv, tile.block_kv)
    ends = (min(key + tile.block_kv, problem.seqlen_kv) for key in keys)
    queries_seeing = problem.visibility.queries_seeing
    seen = (queries_seeing(key, end) for key, end in zip(keys, ends, strict=True))
    return [ceil_div(end, tile.block_q) - begin // tile.block_q for begin, end in seen]


@dataclass(frozen=True)
class KeyParts:
    """Partial dK and dV in the workspace, and the kernel ``sum_parts`` that adds them.

    Attributes
    ----------
    problem, limits
        The problem, and the limits of the device.
    tile
        The tile of the main kernel.
    parts
        Number of blocks that share a kv tile; 1: a block writes the gradients itself.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    tile: fa3.Fa3BackwardTile
    parts: int

    @property
    def seen(self) -> AttentionProblem:
        """The problem of the main kernel: every part is a kv head."""
        return replace(self.problem, heads_kv=self.problem.heads_kv * self.parts)

    @property
    def said(self) -> str:
        """The text that follows the plan's reason."""
        if self.parts == 1:
            return ""
        return f"; {self.parts} blocks share the query heads of a kv tile, as kv tiles are few"

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the main kernel."""
        return {"parted": int(self.parts > 1)}

    @property
    def arguments(self) -> list[tuple[str, int]]:
        """Arguments of the main kernel."""
        if self.parts == 1:
            return []
        return [("heads_kv", self.seen.heads_kv), *self._both]

    @property
    def _both(self) -> tuple[tuple[str, int], ...]:
        return (("parts", self.parts), ("padded_keys", self.padded_keys))

    @property
    def padded_keys(self) -> int:
        """Rows of a head in the workspace."""
        return ceil_div(self.problem.seqlen_kv, self.tile.block_kv) * self.tile.block_kv

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        if self.parts == 1:
            return []
        rows = self.problem.batch * self.seen.heads_kv * self.padded_keys
        widths = {"dk_parts": self.tile.head_dim, "dv_parts": self.tile.head_dim_v}
        return [(name, 4 * rows * width) for name, width in widths.items()]

    @property
    def after(self) -> tuple[KernelLaunch, ...]:
        """``sum_parts``, if there are parts."""
        if self.parts == 1:
            return ()
        problem, tile = self.problem, SumTile()
        config = kernel_config(
            problem,
            self.limits,
            ("fa3", "sum_parts"),
            fa3.ARITHMETIC,
            tile.constants(),
            tile.footprint,
        )
        widths = self.tile.head_dim, self.tile.head_dim_v
        config = replace(config, mask="full", head_dim=widths[0], head_dim_v=widths[1])
        config = replace(config, features=())  # masks have been applied
        config = replace(config, output=config.storage)  # the kernel does not use it
        strips = problem.batch * problem.heads_kv * ceil_div(problem.seqlen_kv, SUM_ROWS)
        places = strips * (sum(widths) // SUM_COLUMNS)
        grid = launchable(ceil_div(places, tile.warps), "fa3")
        return (KernelLaunch(config, grid, self._both),)
