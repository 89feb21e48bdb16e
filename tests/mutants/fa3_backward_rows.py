"""Bugs of the blocks of rows of FlashAttention-3's backward pass; see ``hopper``.

Where few tiles run at once, blocks that finish rows begin beside those that
multiply: ``GRADIENTS`` are for bugs of finishing. Rows are prepared by blocks
only where there are many tiles, and must not be late but in ``ROW_BLOCKS``:
there a block prepares thousands of rows that next to no key sees.

What is not here: the fence between numbers that threads wrote and copies that
read them, and a math role that says it has added its last dQ just before it
does; either is a matter of nanoseconds.
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import GRADIENTS, ORDERED_GRADIENTS, ROW_BLOCKS

__all__ = ["BUGS"]

_KERNEL = "cuda_src/fa3/backward.cu"
_LOAD = "cuda_src/fa3/backward_load.cuh"
_ROWS = "cuda_src/fa3/backward_rows.cuh"
_TURNS = "cuda_src/fa3/backward_turns.cuh"
_TYPES = "cuda_src/fa3/backward_types.cuh"

_WAITS = (
    Bug(
        "rows' numbers are loaded before they are prepared",
        _LOAD,
        "if constexpr (Config::shares > 0) await_prepared(c, tile);",
        "",
        ROW_BLOCKS,
    ),
    Bug(
        "one share too few is waited for",  # of heads of one tile: none
        _ROWS,
        ".prepared,\n                      kv_tiles_of_head<Config>(c.params));",
        ".prepared,\n                      kv_tiles_of_head<Config>(c.params) - 1);",
        ROW_BLOCKS,
    ),
    Bug(
        "only the first share of a block is said to be prepared",  # heads wait for ever
        _ROWS,
        "if (mine < to_prepare.count) ptx::pass_turn(",
        "if (mine < min(to_prepare.count, 1)) ptx::pass_turn(",
        ROW_BLOCKS,
    ),
    Bug(
        "rows are said to be summed before math has added",
        _ROWS,
        "wait<Config>(c.shared.added[0], 0);",
        "",
        GRADIENTS,
    ),
    Bug(
        "a share is finished before it is summed",
        _ROWS,
        "await_count<Config>(&counters(shared.finished[mine]).summed, "
        "kv_tiles_of_head<Config>(params));",
        "",
        GRADIENTS,
    ),
    Bug(
        "a share is finished when one tile is yet to add to it",  # the longest, in the end
        _ROWS,
        ".summed, kv_tiles_of_head<Config>(params));",
        ".summed, kv_tiles_of_head<Config>(params) - 1);",
        GRADIENTS,
    ),
    Bug(
        "tiles that no query sees do not say that they add nothing",  # their heads are not finished
        _KERNEL,
        "      pass_sums(c);",
        "",
        GRADIENTS,
    ),
    Bug(
        "batch entries share their heads' counters",  # half of the tiles are enough
        _TYPES,
        "[batch * params.shape.heads_kv + kv_head];",
        "[kv_head];",
        GRADIENTS,
    ),
    Bug(
        "turns are counted where heads are",
        _TURNS,
        "if (Config::shares > 0) heads += shape.batch * shape.heads_kv;",
        "",
        ORDERED_GRADIENTS,
    ),
)

_ARITHMETIC = (
    Bug(
        "dlse is forgotten by blocks of rows",
        _ROWS,
        "? 0.0f : sum - dlse[k];",
        "? 0.0f : sum;",
        ROW_BLOCKS,
    ),
    Bug(
        "delta of dead queries is what dO and O make of it",  # NaN, by which even zeros become NaN
        _ROWS,
        "= row_lse == infinity<float>() ? 0.0f : sum - dlse[k];",
        "= sum - dlse[k];",
        ROW_BLOCKS,
    ),
    Bug(
        "delta of odd rows is of another pair",  # dO of one row by O of its neighbour
        _ROWS,
        "const float sum = odd ? c[k][2 * k + 1] : c[k][2 * k];",
        "const float sum = odd ? c[k][2 * k] : c[k][2 * k + 1];",
        ROW_BLOCKS,
    ),
    Bug(
        "lse of rows eight apart change places",
        _ROWS,
        "backward_lse<Config>(lse[k]);",
        "backward_lse<Config>(lse[1 - k]);",
        ROW_BLOCKS,
    ),
    Bug(
        "blocks of rows leave in the sums of dQ what was there",
        _ROWS,
        "clear_sums(static_cast<float*>(params.dq_accumulator) + at * Config::head_dim);",
        "",
        ROW_BLOCKS,
    ),
    Bug(
        "the last units of a head are nobody's",  # which its tiles share unevenly
        _ROWS,
        "return ceil_div(units_of_head(params), kv_tiles_of_head<Config>(params));",
        "return units_of_head(params) / kv_tiles_of_head<Config>(params);",
        ROW_BLOCKS,
    ),
    Bug(
        "only the first query head of a group has its rows",
        _ROWS,
        "static_cast<int>(share.kv_head * group + heads - before * group)",
        "static_cast<int>(share.kv_head * group)",
        GRADIENTS,
    ),
    Bug(
        "what is left after all tiles is one share again and again",
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

BUGS = (*_WAITS, *_ARITHMETIC)
