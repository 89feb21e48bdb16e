"""Planted bugs in how blocks of the backward pass clear sums of dQ for later blocks.

See ``hopper``. Blocks clear sums only where there are many tiles. Only in ``MANY_HEADS`` can
cleared sums come too late: there a block clears megabytes, while queries see hardly any key. Sums
that are not cleared hold those of the pass before.

``fa3_order`` has the fences between zeros that threads wrote and copies that read them, the fences
between copies and additions, and the wait for the copies. All are a matter of nanoseconds to a
microsecond, and no run on a GPU has shown the last one missing. A tile that no query sees waits for
cleared sums only because of heads that no query sees at all.
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import GRADIENTS, MANY_HEADS, NARROW_GRADIENTS, SHARED_GRADIENTS

__all__ = ["BUGS"]

_CLEAR = "cuda_src/fa3/backward_clear.cuh"
_KERNEL = "cuda_src/fa3/backward.cu"
_MATH = "cuda_src/fa3/backward_math.cuh"

_WAITS = (
    Bug(
        "no thread polls whether sums are cleared",
        _KERNEL,
        "    await_cleared(c, tile);\n    if constexpr (Config::ordered) {",
        "    if constexpr (Config::ordered) {",
        MANY_HEADS,
    ),
    Bug(
        "math does not wait until sums are cleared",
        _MATH,
        "wait<Config>(c.shared.cleared, 0);",
        "",
        MANY_HEADS,
    ),
    Bug(
        "the polling thread does not arrive when sums are cleared",
        _KERNEL,
        "arrive<Config>(c.shared.cleared);",
        "",
        GRADIENTS,
    ),
    Bug(
        "one share too few is waited for",  # with one tile in a head nothing is waited for
        _CLEAR,
        ".cleared,\n                      kv_tiles_of_head<Config>(c.params));",
        ".cleared,\n                      kv_tiles_of_head<Config>(c.params) - 1);",
        MANY_HEADS,
    ),
    Bug(
        "sums of the first heads are waited for, which no block clears",
        _CLEAR,
        "if (tile < c.params.ahead) return;",
        "",
        GRADIENTS,
    ),
    Bug(
        "shares that are cleared are not counted",
        _CLEAR,
        "ptx::pass_turn(&counters_of(c.params, share.batch, share.kv_head).cleared);",
        "",
        NARROW_GRADIENTS,
    ),
    Bug(
        "cleared shares are counted for the block's own head",
        _CLEAR,
        "ptx::pass_turn(&counters_of(c.params, share.batch, share.kv_head).cleared);",
        "ptx::pass_turn(&counters_of(c.params, c.item.batch, c.item.head).cleared);",
        MANY_HEADS,
    ),
    Bug(
        "tiles that no query sees clear nothing",
        _KERNEL,
        "  clear_role(c, tile);\n  if (Config::kv_tiles_per_convert_block > 0",
        "  if (Config::kv_tiles_per_convert_block > 0",
        MANY_HEADS,
    ),
    Bug(
        "the share of the tile after the one ahead is cleared",  # no block clears the first share
        _CLEAR,
        "const long long ahead = tile + c.params.ahead;",
        "const long long ahead = tile + c.params.ahead + 1;",
        SHARED_GRADIENTS,
    ),
)

_SHARES = (
    Bug(
        "the bytes copied to the sums are not zeros",  # they are whatever shared memory held
        _CLEAR,
        "c.shared.zeros[i + threadIdx.x % 32] = make_uint4(0, 0, 0, 0);",
        "",
        MANY_HEADS,
    ),
    Bug(
        "all tiles of a head have its first share",
        _CLEAR,
        "tile_of_head * units_of_share<Config>(params) * kRowsOfUnit",
        "tile_of_head * 0",
        NARROW_GRADIENTS,
    ),
    Bug(
        "a share begins where its tile's keys do",
        _CLEAR,
        "tile_of_head * units_of_share<Config>(params) * kRowsOfUnit",
        "item.kv_begin",
        GRADIENTS,
    ),
    Bug(
        "no block clears the last units of a head",  # its units do not divide evenly
        _CLEAR,
        "return ceil_div(units_of_head<Config>(params), kv_tiles_of_head<Config>(params));",
        "return units_of_head<Config>(params) / kv_tiles_of_head<Config>(params);",
        MANY_HEADS,
    ),
    Bug(
        "the last unit of a share keeps the sums that were there",
        _CLEAR,
        "units_of_head<Config>(params) - begin);",
        "units_of_head<Config>(params) - begin) - 1;",
        MANY_HEADS,
    ),
    Bug(
        "only the first query head of a group is cleared",
        _CLEAR,
        "share.kv_head * c.group + i;  // of all",
        "share.kv_head * c.group;  // of all",
        NARROW_GRADIENTS,
    ),
    Bug(
        "the rows of a share are cleared in the block's own head",
        _CLEAR,
        "share.kv_head * c.group + i;  // of all",
        "c.item.head * c.group + i;  // of all",
        MANY_HEADS,
    ),
    Bug(
        "the rows of a share are cleared in the block's own batch entry",
        _CLEAR,
        "static_cast<long long>(share.batch) * params.shape.heads_q +",
        "static_cast<long long>(c.item.batch) * params.shape.heads_q +",
        GRADIENTS,
    ),
)

BUGS = (*_WAITS, *_SHARES)
