"""Plans of appending to caches and of merging states, one kernel each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .device import DeviceLimits
from .kernel import KernelLaunch, kernel_config
from .plan import Plan
from .problem import AttentionProblem
from .tiles.common import Arithmetic, Footprint, ceil_div

__all__ = ["AppendProblem", "MergeProblem", "RowPlan", "append_plan", "merge_plan"]

#: The kernels form no matrix products.
_ARITHMETIC = Arithmetic("scalar", 0, 8)
#: The largest number of blocks for each multiprocessor. With more rows a warp takes several.
_BLOCKS_PER_SM = 8

_Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class AppendProblem(AttentionProblem):
    """An append: its keys are the new tokens, and its queries are the rotated queries.

    Attributes
    ----------
    entries, slots
        Number of entries of the cache and slots of each, or of pages and slots of a page.
    """

    entries: int = 0
    slots: int = 0

    @property
    def shapes(self) -> dict[str, _Shape]:
        """Shape of every matrix by name: (batch, rows, heads, columns)."""
        plain = super().shapes
        if self.most_queries:  # packed
            plain = {name: (1, *shape[1:]) for name, shape in plain.items()}
        cache = self.entries, self.slots, self.heads_kv
        return {
            **{name: plain[name] for name in ("q", "k", "v")},
            "q_rotated": plain["q"],
            "k_cache": (*cache, self.head_dim),
            "v_cache": (*cache, self.head_dim_v),
        }

    @property
    def rows(self) -> int:
        """Number of rows of keys, values and rotated queries."""
        of_queries = self.seqlen_q * self.heads_q
        entries = 1 if self.most_queries else self.batch
        return entries * (2 * self.seqlen_kv * self.heads_kv + of_queries)

    def __str__(self) -> str:
        return (
            f"append {self.storage} batch {self.batch} heads {self.heads_kv} tokens "
            f"{self.seqlen_kv} head_dim {self.head_dim}/{self.head_dim_v}"
        )


@dataclass(frozen=True)
class _RowTile:
    """A warp for each row."""

    warps: int = 8
    block_q: int = 1
    block_kv: int = 1

    @property
    def footprint(self) -> Footprint:
        """Registers only."""
        return Footprint(0, 64, 32 * self.warps)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {"warps": self.warps}


@dataclass(frozen=True)
class MergeProblem(AttentionProblem):
    """A merge of two states; every query of every head is a row."""

    @property
    def shapes(self) -> dict[str, _Shape]:
        """Shape of every matrix by name: (batch, rows, heads, columns)."""
        return dict.fromkeys(("out_before", "out_now", "out"), super().shapes["out"])

    def __str__(self) -> str:
        return (
            f"merge {self.storage} batch {self.batch} heads {self.heads_q} rows "
            f"{self.seqlen_q} head_dim {self.head_dim_v}"
        )


class RowPlan(Plan):
    """The plan of one append or one merge."""

    def __str__(self) -> str:
        return f"{self.problem}: one kernel on {self.backend}"


def append_plan(
    problem: AppendProblem, limits: DeviceLimits, numbers: tuple[tuple[str, int], ...]
) -> RowPlan:
    """Return the plan of an append.

    Parameters
    ----------
    problem, limits
        The append, and the limits of its device.
    numbers
        Fields of the kernel's parameters that are not arrays, by name.
    """
    rows = max(problem.rows, problem.batch)
    return _row_plan(problem, limits, "append_kv", rows, numbers)


def merge_plan(problem: MergeProblem, limits: DeviceLimits) -> RowPlan:
    """Return the plan of a merge of two states."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return _row_plan(problem, limits, "merge_states", rows, ())


def _row_plan(
    problem: AttentionProblem,
    limits: DeviceLimits,
    kernel: str,
    rows: int,
    numbers: tuple[tuple[str, int], ...],
) -> RowPlan:
    """Return a plan of one kernel with a warp for each row."""
    tile = _RowTile()
    config = kernel_config(
        problem, limits, ("steps", kernel), _ARITHMETIC, tile.constants(), tile.footprint
    )
    config = replace(config, output=problem.storage, mask="full", head_dim=0, head_dim_v=0)
    config = replace(config, copies="element", workspace_copies="element")
    grid = min(ceil_div(rows, tile.warps), _BLOCKS_PER_SM * limits.num_sms)
    launch = KernelLaunch(config, grid, numbers)
    return RowPlan(problem, "cuda", "fa2", tile, "a warp for each row", launches=(launch,))
