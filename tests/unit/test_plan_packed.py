"""Plans of packed sequences have room for every tile, wherever in a tile the sequences end."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.kernel import KernelLaunch
from cuflash.planning.plan import Algorithm, Plan, plan
from cuflash.planning.problem import AttentionProblem, Operation

from ..architectures import LIMITS

_NAMES = "cu_seqlens_q", "cu_seqlens_kv"
_HEADS = 4, 2
#: In a workspace a sequence begins at a multiple of this many rows: the device's ``kAlignment``.
_ALIGNED = 128
_BYTES_OF_ITEM = 24


def _plan(
    algorithm: Algorithm, operation: Operation, lengths: list[tuple[int, int]], width: int
) -> Plan:
    """A plan for sequences with these numbers of queries and keys."""
    rows, keys = (sum(every) for every in zip(*lengths, strict=True))
    problem = AttentionProblem(
        operation=operation,
        batch=1,
        heads_q=_HEADS[0],
        heads_kv=_HEADS[1],
        seqlen_q=rows,
        seqlen_kv=keys,
        head_dim=width,
        head_dim_v=width,
        storage="float16",
        output="float16",
        mask="full",
        scale=0.125,
        q_offset=0,
        alignment="tensor_map",
        sequences=len(lengths),
    )
    arrays = {name: Operand(name, "int32", (len(lengths),)) for name in _NAMES}
    problem = with_features(problem, {}, arrays, keys - rows, None, None, True)
    return plan(problem, LIMITS["90"], algorithm=algorithm)


def _main(planned: Plan) -> KernelLaunch:
    (found,) = (one for one in planned.launches if one.config.kernel == planned.problem.operation)
    return found


def _tiles(lengths: list[int], rows: int) -> int:
    return sum(-(-length // rows) for length in lengths)


#: The whole tiles of a sequence, and the fraction of one more: no row, one, some, or all but one.
_length = st.tuples(st.integers(0, 3), st.sampled_from((0.0, 1e-9, 1e-9, 0.4, 1 - 1e-9)))


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@given(drawn=st.lists(st.tuples(_length, _length), min_size=1, max_size=12))
def test_there_is_room_for_every_tile(
    algorithm: Algorithm, operation: Operation, width: int, drawn: list[Any]
) -> None:
    """The list and the grid have room for every tile, padded rows have room for every sequence."""
    tile: Any = _plan(algorithm, operation, [(1, 1)] * len(drawn), width).tile
    sizes = tile.block_q, tile.block_kv
    lengths = [
        tuple(
            whole * rows + -(-int(1e6 * part * rows) // 1_000_000) + (part == 1e-9)
            for (whole, part), rows in zip(one, sizes, strict=True)
        )
        for one in drawn
    ]
    lengths[0] = max(lengths[0][0], 1), max(lengths[0][1], 1)
    _check(_plan(algorithm, operation, lengths, width), lengths)


def _check(planned: Plan, lengths: list[tuple[int, ...]]) -> None:
    forward, tile = planned.problem.operation == "forward", planned.tile
    queries, keys = ([*each] for each in zip(*lengths, strict=True))
    of_tiles, rows = (queries, tile.block_q) if forward else (keys, tile.block_kv)
    tiles = _tiles(of_tiles, rows)
    room = {part.name: part.nbytes for part in planned.workspace}
    assert room["q_items" if forward else "kv_items"] >= _BYTES_OF_ITEM * (1 + tiles)
    main = _main(planned)
    if "tile_counter" not in room:
        assert main.grid >= _HEADS[not forward] * tiles
    (listing,) = (one for one in planned.launches if one.config.kernel == "list_items")
    assert listing.grid == 1
    assert dict(listing.arguments) == {"entries": len(lengths) - 1}
    if not forward:
        padded = dict(main.arguments)["padded_rows"]
        begins = (
            (begin + number * (_ALIGNED - 1)) // _ALIGNED * _ALIGNED
            for number, begin in enumerate(accumulate([0, *queries[:-1]]))
        )
        free = 0
        for begin, count in zip(begins, queries, strict=True):
            assert free <= begin, "two sequences have the same rows"
            free = begin + -(-count // _ALIGNED) * _ALIGNED
        assert free <= padded
        assert room["delta"] >= 4 * _HEADS[0] * padded
