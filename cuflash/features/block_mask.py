"""Block masks: a pair takes part where its block of queries and keys is True.

The blocks broadcast against (batch, heads_q, blocks of queries, blocks of keys). They hide pairs
after all changes of scores, in addition to a mask of pairs, a causal mask or a window. The size of
a block changes the machine code: kernels whose tiles each lie in one block test it once for a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ArgumentValueError, shown
from .device import MAIN_KERNELS, DevicePart
from .feature import ArrayRule, Feature, Request
from .host import Given, HostPart, ScorePlace
from .pairs import block_of, numbers_of
from .use import Use

__all__ = ["BLOCK_MASK", "check_block"]

_NAME = "block_mask"
#: The queries and keys of a block are a multiple of this.
_STEP = 64
#: The largest block: beyond the longest sequence all sizes are equivalent.
_MOST = 2**30
_BLOCK = np.dtype([*block_of(_NAME), ("q_blocks", np.int32), ("kv_blocks", np.int32)], align=True)
_IN_PLACE = frozenset(name for name in MAIN_KERNELS if name[0] != "fa3")
_DEVICE = DevicePart(
    kernels=_IN_PLACE,
    struct="BlockMaskParams",
    block=_BLOCK,
    seams=(("Score", "BlockMaskTerm<Config, {block_queries}, {block_keys}>"),),
    header="features/block_mask.cuh",
)
#: For FlashAttention-3: also bits of tiles, in the workspace.
_LISTED = DevicePart(
    kernels=frozenset({("fa3", "forward"), ("fa3", "backward")}),
    struct="ListedBlocksParams",
    block=np.dtype(
        [
            *block_of(_NAME),
            *((name, np.int32) for name in ("q_blocks", "kv_blocks", "own_heads")),
            ("block_bits", np.uint64),
        ],
        align=True,
    ),
    seams=(("Score", "ListedBlocksTerm<Config, {block_queries}, {block_keys}>"),),
    header="features/block_mask.cuh",
)


def check_block(name: str, value: Any) -> tuple[int, int]:
    """The queries and keys of a block.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If they are not two multiples of 64.
    """
    expected = f"(bq, bkv), two positive multiples of {_STEP}"
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(name, shown(value), expected)
    for size in value:
        if isinstance(size, (bool, np.bool_)) or not isinstance(size, (int, np.integer)):
            raise ArgumentTypeError(name, shown(value), expected)
        if not 0 < size <= _MOST or size % _STEP:
            raise ArgumentValueError(name, shown(value), expected)
    return int(value[0]), int(value[1])


def _hide(scores: Any, place: ScorePlace, given: Given) -> None:
    blocks = given[_NAME]
    whole = blocks.reshape((1,) * (4 - blocks.ndim) + blocks.shape) != 0
    entries, heads, rows, columns = whole.shape
    entry = place.batch // given["entries"] % entries
    of_head = whole[entry, place.head * (heads > 1)]  # the next axes are row and column of blocks
    for row, queries in _runs(place.i, given["block_queries"], rows):
        for column, keys in _runs(place.j.ravel(), given["block_keys"], columns):
            shown = of_head[..., row, column]
            if not shown.all():
                np.copyto(scores[:, :, keys, :, queries], -np.inf, where=~shown)


def _runs(positions: Any, block: int, blocks: int) -> Iterator[tuple[int, slice]]:
    """The blocks of consecutive positions, with the positions in each block."""
    begin, end = int(positions[0]), int(positions[-1]) + 1
    for index in range(begin // block, -(-end // block)):
        first, last = max(begin, index * block), min(end, (index + 1) * block)
        yield index if blocks > 1 else 0, slice(first - begin, last - begin)


def _use(request: Request) -> Use | None:
    blocks, block = request.operands.get(_NAME), request.keywords.get(_NAME)
    if blocks is None or block is None:
        return None
    problem = request.problem
    return Use(
        "block_mask",
        _DEVICE,
        packed=_LISTED,
        compiled=(("block_queries", block[0]), ("block_keys", block[1])),
        numbers=(
            *numbers_of(blocks),
            ("q_blocks", problem.q_blocks),
            ("kv_blocks", problem.kv_blocks),
        ),
        operands=(blocks,),
        host=HostPart(_hide),
        shown=f"block_mask {'x'.join(map(str, blocks.shape))} of {block[0]}x{block[1]}",
    )


BLOCK_MASK = Feature(
    "block_mask",
    _use,
    _DEVICE,
    keywords={_NAME: check_block},
    arrays={
        _NAME: ArrayRule(
            ("batch", "heads_q", "q_blocks", "kv_blocks"), ("bool", "uint8"), broadcast=True
        )
    },
)
