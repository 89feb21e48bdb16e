"""Planted bugs in split keys and packed groups: in chunks, in merging, and in plans."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS", "HOPPER"]

_FEATURE = "cuda_src/features/kv_chunks.cuh"
_MERGE = "cuda_src/steps/merge.cu"
_MASK = "cuda_src/tile/mask.cuh"
_FA3_MATH = "cuda_src/fa3/forward_math.cuh"
_CHUNKS = "cuflash/planning/key_chunks.py"
_TIME = "cuflash/planning/forward_time.py"

_REFERENCE = "test_split_keys.py::test_against_float64"
_FAR = "test_part_offsets.py::test_parts_of_chunks_have_offsets_of_64_bits"
_UNIT = "tests/unit/test_plan_key_chunks.py::"
_FULL, _WINDOW = "fa2-float16-d64-full-128", "fa2-float16-d64-window-128"
_MANY, _DEAD = "fa2-float16-d64-many-chunks-128", "fa2-float16-d64-dead-rows-128"
_PACKED = "fa2-float16-d64-packed-causal-64"
_FA3 = "fa3-float16-d64-full-64x64-128"


def _bug(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    """A bug that a row of the kit has to notice."""
    return Bug(
        name, file, find, replace, f"tests/device/{row(of, _REFERENCE)}", row(of, _REFERENCE)
    )


_OF_CHUNKS = (
    _bug(
        "a chunk has all later keys",
        _FEATURE,
        "min(range.end, (split + 1) * tiles)",
        "range.end",
        _FULL,
    ),
    _bug(
        "a chunk ends a tile late",
        _FEATURE,
        "min(range.end, (split + 1) * tiles)",
        "min(range.end, (split + 1) * tiles + 1)",
        _FULL,
    ),
    _bug(
        "a chunk begins a tile late",
        _FEATURE,
        "max(range.begin, split * tiles)",
        "max(range.begin, split * tiles + (split > 0))",
        _FULL,
    ),
    _bug(
        "the last chunk is not merged",
        _FEATURE,
        "{range.begin / tiles, ceil_div(range.end, tiles)}",
        "{range.begin / tiles, range.end / tiles}",
        _FULL,
    ),
    _bug(
        "chunks before a window are merged",
        _FEATURE,
        "{range.begin / tiles, ceil_div(range.end, tiles)}",
        "{0, ceil_div(range.end, tiles)}",
        _WINDOW,
    ),
    _bug(
        "chunks and tiles change places",
        _FEATURE,
        "item.split = item.q_tile % chunks;",
        "item.split = item.q_tile / chunks;",
        _FULL,
    ),
    _bug(
        "parts of a chunk follow each other by rows of one head",
        _FEATURE,
        "shape.batch) * shape.heads_q * shape.seqlen_q * shape.head_dim_v;",
        "shape.batch) * shape.seqlen_q * shape.head_dim_v;",
        _FULL,
    ),
    _bug(
        "numbers of a chunk overlap those of the next",
        _FEATURE,
        "[split * part + place]",
        "[split + place]",
        _FULL,
    ),
)

_OF_PLACES = tuple(
    Bug(name, _FEATURE, find, replace, f"tests/emulator/{_FAR}", _FAR)
    for name, find, replace in (
        (
            "outputs of chunks have offsets of 32 bits",
            "return static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q *",
            "return shape.batch * shape.heads_q * shape.seqlen_q *",
        ),
        (
            "numbers of chunks have offsets of 32 bits",
            "const long long part = static_cast<long long>(shape.batch) *",
            "const int part = shape.batch *",
        ),
    )
)

_OF_MERGING = (
    _bug(
        "merging subtracts minus infinity from minus infinity",
        _MERGE,
        "subtrahend(reference), own_chunks",
        "reference, own_chunks",
        _DEAD,
    ),
    _bug(
        "chunks are weighted as if their sums were equal",
        _MERGE,
        "weight = number(params.kv_chunks.sum_parts) *",
        "weight = Compute(1) *",
        _FULL,
    ),
    _bug(
        "chunks are weighted as if their references were equal",
        _MERGE,
        "number(params.kv_chunks.reference_parts) - offset);",
        "Compute(0));",
        _FULL,
    ),
    _bug(
        "all chunks have the weight of the first",
        _MERGE,
        "__shfl_sync(0xffffffffu, weight, i)",
        "__shfl_sync(0xffffffffu, weight, 0)",
        _FULL,
    ),
    _bug(
        "warps that share a row take a chunk twice",
        _MERGE,
        "{chunks.begin + count * warp / Config::warps,",
        "{chunks.begin + max(0, count * warp / Config::warps - 1),",
        _MANY,
    ),
    _bug(
        "sums of the other warps are left out",
        _MERGE,
        "      sum += theirs[numbers - 1];\n",
        "",
        _MANY,
    ),
    _bug(
        "outputs of the other warps are those of the first",
        _MERGE,
        "const Compute* const theirs = shared + other * numbers;",
        "const Compute* const theirs = shared;",
        _MANY,
    ),
    _bug(
        "merging takes rows for those of another tile",
        _MERGE,
        "kv_range<Config>(seq, row / Config::block_q)",
        "kv_range<Config>(seq, 0)",
        _DEAD,
    ),
)

_OF_GROUPS = (
    _bug(
        "heads of a group see as many more keys",
        _MASK,
        "bool one_position = Config::Lengths::one_position;",
        "bool one_position = false;",
        _PACKED,
    ),
    _bug(
        "a second tile of a group needs no mask",
        _MASK,
        "(has_last && kv_last > seq.q_last) ||",
        "(has_last && kv_last > q_begin + seq.q_last) ||",
        "fa2-float16-d64-packed-70-causal-64x64-128",
    ),
    Bug(
        "strides of a group and of its heads change places",
        "cuflash/pipeline.py",
        "return batch, head, head * problem.group_rows if problem.heads_kv > 1 else 0",
        "return batch, head * problem.group_rows if problem.heads_kv > 1 else 0, head",
        "tests/unit/test_plan_packed_group.py::test_any_strides_of_heads_are_those_of_rows",
    ),
    Bug(
        "groups are packed beside lengths of their query",
        "cuflash/features/packed_group.py",
        ' or "seqused_q" in problem.operands:',
        ":",
        "tests/unit/test_plan_packed_group.py::test_what_a_head_or_a_row_has_for_itself_is_not_packed",
    ),
)

_OF_PLANS = (
    Bug(
        "sinks are in every chunk and in what is merged",
        _CHUNKS,
        '_OF_WHOLE_ROWS = ("sinks",)',
        "_OF_WHOLE_ROWS = ()",
        f"tests/emulator/{row('fa2-float16-d64-sinks-128', _REFERENCE)}",
    ),
    Bug(
        "parts are rounded to the dtype of the output",
        _CHUNKS,
        "return replace(config, output=self.whole.compute) if self.chunk else config",
        "return config",
        f"{_UNIT}test_the_workspace_holds_a_part_of_every_row_and_chunk",
    ),
    Bug(
        "there is no room for the last chunk",
        _CHUNKS,
        "return ceil_div(self.whole.seqlen_kv, self.chunk) if self.chunk else 1",
        "return max(1, self.whole.seqlen_kv // self.chunk) if self.chunk else 1",
        f"{_UNIT}test_the_workspace_holds_a_part_of_every_row_and_chunk",
    ),
    Bug(
        "the size of a batch decides about chunks",
        "cuflash/planning/invariant.py",
        "return replace(problem, batch=_USUAL_BATCH)",
        "return problem",
        f"{_UNIT}test_a_batch_of_any_size_has_the_same_tile_and_chunk",
    ),
    Bug(
        "chunks of any keys are taken",
        _CHUNKS,
        "return not chunk or chunk % block_kv == 0",
        "return True",
        f"{_UNIT}test_a_chunk_is_of_whole_tiles",
    ),
    Bug(
        "chunks may need more blocks than a launch has",
        "cuflash/planning/fa2.py",
        'launchable(chunks.items(main.grid), "splitting keys")',
        "chunks.items(main.grid)",
        f"{_UNIT}test_chunks_need_no_more_blocks_than_a_launch_has",
    ),
    Bug(
        "lists of tiles are given chunks",
        _CHUNKS,
        '_WITHOUT_CHUNKS = ("packed_lengths", "mask", "block_mask")',
        '_WITHOUT_CHUNKS = ("mask", "block_mask")',
        f"{_UNIT}test_what_has_no_chunks_refuses_them",
    ),
    Bug(
        "a device that is half idle has enough tiles",
        _TIME,
        "idle = tiles < 2 * limits.num_sms",
        "idle = tiles < limits.num_sms",
        "tests/unit/test_forward_time.py::test_few_tiles_or_few_rows_are_small",
    ),
    Bug(
        "steps between a tile's first and last chunk are forgotten",
        _TIME,
        "count = int((tiles * (1 + several + between)).sum())",
        "count = int((tiles * (1 + several)).sum())",
        "tests/unit/test_forward_time.py::test_items_are_those_that_blocks_walk",
    ),
)

BUGS = (*_OF_CHUNKS, *_OF_PLACES, *_OF_MERGING, *_OF_GROUPS, *_OF_PLANS)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    _bug(
        "warpgroups walk all keys before their chunk",
        _FA3_MATH,
        "    if constexpr (Config::Chunks::split) seen.begin = tile.kv.begin;\n",
        "",
        _FA3,
    ),
    _bug(
        "steps that need a mask go on before the chunk",
        _FA3_MATH,
        "Config::Chunks::split ? max(blocks.whole.end, first) : blocks.whole.end;",
        "blocks.whole.end;",
        "fa3-float16-d64-table-256x64-128",
    ),
    _bug(
        "warpgroups walk keys behind their chunk",
        _FA3_MATH,
        "max(tile.kv.begin + 1, min(tile.kv.end, seen.end))",
        "max(tile.kv.begin + 1, seen.end)",
        _FA3,
    ),
    _bug(
        "all chunks are stored where the first one is",
        "cuda_src/fa3/forward_store.cuh",
        "template out<Config>(c.params, tile.item.split);",
        "template out<Config>(c.params, 0);",
        _FA3,
    ),
)
