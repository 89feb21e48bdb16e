"""Splits the keys of a forward pass: partial results in a workspace, and a kernel to merge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ArgumentValueError, UnsupportedError
from ..features.kv_chunks import MERGE, NAME, with_chunks
from .device import DeviceLimits
from .kernel import KernelConfig, KernelLaunch, kernel_config
from .problem import DTYPES, AttentionProblem
from .row_steps import launchable
from .tiles import steps
from .tiles.common import Arithmetic, bucket, ceil_div

__all__ = ["KeyChunks", "check_chunk", "chunk_of", "divides", "may_split", "require_one"]

#: Features whose kernels visit lists of tiles.
_WITHOUT_CHUNKS = ("packed_lengths", "mask", "block_mask")
#: Features that change the result of a whole row after its last key.
_OF_WHOLE_ROWS = ("sinks",)


def check_chunk(problem: AttentionProblem, algorithm: str, chunk: int) -> None:
    """Refuse chunks for a pass that cannot have them; 0: no chunks.

    Raises
    ------
    UnsupportedError
        With the reason.
    """
    if not chunk:
        return
    if algorithm == "fa1":
        raise UnsupportedError("fa1 walks all keys of a row in one block: it has no kv_chunk")
    for name in _WITHOUT_CHUNKS:
        if name in problem.features:
            raise UnsupportedError(f"kv_chunk with {name}: lists of tiles have no chunks")


def may_split(problem: AttentionProblem) -> bool:
    """Return whether the kernels visit ranges of keys, and no lists of tiles."""
    return not problem.hides_tiles and not {*_WITHOUT_CHUNKS} & {*problem.features}


def chunk_of(problem: AttentionProblem) -> int:
    """Return the keys of a chunk of a planned problem; 0 if keys are not split."""
    numbers = (dict(use.numbers) for use in problem.uses if use.feature == NAME)
    return next((int(own["chunk"]) for own in numbers), 0)


def divides(chunk: int | None, block_kv: int) -> bool:
    """Return whether a chunk, if given, consists of whole tiles."""
    return not chunk or chunk % block_kv == 0


def require_one(tiles: Sequence[object], chunk: int | None) -> None:
    """Refuse a chunk that does not consist of whole tiles.

    Raises
    ------
    ArgumentValueError
        If no tile is left.
    """
    if chunk and not tiles:
        raise ArgumentValueError("kv_chunk", str(chunk), "a multiple of the tile's keys, like 128")


@dataclass(frozen=True)
class KeyChunks:
    """Chunks of keys of a forward pass; with ``chunk`` 0 keys are not split.

    Attributes
    ----------
    whole, limits, arithmetic
        The problem without chunks, the limits of the device, and the products.
    block_q, block_kv
        The tile of the main kernel.
    chunk
        Keys of a chunk; a multiple of ``block_kv``.
    in_order
        Whether a row's chunks are merged one after the other.
    """

    whole: AttentionProblem
    limits: DeviceLimits
    arithmetic: Arithmetic
    block_q: int
    block_kv: int
    chunk: int = 0
    in_order: bool = False

    @property
    def problem(self) -> AttentionProblem:
        """The problem with its chunks."""
        return with_chunks(self.whole, self.chunk) if self.chunk else self.whole

    def items(self, tiles: int) -> int:
        """Return the number of items for this number of q tiles: one for every tile and chunk."""
        return tiles * self._count

    @property
    def of_parts(self) -> AttentionProblem:
        """The problem of the main kernel, without the features of whole rows."""
        if not self.chunk:
            return self.whole
        uses = tuple(use for use in self.problem.uses if use.feature not in _OF_WHOLE_ROWS)
        return replace(self.problem, uses=uses)

    def of_main(self, config: KernelConfig) -> KernelConfig:
        """Return the main kernel's configuration: partial results are in the compute type."""
        return replace(config, output=self.whole.compute) if self.chunk else config

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        if not self.chunk:
            return []
        numbers = self._count * self._rows * DTYPES[self.whole.compute].itemsize
        of_rows = [(name, numbers) for name in ("reference_parts", "sum_parts")]
        return [("out_parts", numbers * self.whole.head_dim_v), *of_rows]

    @property
    def after(self) -> tuple[KernelLaunch, ...]:
        """The kernel that merges the partial results."""
        if not self.chunk:
            return ()
        width = bucket(self.whole.head_dim_v)
        tile = steps.MergeTile(
            *(self.block_q, self.block_kv, self._count),
            *(self.whole.most_queries or self.whole.seqlen_q, width, self.whole.compute),
            in_order=self.in_order,
        )
        config = kernel_config(
            *(self.problem, self.limits, MERGE, self.arithmetic),
            *(tile.constants() | {"overlaps": int(self.overlaps)}, tile.footprint),
        )
        grid = launchable(ceil_div(self._rows, tile.rows), "merge")
        return (KernelLaunch(config, grid, overlaps=self.overlaps),)

    @property
    def overlaps(self) -> bool:
        """Whether the kernel that merges may begin while the main kernel runs."""
        return self.in_order and self.limits.compute_capability >= (9, 0)

    @property
    def _count(self) -> int:
        return ceil_div(self.whole.seqlen_kv, self.chunk) if self.chunk else 1

    @property
    def _rows(self) -> int:
        return self.whole.batch * self.whole.heads_q * self.whole.seqlen_q
