"""The kernels before and after a backward pass over kv tiles, and the workspace between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .problem import DTYPES, AttentionProblem
from .tiles import steps
from .tiles.common import Arithmetic

__all__ = ["RowSteps", "launchable"]

#: Most thread blocks of a launch.
_MOST_BLOCKS = 2**31 - 1


def launchable(grid: int, algorithm: str) -> int:
    """Return ``grid``, a number of thread blocks.

    Raises
    ------
    UnsupportedError
        If it is more than a launch may have.
    """
    if grid > _MOST_BLOCKS:
        raise UnsupportedError(
            f"{algorithm} would need {grid:,} thread blocks, a launch has at most {_MOST_BLOCKS:,}"
        )
    return grid


#: Features that say which rows are used, and where they are.
_LENGTHS = ("used_lengths", "packed_lengths")


@dataclass(frozen=True)
class RowSteps:
    """``statistics`` and ``convert_dq`` around a main kernel.

    Attributes
    ----------
    problem, limits
        The problem, and the limits of the device.
    algorithm
        For errors.
    arithmetic
        The arithmetic of the main kernel: dQ is summed in its fragments.
    head_dim
        Columns of the sums of dQ: the main kernel's bucket.
    turns
        Counters that each block of ``statistics`` clears. A block has :data:`steps.ROWS`
        rows of one head.
    cleared
        Query heads are counted through all batch entries: ``statistics`` clears the sums of
        this many, from the first on; by default of all. The main kernel clears the
        sums of the others.
    sums_dq
        Whether the main kernel sums dQ in memory. Without it there are no sums to clear,
        and no ``convert_dq``: the main kernel stores dq itself.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    algorithm: str
    arithmetic: Arithmetic
    head_dim: int
    turns: int = 0
    cleared: int | None = None
    sums_dq: bool = True

    @property
    def padded_rows(self) -> int:
        """Rows of a head in the workspace."""
        return self.problem.tiles(self.problem.seqlen_q, steps.ROWS) * steps.ROWS

    @property
    def rows(self) -> tuple[str, int]:
        """The field of the kernel's parameters with :attr:`padded_rows`."""
        return ("padded_rows", self.padded_rows)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        numbers = self._all_heads * self.padded_rows * DTYPES[self.problem.compute].itemsize
        return [
            ("row_lse", numbers),
            ("delta", numbers),
            *[("dq_accumulator", numbers * self.head_dim)] * self.sums_dq,
            *[("turns", 4 * self.blocks * self.turns)] * bool(self.turns),
        ]

    @property
    def blocks(self) -> int:
        """Thread blocks of ``statistics``, and of ``convert_dq``."""
        return self._all_heads * self.padded_rows // steps.ROWS

    @property
    def before(self) -> KernelLaunch:
        """``statistics``."""
        cleared = self._all_heads if self.cleared is None else self.cleared
        cleared *= self.sums_dq
        return self._launch("statistics", {"turns": self.turns}, ("cleared", cleared))

    def around(self, main: KernelLaunch) -> tuple[KernelLaunch, ...]:
        """The launches of the whole pass."""
        after = (self._launch("convert_dq", {}),) if self.sums_dq else ()
        return (self.before, main, *after)

    @property
    def _all_heads(self) -> int:
        return self.problem.batch * self.problem.heads_q

    def _launch(
        self, kernel: str, constants: dict[str, int], *arguments: tuple[str, int]
    ) -> KernelLaunch:
        tile = steps.RowsTile(self.arithmetic.fragment_rows)
        footprint = tile.footprint
        if kernel == "convert_dq":
            footprint = tile.converting(self.head_dim, self.problem.storage)
        config = kernel_config(
            self.problem,
            self.limits,
            ("steps", kernel),
            self.arithmetic,
            tile.constants() | constants,
            footprint,
        )
        config = replace(config, head_dim=self.head_dim)
        if not any(seam == "Rows" for f in config.features for seam, _ in f.device.seams):
            asked = tuple(f for f in config.features if f.name in _LENGTHS)
            config = replace(config, mask="full", features=asked)  # the mask is not used
        if kernel == "convert_dq":  # the code does not depend on them
            config = replace(config, head_dim_v=self.head_dim, output=config.storage)
        grid = launchable(self.blocks, self.algorithm)
        return KernelLaunch(config, grid, (self.rows, *arguments))
