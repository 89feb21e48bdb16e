"""Planted bugs in the blocks of rows of FlashAttention-3's backward pass; see ``hopper``.

``GRADIENTS`` runs few tiles at once, so blocks that finish rows begin while other blocks multiply.

One bug is not here: a math role that arrives just before it adds its last dQ, which is a matter of
nanoseconds.
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import GRADIENTS, ORDERED_GRADIENTS

__all__ = ["BUGS"]

_KERNEL = "cuda_src/fa3/backward.cu"
_ROWS = "cuda_src/fa3/backward_rows.cuh"
_TURNS = "cuda_src/fa3/backward_turns.cuh"
_TYPES = "cuda_src/fa3/backward_types.cuh"

_WAITS = (
    Bug(
        "tiles are counted as summed before math has added",
        _ROWS,
        "wait<Config>(c.shared.added[0], 0);",
        "",
        GRADIENTS,
    ),
    Bug(
        "a share is finished before it is summed",
        _ROWS,
        "await_count<Config>(&counters_of(params, share.batch, share.kv_head).summed,\n"
        "                        adding_blocks<Config>(params, share));",
        "",
        GRADIENTS,
    ),
    Bug(
        "a share is finished when one tile is yet to add to it",  # the tile with the longest loop
        _ROWS,
        ".summed,\n                        adding_blocks<Config>(params, share));",
        ".summed,\n                        adding_blocks<Config>(params, share) - 1);",
        GRADIENTS,
    ),
    Bug(
        "tiles that no query sees are not counted as summed",  # their heads never finish
        _KERNEL,
        "    pass_sums(c);",
        "",
        GRADIENTS,
    ),
    Bug(
        "batch entries share their heads' counters",  # so half of an entry's tiles suffice
        _TYPES,
        "[batch * params.shape.heads_kv + kv_head];",
        "[kv_head];",
        GRADIENTS,
    ),
    Bug(
        "turns are counted where heads are",
        _TURNS,
        "heads += shape.batch * shape.heads_kv;",
        "",
        ORDERED_GRADIENTS,
    ),
)

_SHARES = (
    Bug(
        "a round begins with its second tile",  # no block has the first of all
        _ROWS,
        "tile = first + within - 1;",
        "tile = first + within;",
        GRADIENTS,
    ),
    Bug(
        "only the first query head of a group has its rows",
        _ROWS,
        "static_cast<int>(share.kv_head * group + heads - before * group)",
        "static_cast<int>(share.kv_head * group)",
        GRADIENTS,
    ),
    Bug(
        "the second query head of a group begins where the share of the first ends",
        _ROWS,
        "static_cast<int>(i - heads * of_share) * kRowsOfUnit",
        "static_cast<int>(i - before * group * of_share) * kRowsOfUnit",
        GRADIENTS,
    ),
    Bug(
        "no warp rounds the last columns of a block's last unit",
        _ROWS,
        "const unsigned count = units.count * Unit::parts;",
        "const unsigned count = units.count * Unit::parts - 1;",
        GRADIENTS,
    ),
    Bug(
        "all of a unit's columns are the first ones",
        _ROWS,
        "column = static_cast<int>(i % parts) * columns;",
        "column = 0;",
        GRADIENTS,
    ),
    Bug(
        "blocks after all tiles finish one and the same share",
        _ROWS,
        "finished += blockIdx.x - rounds * blocks;",
        "",
        GRADIENTS,
    ),
    Bug(
        "dQ lacks the scale",
        _ROWS,
        "sums.for_each([&](float& x, int, int, int, int) { x *= scale; });",
        "",
        GRADIENTS,
    ),
)

BUGS = (*_WAITS, *_SHARES)
