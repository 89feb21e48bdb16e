"""Planted bugs in a block mask."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS", "HOPPER"]

_HOST = "cuflash/features/block_mask.py"
_ARGUMENT = "cuflash/block_mask.py"
_UNIT = "tests/unit/test_block_mask.py::"
_TERM = "cuda_src/features/block_mask.cuh"


def _on_device(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    test = f"test_block_mask.py::test_against_the_reference[{of}]"
    return Bug(name, file, find, replace, f"tests/device/{test}", test)


BUGS = (
    Bug(
        "NumPy's block mask hides what is True",
        _HOST,
        "where=~shown",
        "where=shown",
        _UNIT + "test_it_computes_what_the_reference_does",
    ),
    Bug(
        "NumPy's blocks are of the first head",
        _HOST,
        "place.head * (heads > 1)",
        "place.head * 0",
        _UNIT + "test_it_computes_what_the_reference_does",
    ),
    Bug(
        "bytes of blocks are 1 or False",
        _HOST,
        "blocks.ndim) + blocks.shape) != 0",
        "blocks.ndim) + blocks.shape) == 1",
        _UNIT + "test_it_computes_what_the_reference_does",
    ),
    Bug(
        "blocks are of any size",
        _HOST,
        "not 0 < size <= _MOST or size % _STEP",
        "not 0 < size <= _MOST",
        _UNIT + "test_its_sizes_are_multiples_of_64",
    ),
    Bug(
        "a column that is not there is the last",
        _ARGUMENT,
        "(columns >= kv_blocks)",
        "(columns > kv_blocks)",
        _UNIT + "test_lists_that_leave_their_arrays",
    ),
    Bug(
        "fa3 takes its tiles whatever the blocks",
        "cuflash/planning/tiles/fa3_tables.py",
        "    if not keys:\n",
        "    if keys:\n",
        _UNIT + "test_tiles_divide_the_blocks_where_they_can",
    ),
    Bug(
        "bits of blocks have a word for all tiles along",
        "cuflash/planning/block_bits.py",
        "ceil_div(along, _TILES_OF_WORD)",
        "1",
        _UNIT + "test_tiles_divide_the_blocks_where_they_can",
    ),
    _on_device(
        "kernels read the block behind",
        _TERM,
        "data[min(row, last_row) * row_stride",
        "data[min(row + 1, last_row) * row_stride",
        "fa2-float16-64x64-d64-200x333-bh-90",
    ),
    _on_device(
        "fa1 ends the rows of a tile where bounds end",
        "cuda_src/tile/shown_tiles.cuh",
        "      --range.end;\n",
        "      break;\n",
        "fa1-float16-128x128-d64-300x400-1h-90",
    ),
    _on_device(
        "fa2 forward brings V of the tile next to the one before",
        "cuda_src/fa2/forward_steps.cuh",
        "-c.blocks.left_out(step) * Config::block_kv * c.v_stream",
        "-0 * Config::block_kv * c.v_stream",
        "fa2-float16-128x128-d64-300x400-11-90",
    ),
    _on_device(
        "fa2 backward goes on in the same head",
        "cuda_src/fa2/backward_loads.cuh",
        "q.move(heads * c.params.q.head_stride",
        "q.move(0 * c.params.q.head_stride",
        "fa2-float16-64x64-d64-200x333-bh-90",
    ),
)
#: Bugs of FlashAttention-3.
HOPPER = (
    _on_device(
        "a listed block has the position of the first one",
        "cuda_src/fa3/forward_math.cuh",
        "      block = blocks.note.block.tile;\n",
        "",
        "fa3-float16-128x128-d64-300x400-1h-90-alibi_slopes",
    ),
    _on_device(
        "a hidden tile of one block is shown",
        _TERM,
        "if constexpr (hides && one) return -infinity<Compute>();",
        "if constexpr (hides && one) return score;",
        "fa3-float16-128x128-d64-300x400-1h-90",
    ),
    _on_device(
        "load tells the parts of a tile in another order",
        _TERM,
        "<< (2 * m + n);",
        "<< (2 * n + m);",
        "fa3-bfloat16-64x64-d64-200x333-b1-90",
    ),
    _on_device(
        "the second warpgroup has the parts of the first",
        "cuda_src/fa3/backward_math.cuh",
        "note.pairs >> (2 * part)",
        "note.pairs >> (0 * part)",
        "fa3-bfloat16-64x64-d64-200x333-b1-90",
    ),
    _on_device(
        "a cut tile is shown whole",
        "cuda_src/steps/list_blocks.cu",
        "        every &= shown;\n",
        "        every |= shown;\n",
        "fa3-bfloat16-64x64-d64-200x333-b1-90",
    ),
    _on_device(
        "the last block of a tile is left out of its bits",
        "cuda_src/steps/list_blocks.cu",
        "return {tile * rows / block, last / block + 1};",
        "return {tile * rows / block, max(tile * rows / block + 1, last / block)};",
        "fa3-bfloat16-64x64-d64-200x333-b1-90",
    ),
)
