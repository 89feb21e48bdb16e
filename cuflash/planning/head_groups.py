"""The number of heads that run together, so that their data stays in L2."""

from __future__ import annotations

from .device import DeviceLimits
from .problem import DTYPES, AttentionProblem
from .tiles.common import ceil_div

__all__ = ["even_head_group", "head_group_of", "taking_turns", "whole_entries"]

#: Most heads with ordered sums, measured at head_dim 64 to 256: with more heads, sums leave L2
#: before they are complete.
_MOST_TAKING_TURNS = 16


def head_group_of(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tiles: int,
    per_sm: int,
    cap: int | None = None,
) -> int:
    """Return the number of heads whose tiles run together, at most ``cap``.

    The most is the number of heads whose streamed rows fit in half of L2, or the
    number that gives every multiprocessor two rounds of blocks, if that is more. The
    last head group needs many heads too: its longest tiles begin when other groups
    end. So the upper half of the possible numbers is searched for the one with the
    largest last head group: 16 heads are better divided into fours than into fives.
    """
    forward = problem.operation == "forward"
    queries, keys = problem.usual_lengths
    rows = keys if forward else queries * problem.group
    width = problem.head_dim + problem.head_dim_v
    held = limits.l2 // 2 // max(1, rows * width * DTYPES[problem.storage].itemsize)
    if forward:
        held *= problem.group
    heads = problem.batch * (problem.heads_q if forward else problem.heads_kv)
    enough = ceil_div(2 * limits.num_sms * per_sm, max(1, tiles))
    most = max(1, min(max(held, enough), heads, cap or heads))
    fewest = most if most == heads else max(most // 2 + 1, most - 63)
    return max(range(fewest, most + 1), key=lambda s: (heads % s or s, s))


def even_head_group(problem: AttentionProblem, limits: DeviceLimits) -> int:
    """Return the size of head groups for persistent blocks, as equal as possible.

    Keys and values of a head group fit in three fifths of L2. (A head group that begins
    between query heads that share keys needs those of one more kv head.) With fewer
    heads, more short tiles are left for the end, and blocks end at more equal times.
    The last head group has at least half as many heads as the others, if the others
    need not be halved for that: 32 heads are divided into fours. With sixes and a last
    group of two, single runs took 3 % longer at head_dim 192.
    """
    width = problem.head_dim + problem.head_dim_v
    bytes_of_head = problem.usual_lengths[1] * width * DTYPES[problem.storage].itemsize
    held = max(1, limits.l2 * 3 // 5 // max(1, bytes_of_head)) * problem.group
    heads = max(1, problem.batch * problem.heads_q)
    even = ceil_div(heads, ceil_div(heads, held))
    enough = (s for s in range(even, even // 2, -1) if 2 * (heads % s or s) >= s)
    return next(enough, even)


def taking_turns(heads: int, tiles: int, blocks: int) -> int:
    """Return the size of head groups where the tiles of a head add to dQ one after the other.

    A head group has two tiles for each of the ``blocks`` that run at once, and
    head groups are equal. With a single head, tiles that begin together wait
    for one another. With several heads the first tiles of all heads begin, and
    later tiles start when those are under way. bench/NOTES.md has the figures.
    """
    most = max(1, min(_MOST_TAKING_TURNS, heads, 2 * blocks // max(1, tiles)))
    return ceil_div(heads, ceil_div(heads, most)) if heads else 1


def whole_entries(problem: AttentionProblem, head_group: int) -> int:
    """Return the head group, rounded up to whole batches if entries share an array of pairs."""
    batch = problem.batch
    return ceil_div(head_group, batch) * batch if problem.shares_pairs else head_group
