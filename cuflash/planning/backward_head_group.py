"""The head groups of FlashAttention-3's backward pass."""

from __future__ import annotations

from dataclasses import replace

from .device import DeviceLimits
from .head_groups import head_group_of, taking_turns
from .key_parts import ONE_PART, Parts
from .problem import DTYPES, AttentionProblem
from .tiles import fa3

__all__ = ["backward_head_group", "is_uneven"]

#: Most kv heads in a head group, backward. A hundred heads of 512 keys at a time made single runs a
#: tenth slower: their sums of dQ do not fit in L2 beside Q and dO. See bench/NOTES.md.
_MOST_HEADS_IN_GROUP = 8
#: The same for kv heads whose queries do not fit in half of L2: with 64 query heads on 8 of keys,
#: 8192 causal, head groups of two made a single run 2 to 3 % shorter than head groups of four.
_MOST_LARGE_HEADS_IN_GROUP = 2
#: The same for packed sequences. Their heads have many tiles, and with larger head groups blocks
#: would clear the sums of few heads: ``statistics`` clears those of the first head groups.
_MOST_PACKED_HEADS_IN_GROUP = 2


def backward_head_group(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tile: fa3.Fa3BackwardTile,
    tiles: int,
    shared: Parts,
) -> int:
    """Return the number of kv heads in a head group, where every part counts as one."""
    per_sm = tile.footprint.blocks_per_sm
    if shared.last:
        return 1  # as below: only tiles that take equal time are cut in this way
    if shared.cut:  # all parts of a tile run together
        whole = backward_head_group(problem, limits, tile, tiles * shared.number, ONE_PART)
        return whole * shared.number
    problem = replace(problem, heads_kv=problem.heads_kv * shared.number)
    if tile.ordered:
        return taking_turns(problem.batch * problem.heads_kv, tiles, limits.num_sms * per_sm)
    if is_uneven(problem):
        most = _MOST_PACKED_HEADS_IN_GROUP if problem.sequences else _MOST_HEADS_IN_GROUP
        if _bytes_of_queries(problem) > limits.l2 // 2:
            most = _MOST_LARGE_HEADS_IN_GROUP
        return head_group_of(problem, limits, tiles, per_sm, most)
    return 1  # tiles take about equal time, and groups of one head suffice


def _bytes_of_queries(problem: AttentionProblem) -> int:
    """Return the bytes of Q and dO of a kv head."""
    rows = problem.usual_lengths[0] * problem.group
    return rows * (problem.head_dim + problem.head_dim_v) * DTYPES[problem.storage].itemsize


def is_uneven(problem: AttentionProblem) -> bool:
    """Return whether some tiles may take much longer than others."""
    return problem.mask == "causal" or problem.hides_tiles
