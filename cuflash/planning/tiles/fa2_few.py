"""FlashAttention-2's forward pass for few queries: the tile and the resources it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..device import DeviceLimits
from ..problem import DTYPES, AttentionProblem, ElementName
from .common import (
    Arithmetic,
    Footprint,
    arithmetics,
    bucket,
    ceil_div,
    shared_array,
    values_in_registers,
)
from .fa2_tables import FEW_BUCKETS, FORWARD_OF_FEW, ForwardFewRow

__all__ = [
    "FEWEST_OF_WHOLE_TILES",
    "ROWS",
    "Fa2FewTile",
    "few_tiles",
    "merging_tile",
    "tile_of_row",
    "why_not_few",
    "with_whole_rows",
]

#: Queries of a tile: one fragment of the matrix instructions.
ROWS = 16
#: With fewer queries than this, shared memory holds results for only half the rows of a tile.
#: Packed queries need all rows: an entry may have more queries than ``max_seqlen_q``, and the rows
#: after the last entry have results too.
FEWEST_OF_WHOLE_TILES = ROWS // 2 + 1
#: Fewest slots of a warp: one matrix arrives while another one is read.
_FEWEST_SLOTS = 2

#: Bytes of keys and values that are on their way to a block in a ring that is long enough.
_ON_ITS_WAY = 96 * 1024

#: Features that the kernel has. The others hide tiles, drop weights, or read an array of pairs.
_FEATURES = frozenset(
    (
        *("window", "used_lengths", "softcap", "alibi", "sinks"),
        *("cached_keys", "packed_queries", "packed_group", "kv_chunks", "float8"),
    )
)
#: Those that are the same for the heads that share keys, or belong to a row.
_OF_SHARED_HEADS = _FEATURES - {"alibi", "packed_group"}
#: Compute capability of the conversion of float8 numbers.
_FLOAT8_DEVICE = (8, 9)


@dataclass(frozen=True)
class Fa2FewTile:
    """All warps have the same rows and divide the keys; each has a ring of its own.

    A row is a query of a head. With ``heads`` a block has queries of so many heads that
    share keys; 0: of one head. Then it may have fewer queries than a tile.

    If ``chunk`` is not 0, a block walks all keys of its rows in chunks of that many keys, and
    merges them to the same bits as one block for each chunk and the kernel ``merge``.
    """

    block_q: int
    block_kv: int  # keys of a step of a warp
    warps: int
    num_slots: int  # of each warp's ring, which holds K and V alternately
    stored: ElementName
    head_dim: int
    head_dim_v: int
    arithmetic: Arithmetic
    result_rows: int  # rows for which shared memory holds results
    chunk: int = 0
    heads: int = 0
    rows: int = ROWS

    #: The file of the kernel.
    kernel = "forward_few"

    @property
    def footprint(self) -> Footprint:
        """Shared memory exactly as the kernel lays it out, registers as an estimate."""
        held = values_in_registers(self.rows, self.head_dim_v + self.block_kv, "float32")
        shared = self._beside_rings + self.num_slots * self._slots_of_warps
        return Footprint(shared, held + 56, 32 * self.warps)

    @property
    def _slots_of_warps(self) -> int:
        """Bytes of one slot of every warp."""
        widest = max(self.head_dim, self.head_dim_v)
        return self.warps * shared_array(self.block_kv * widest, self.stored)

    @property
    def _beside_rings(self) -> int:
        """Bytes of Q, of the reference and sum of every row, and of the results of chunks."""
        shared = shared_array(self.rows * self.head_dim, "float16")
        shared += shared_array(2 * self.warps * self.rows, "float32")
        if not self.chunk:
            return shared
        of_warps = self.warps * self.result_rows * (self.head_dim_v + 8)
        for numbers in (of_warps, self.result_rows * self.head_dim_v, *2 * [2 * self.result_rows]):
            shared += shared_array(numbers, "float32")
        return shared

    def fitted(self, limits: DeviceLimits) -> Fa2FewTile:
        """Return the tile with as many slots as fit, at most those it has."""
        room = (limits.shared_per_block - self._beside_rings) // self._slots_of_warps
        slots = max(min(self.num_slots, room), self._fewest_slots)
        return replace(self, num_slots=slots)

    @property
    def _fewest_slots(self) -> int:
        """The fewest slots: without chunks, a warp's result replaces its ring and has to fit."""
        result = 4 * self.result_rows * (self.head_dim_v + 8) * self.warps
        return max(_FEWEST_SLOTS, 0 if self.chunk else ceil_div(result, self._slots_of_warps))

    def with_even_loads(self) -> Fa2FewTile:
        """Return the tile with no more on its way than a multiprocessor alone needs.

        Where many, but not all, multiprocessors have a block, longer rings let some of them
        overtake the others, and the last ones do not catch up.
        """
        needed = ceil_div(_ON_ITS_WAY, self._slots_of_warps)
        slots = min(self.num_slots, max(needed, self._fewest_slots))
        return replace(self, num_slots=slots)

    def blocks(self, problem: AttentionProblem) -> int:
        """Return the number of blocks of a pass that does not split keys."""
        heads = problem.batch * problem.heads_q // max(1, self.heads)
        return heads * problem.tiles(problem.seqlen_q, self.block_q) * self.parts(problem)

    def parts(self, problem: AttentionProblem) -> int:
        """Return the number of blocks that share the queries of a tile.

        Packed entries may have more queries than was said, so a whole tile is shared there.
        """
        if not self.heads:
            return 1
        queries = self.block_q if problem.sequences else min(self.block_q, problem.seqlen_q)
        return ceil_div(queries, self.rows // self.heads)

    def constants(self) -> dict[str, int]:
        """Return the constants that the device code reads from ``Config``."""
        return {
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "warps": self.warps,
            "num_slots": self.num_slots,
            "rows": self.rows,
            "packs_heads": int(self.heads > 0),
            "result_rows": self.result_rows,
            "merges_chunks": int(self.chunk > 0),
            "fragment_rows": self.arithmetic.fragment_rows,
        }


def few_tiles(problem: AttentionProblem, limits: DeviceLimits) -> tuple[Fa2FewTile, ...]:
    """Return the first tile of the table that fits, then that tile with fewer rows.

    Blocks with fewer rows read the same keys more often, and there are more of them. There
    is no tile if a pass cannot have one.
    """
    if why_not_few(problem, limits) is not None:
        return ()
    for row in _rows(problem):
        tile = tile_of_row(problem, limits, row)
        if tile.footprint.excess(limits) is None:
            fewer = row._replace(most_rows=ROWS)
            return (tile,) if tile.rows == ROWS else (tile, tile_of_row(problem, limits, fewer))
    return ()


def merging_tile(tile: Fa2FewTile, limits: DeviceLimits, chunk: int) -> Fa2FewTile | None:
    """Return the tile for blocks that merge chunks of ``chunk`` keys; None if it does not fit."""
    merging = replace(tile, chunk=chunk).fitted(limits)
    return merging if merging.footprint.excess(limits) is None else None


def with_whole_rows(tile: Fa2FewTile, limits: DeviceLimits) -> Fa2FewTile | None:
    """Return the tile with results of all its rows; None if it does not fit."""
    whole = replace(tile, result_rows=tile.rows).fitted(limits)
    return whole if whole.footprint.excess(limits) is None else None


def tile_of_row(problem: AttentionProblem, limits: DeviceLimits, row: ForwardFewRow) -> Fa2FewTile:
    """Return the tile of a row for a problem, with as many slots as fit."""
    heads, rows = _heads_and_rows(problem, row)
    halves = problem.seqlen_q < FEWEST_OF_WHOLE_TILES and not (problem.sequences or heads)
    return Fa2FewTile(
        ROWS,
        row.block_kv,
        row.warps,
        row.most_slots,
        problem.stored,
        bucket(problem.head_dim, FEW_BUCKETS),
        bucket(problem.head_dim_v, FEW_BUCKETS),
        arithmetics(problem.storage, limits.compute_capability)[0],
        ROWS // 2 if halves else rows,
        heads=heads,
        rows=rows,
    ).fitted(limits)


def _heads_and_rows(problem: AttentionProblem, row: ForwardFewRow) -> tuple[int, int]:
    """Return the query heads that a block has, or 0, and its rows.

    This way the fewest blocks read the keys of a kv head. Of several such ways the one with
    the fewest rows is taken.
    """
    if problem.group == 1 or not _OF_SHARED_HEADS.issuperset(problem.features):
        return 0, ROWS
    queries = min(ROWS, problem.most_queries or problem.seqlen_q)
    ways = [
        (problem.group // heads * ceil_div(queries, rows // heads), rows, -heads)
        for rows in (ROWS, row.most_rows)
        for heads in range(1, rows + 1)
        if problem.group % heads == 0
    ]
    _, rows, heads = min(ways)
    return (-heads, rows) if heads < -1 else (0, ROWS)


def why_not_few(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why a pass cannot have the tile; None if it can."""
    if problem.operation != "forward":
        return "is for the forward pass"
    if DTYPES[problem.storage].itemsize != 2:
        return f"takes float16 and bfloat16, not {problem.storage}"
    if problem.alignment == "element":
        return "takes rows that begin at multiples of 16 bytes"
    oldest = _FLOAT8_DEVICE if problem.float8 else (8, 0)
    if limits.compute_capability < oldest:
        return "needs compute capability {}.{}".format(*oldest)
    if (problem.most_queries or problem.seqlen_q) > ROWS:
        return f"takes up to {ROWS} queries, or query heads of one query"
    for name in problem.features:
        if name not in _FEATURES:
            return f"takes no {name}"
    return None


def _rows(problem: AttentionProblem) -> Iterator[ForwardFewRow]:
    itemsize = 1 if problem.float8 else 2
    width = max(problem.head_dim, problem.head_dim_v)
    yield from (row for row in FORWARD_OF_FEW[itemsize] if width <= row.widest)
