"""Sizes that represent all others, because the plans of problems change between them only."""

from __future__ import annotations

from .planning.problem import MAX_SEQLEN, Operation
from .planning.tiles import fa2_tables, fa3_tables
from .planning.tiles.bias import WALKERS
from .planning.tiles.fa2_few import ROWS

__all__ = ["GROUPS", "entries_of", "groups_of", "heads_of", "telling_lengths", "windows_of"]

#: Query heads for each kv head.
GROUPS = (1, 2, 8, 16, 64)
#: Heads of all batch entries. With few heads, plans take smaller tiles.
_HEADS = tuple(4**i for i in range(7))
#: The same where lengths are given and plans differ only in the heads.
_EVERY_HEAD = tuple(sorted({*range(1, 65), *(int(64 * 1.15**i) for i in range(30)), *_HEADS}))
#: Queries that are more than FlashAttention-2's kernel for few queries takes, and still few.
_MORE = 64
#: Keys that few queries have whole, and keys that are split among blocks.
_KEYS_OF_FEW = 64, 2**17
#: Queries that fill some q tiles and half of one; keys up to twice as many, and more.
_HALF, _KEYS_OF_HALF = 2 * 128 + 64, (512, 1024)
#: Beyond the last length no tile changes.
_LENGTHS = tuple(2**i for i in range(4, 18))


def heads_of(operation: Operation, of_lengths: bool) -> tuple[int, ...]:
    """Heads of all batch entries; with given lengths forward plans depend on every number."""
    return _EVERY_HEAD if of_lengths and operation == "forward" else _HEADS


def groups_of(operation: Operation, lengths: tuple[int, int], of_lengths: bool) -> tuple[int, ...]:
    """Query heads for each kv head at which plans change: they share sums, or rows of a tile.

    With one query up to ``ROWS`` heads are rows of the kernel for few queries. It has two
    forms, with keys that are split and keys that are not, so two lengths represent the
    others, if no lengths are given. Several queries of the heads that share keys are rows of
    it too: a block has ``ROWS`` rows or, with more queries or larger groups, twice as many.
    """
    if operation == "backward":
        return (1, 64)
    if lengths[0] > 1:
        if lengths[0] > ROWS:
            return (1,)
        return (1, 2, 64) if of_lengths else (1, ROWS // 2)
    return (1, ROWS // 2, *(ROWS,) * (of_lengths or lengths[1] in _KEYS_OF_FEW), 64)


def entries_of(operation: Operation, bias: str | None) -> tuple[int, ...]:
    """Batch sizes at which plans change if the whole batch shares a bias."""
    if bias is None or bias.partition(":")[0] != "qk":
        return (1,)
    return (1, 2) if operation == "forward" else (1, *sorted(WALKERS))


def windows_of(operation: Operation) -> tuple[int, ...]:
    """Window sizes: both sides of every size at which a pass's table changes, and a large one."""
    if operation == "forward":
        last_of_rows = {row.widest_window for row in fa3_tables.FORWARD if row.widest_window}
    else:
        first_of_rows = {row.fewest_of_window for row in fa3_tables.BACKWARD}
        last_of_rows = {first - 1 for first in first_of_rows if first}
    wide = _KEYS_OF_FEW[-1:] if operation == "forward" else ()  # its keys are split
    return (*(keys for last in sorted(last_of_rows) for keys in (last, last + 1)), *wide)


def telling_lengths() -> tuple[tuple[int, int], ...]:
    """Lengths that together make plans take every tile they can take.

    They include both sides of every length at which the tables change, and enough lengths in
    between for plans that depend on lengths and heads. There are as many queries as keys, or
    one query as in decoding, or a few more; at some lengths two, and as many as the kernel for
    few queries takes. Of some the last q tile of a gradient is half empty.
    """
    shorter = [n for row in fa3_tables.FORWARD for n in (row.longest, row.longest_causal)]
    shorter += [row.longest for row in fa3_tables.FORWARD_WITH_PAIRS]
    shorter += [n for row in fa3_tables.BACKWARD for n in (row.lengths[0] - 1, row.lengths[1])]
    longer = [row.shortest - 1 for rows in fa2_tables.FORWARD.values() for row in rows]
    edges = [n for last in (*shorter, *longer) for n in (last, last + 1)]
    lengths = {*_LENGTHS, *(n for n in edges if 1 <= n <= MAX_SEQLEN)}
    few = ((queries, keys) for keys in _KEYS_OF_FEW for queries in (2, ROWS))
    half = ((_HALF, keys) for keys in _KEYS_OF_HALF)
    every = ((queries, keys) for keys in sorted(lengths) for queries in (keys, 1, _MORE))
    return (*every, *few, *half)
