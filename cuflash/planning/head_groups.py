"""How many heads run together, for what the second-level cache holds."""

from __future__ import annotations

from .device import DeviceLimits
from .problem import DTYPES, AttentionProblem
from .tiles.common import ceil_div

__all__ = ["even_head_group", "head_group_of", "taking_turns", "whole_entries"]

#: Of ordered sums, as measured at head_dim 64 to 256: with more, what is summed leaves L2 before it
#: is complete.
_MOST_TAKING_TURNS = 16


def head_group_of(
    problem: AttentionProblem,
    limits: DeviceLimits,
    tiles: int,
    per_sm: int,
    cap: int | None = None,
) -> int:
    """Heads whose tiles run together: as many as half of L2 holds the streamed rows of.

    Or as give every multiprocessor two rounds of blocks, if that is more. The
    last head group needs many too: its longest tiles begin when the others end.
    So of the upper half of these numbers (a round of blocks at least) the one
    is taken that leaves most to the last head group; 16 heads are better cut into
    fours than into fives. There are never more than ``cap``.
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
    """Heads whose q tiles are drawn together by blocks that stay: groups as equal as can be.

    As few heads as keep their keys and values in three fifths of L2 (those of a
    head more where a head group begins between heads that share keys). The fewer, the more
    short tiles are left for the end, and the more evenly it comes. The last
    head group is at least half of the others where that takes no more than half of
    their heads away: 32 heads go by four rather than by six and then two, which
    single runs took 3 % longer for at head_dim 192.
    """
    width = problem.head_dim + problem.head_dim_v
    bytes_of_head = problem.usual_lengths[1] * width * DTYPES[problem.storage].itemsize
    held = max(1, limits.l2 * 3 // 5 // max(1, bytes_of_head)) * problem.group
    heads = max(1, problem.batch * problem.heads_q)
    even = ceil_div(heads, ceil_div(heads, held))
    enough = (s for s in range(even, even // 2, -1) if 2 * (heads % s or s) >= s)
    return next(enough, even)


def taking_turns(heads: int, tiles: int, blocks: int) -> int:
    """Heads that come together where the tiles of a head add to dQ one after the other.

    As many as have two tiles for each of the ``blocks`` that run at once, and
    equal head groups. Of a single head the tiles that begin together wait
    for one another; of several each begins with the first tiles of all, and
    the later ones come when those are under way. bench/NOTES.md has the figures.
    """
    most = max(1, min(_MOST_TAKING_TURNS, heads, 2 * blocks // max(1, tiles)))
    return ceil_div(heads, ceil_div(heads, most)) if heads else 1


def whole_entries(problem: AttentionProblem, head_group: int) -> int:
    """The head group, rounded up to all batch entries where these share an array of pairs."""
    batch = problem.batch
    return ceil_div(head_group, batch) * batch if problem.shares_pairs else head_group
