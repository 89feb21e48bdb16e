"""The plan of a call, and errors about tiles that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from ..errors import ArgumentValueError, UnsupportedError
from .device import DeviceLimits
from .kernel import Buffer, KernelLaunch
from .problem import AttentionProblem
from .tiles.common import Footprint

__all__ = ["ALGORITHMS", "Algorithm", "Backend", "Plan", "Tile", "asked_tile", "nothing_fits"]

Algorithm = Literal["fa1", "fa2", "fa3"]
Backend = Literal["cuda", "numpy"]

#: The algorithms that ``algorithm="auto"`` tries, best first.
ALGORITHMS: tuple[Algorithm, ...] = ("fa3", "fa2", "fa1")


class Tile(Protocol):
    """Queries and keys of one step."""

    @property
    def block_q(self) -> int:
        """Rows of queries."""

    @property
    def block_kv(self) -> int:
        """Rows of keys."""


class DeviceTile(Tile, Protocol):
    """A tile of a CUDA kernel."""

    @property
    def footprint(self) -> Footprint:
        """The resources of a multiprocessor that it needs."""


T = TypeVar("T", bound=DeviceTile)


@dataclass(frozen=True)
class Plan:
    """The algorithm, tile, kernels and workspace of one call."""

    problem: AttentionProblem
    backend: Backend
    algorithm: Algorithm
    tile: Tile
    reason: str
    rejected: tuple[tuple[Algorithm, str], ...] = ()  # better algorithms, and why they cannot run
    launches: tuple[KernelLaunch, ...] = ()
    workspace: tuple[Buffer, ...] = ()

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace; every buffer in it starts at a multiple of 256."""
        return max((b.offset + b.nbytes for b in self.workspace), default=0)

    @property
    def eager_bytes(self) -> int:
        """Size of the workspace outside a CUDA graph capture: tile counters are then elsewhere."""
        eager = [b.offset + b.nbytes for b in self.workspace if b.name != "tile_counter"]
        return max(eager, default=0)

    def __str__(self) -> str:
        tile = self.tile
        return (
            f"{self.problem}: {self.algorithm} on {self.backend}, "
            f"tile {tile.block_q}x{tile.block_kv}"
        )


def nothing_fits(
    problem: AttentionProblem, limits: DeviceLimits, algorithm: str, smallest: DeviceTile
) -> UnsupportedError:
    """Return the error of a problem whose smallest tile is too large."""
    return UnsupportedError(
        f"{algorithm} {problem.operation} in {problem.storage} at head_dim "
        f"{problem.head_dim}/{problem.head_dim_v}: the smallest tile "
        f"{smallest.block_q}x{smallest.block_kv} needs {smallest.footprint.excess(limits)}"
    )


def asked_tile(
    problem: AttentionProblem,
    algorithm: str,
    blocks: tuple[int, int],
    limits: DeviceLimits,
    rule: str,
    tiles: Iterable[T],
    others: Callable[[], Iterable[T]],
) -> T:
    """Return the first tile of the requested blocks that fits.

    Parameters
    ----------
    problem, algorithm
        For the error.
    blocks
        The requested ``(block_q, block_kv)``.
    limits
        Limits of the device.
    rule
        The condition on every block, for the error.
    tiles
        The ways of dividing these blocks among warps, best first.
    others
        Returns every tile of the problem, to find the nearest.

    Raises
    ------
    ArgumentValueError
        If none fits, naming what it needs and the nearest blocks that do.
    UnsupportedError
        If no blocks at all fit.
    """
    ways = list(tiles)
    for tile in ways:
        if tile.footprint.excess(limits) is None:
            return tile
    every = list(others())
    fitting = {(t.block_q, t.block_kv) for t in every if t.footprint.excess(limits) is None}
    if not fitting:
        smallest = min(every, key=lambda t: (t.block_q * t.block_kv, t.footprint.pressure(limits)))
        raise nothing_fits(problem, limits, algorithm, smallest)
    nearest = min(fitting, key=lambda b: (abs(b[0] - blocks[0]) + abs(b[1] - blocks[1]), b))
    if not ways:
        raise ArgumentValueError("blocks", str(blocks), f"{rule}, the nearest {nearest}")
    excess = min(ways, key=lambda t: t.footprint.pressure(limits)).footprint.excess(limits)
    raise ArgumentValueError(
        "blocks", f"{blocks}, which needs {excess}", f"blocks that fit, the nearest {nearest}"
    )
