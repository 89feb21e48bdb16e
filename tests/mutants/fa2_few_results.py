"""Planted bugs in FlashAttention-2's forward pass for few queries: its results, and the host."""

from __future__ import annotations

from .bug import Bug
from .fa2_few import bug_of

__all__ = ["BUGS"]

_STORE = "cuda_src/fa2/forward_few_store.cuh"
_ENDS = "cuda_src/tile/running_ends.cuh"
_MERGE = "cuda_src/steps/merge.cu"


BUGS = (
    bug_of(
        "few rows: results have rows that are not there",
        _STORE,
        "    if (row < rows) result",
        "    result",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: a warp that sees NaN alone has seen no key",
        _STORE,
        "if (end.y == 0.0f) continue;",
        "if (end.x == -infinity<float>()) continue;",
        "a_row_that_sees_nan_is_nan[q-split]",
    ),
    bug_of(
        "few rows: rows beyond the used lengths see keys",
        _STORE,
        "if (is_surplus<Config>(c.seq, c.rows.query(row))) reference",
        "if (false) reference",
        "rows_beyond_the_used_lengths_are_zero",
    ),
    bug_of(
        "few rows: values have no scale",
        _STORE,
        "if (inverse != 0.0f) inverse *= scale;",
        "if (scale == 0.0f) inverse *= scale;",
        "[float8-merging]",
    ),
    bug_of(
        "few rows: the ends of the chunks before are those of this chunk",
        _STORE,
        "before = c.shared.ends_of_merged[(number + 1) % 2]",
        "before = c.shared.ends_of_merged[number % 2]",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: the ends of merged rows have one place",
        _STORE,
        "      c.shared.ends_of_merged[number % 2].data[row] = {",
        "      c.shared.ends_of_merged[(number + 1) % 2].data[row] = {",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: rows without keys have ends of chunks",
        _STORE,
        "    if (count > 0) {",
        "    if (count >= 0) {",
        "[decode-merging]",
    ),
    bug_of(
        "few rows: the reference is the last chunk's",
        _STORE,
        "data[row] = {reference, factors",
        "data[row] = {chunk.reference, factors",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: every chunk is stored as the first",
        _STORE,
        "template out<Config>(c.params, c.item.split);",
        "template out<Config>(c.params, 0);",
        "[wide-split]",
    ),
    bug_of(
        "few rows: merged rows have no sinks",
        _STORE,
        "const float keep = end_row<Config>(c.params, c.rows.head(row), ends.x, ends.y);",
        "const float keep = 1.0f;",
        "[features-merging]",
    ),
    bug_of(
        "few rows: sums of chunks are added as they are",
        _ENDS,
        "return fma(before, keep, weight);",
        "return before + weight;",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: a chunk's weight does not know its sum",
        _ENDS,
        "rounded_product(sum, Logits<Config>::exponential(own - offset))",
        "Logits<Config>::exponential(own - offset)",
        "[wide-split]",
    ),
    bug_of(
        "chunks in order: each 32 begin with their own reference",
        _MERGE,
        "      if (lane == 0) earlier = before;\n",
        "",
        "more_chunks_than_a_warp_has_lanes",
    ),
    bug_of(
        "chunks in order: the reference so far is the first chunk's",
        _MERGE,
        "before = __shfl_sync(0xffffffffu, reference, 31);",
        "before = __shfl_sync(0xffffffffu, reference, 0);",
        "more_chunks_than_a_warp_has_lanes",
    ),
    bug_of(
        "chunks in order: all warps of a row have its first columns",
        _MERGE,
        "column = first_column() + lane;",
        "column = lane;",
        "[wide-split]",
    ),
    bug_of(
        "chunks in order: all warps of a row store its first columns",
        _MERGE,
        "const int column = first_column() + lane + 32 * n;",
        "const int column = lane + 32 * n;",
        "[wide-split]",
    ),
    bug_of(
        "chunks in order: every warp has a row",
        _MERGE,
        "(number * Config::warps + threadIdx.x / 32) / Config::warps_of_row;",
        "number * Config::warps + threadIdx.x / 32;",
        "[wide-split]",
    ),
    bug_of(
        "few rows: a block of the merge has eight warps",
        "cuflash/planning/tiles/steps.py",
        "return MERGE_WARPS // self.warps_of_row * self.warps_of_row",
        "return MERGE_WARPS",
        "[three-parts-split]",
    ),
    bug_of(
        "few rows: chunks of a block are counted in keys",
        "cuflash/planning/fa2.py",
        '("chunk_tiles", tile.chunk // tile.block_kv)',
        '("chunk_tiles", tile.chunk)',
        "every_way_has_the_same_bits[wide]",
    ),
    bug_of(
        "few rows: chunks are merged in any order",
        "cuflash/planning/fa2.py",
        "kv_chunk, in_order=few)",
        "kv_chunk, in_order=False)",
        "merging_rounds_every_sum_as_split_keys_do",
    ),
    bug_of(
        "few rows: packed queries keep results of eight rows",
        "cuflash/planning/tiles/fa2_few.py",
        "whole = replace(tile, result_rows=tile.rows).fitted(limits)",
        "whole = tile.fitted(limits)",
        "packed_queries[split]",
    ),
    bug_of(
        "few rows: sixteen queries are many",
        "cuflash/planning/tiles/fa2_few.py",
        "or problem.seqlen_q) > ROWS:",
        "or problem.seqlen_q) >= ROWS:",
        "[sixteen-queries-split]",
    ),
    bug_of(
        "few rows: fa3 comes first",
        "cuflash/planning/plan.py",
        'order = ("fa2", "fa3", "fa1")',
        "order = ALGORITHMS",
        "[decode-split]",
    ),
    bug_of(
        "few rows: bytes are given to other tiles in odd chunks",
        "cuflash/planning/plan.py",
        "    if not takes_few(problem, limits, blocks, kv_chunk):",
        "    if not takes_few(problem, limits, blocks, None):",
        "chunks_of_float8_caches_are_whole_tiles",
    ),
    Bug(
        "few rows: the attribute of a launch is another one",
        "cuflash/cuda/overlap.py",
        "_OVERLAPS = 6",
        "_OVERLAPS = 7",
        "tests/unit/test_early_launches.py",
    ),
    Bug(
        "few rows: a launch that overlaps has no attribute",
        "cuflash/cuda/overlap.py",
        "stream, _ATTRIBUTE_ADDRESS, 1)",
        "stream, _ATTRIBUTE_ADDRESS, 0)",
        "tests/unit/test_early_launches.py",
    ),
    Bug(
        "few rows: the main kernel overlaps the call before",
        "cuflash/cuda/prepared_kernel.py",
        "if self.overlaps and overlapping is not None:",
        "if overlapping is not None:",
        "tests/unit/test_early_launches.py",
    ),
    Bug(
        "few rows: older devices launch the merge early",
        "cuflash/planning/key_chunks.py",
        "self.limits.compute_capability >= (9, 0)",
        "self.limits.compute_capability >= (8, 0)",
        "tests/unit/test_overlap.py",
    ),
    Bug(
        "few rows: an error of an early launch is lost",
        "cuflash/cuda/launch.py",
        "                if failed:\n",
        "                if failed == -1:\n",
        "tests/unit/test_early_launches.py",
    ),
    Bug(
        "few rows: XLA's launch of a merge has no attribute",
        "cuflash/jax/native/table.py",
        "Kernel.overlaps: int(kernel.overlaps),",
        "Kernel.overlaps: 0,",
        "tests/unit/test_jax_native.py",
    ),
    Bug(
        "few rows: very many keys are one chunk",
        "cuflash/planning/fa2_few.py",
        "least = min(_CHUNKS[-1], ceil_div(keys, _MOST_CHUNKS))",
        "least = ceil_div(keys, _MOST_CHUNKS)",
        "tests/unit/test_plan_few_rows.py",
    ),
)
