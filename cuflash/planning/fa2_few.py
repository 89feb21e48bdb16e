"""Chooses the chunks of FlashAttention-2's forward pass for few queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .device import DeviceLimits
from .forward_time import ForwardWork, chunks_to_try
from .key_chunks import divides, may_split
from .problem import AttentionProblem
from .tiles.fa2_few import Fa2FewTile

__all__ = ["fastest_chunk", "steadiest_chunk"]

#: The shortest chunk that is tried, in keys.
_SHORTEST = 64


def fastest_chunk(problem: AttentionProblem, limits: DeviceLimits, tile: Fa2FewTile) -> int:
    """Return the chunk whose predicted time is the shortest; 0: keys are not split."""
    chunks = _chunks(problem, tile)
    return min(chunks, key=lambda chunk: _time(problem, limits, tile, chunk))


def steadiest_chunk(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: Fa2FewTile,
    batches: Sequence[int],
) -> int:
    """Return the chunk whose time is the smallest multiple of the shortest in its worst batch."""
    chunks = _chunks(problem, tile)
    worst = dict.fromkeys(chunks, 0.0)
    for batch in batches:
        own = replace(problem, batch=batch)
        times = {chunk: _time(own, limits, tile, chunk) for chunk in chunks}
        shortest = min(times.values()) or 1.0
        worst = {chunk: max(worst[chunk], times[chunk] / shortest) for chunk in chunks}
    return min(chunks, key=lambda chunk: worst[chunk])


def _chunks(problem: AttentionProblem, tile: Fa2FewTile) -> list[int]:
    if not (may_split(problem) and problem.has_pairs):
        return [0]
    shorter = [_SHORTEST] if _SHORTEST < problem.seqlen_kv <= 64 * _SHORTEST else []
    return [c for c in (*chunks_to_try(problem), *shorter) if divides(c, tile.block_kv)]


def _time(problem: AttentionProblem, limits: DeviceLimits, tile: Fa2FewTile, chunk: int) -> float:
    together = tile.warps * tile.block_kv  # keys of a step of the block
    work = ForwardWork(problem, limits, tile.block_q, together, tile.blocks_per_sm, chunk)
    return work.time(tile.step)
