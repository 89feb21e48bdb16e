"""Bugs of FlashAttention-2's forward pass for few queries: of heads that share a block."""

from __future__ import annotations

from .bug import Bug
from .fa2_few import bug_of

__all__ = ["BUGS"]

_WALK = "cuda_src/fa2/forward_few.cu"
_LOAD = "cuda_src/fa2/forward_few_load.cuh"
_PRODUCTS = "cuda_src/fa2/forward_few_products.cuh"
_STORE = "cuda_src/fa2/forward_few_store.cuh"
_TYPES = "cuda_src/fa2/forward_few_types.cuh"
_PLAN = "cuflash/planning/fa2.py"
_TILES = "cuflash/planning/tiles/fa2_few.py"
_TABLE = "tests/unit/test_plan_few_rows.py::test_the_keys_of_a_head_are_read_by_the_fewest_blocks"
_PACKED = "packed_queries_of_heads_that_share_keys"
_WHOLE = "heads_that_share_keys_have_their_own_sinks_where_keys_are_whole"

BUGS = (
    bug_of(
        "few heads: every part is the first",
        _WALK,
        "    part = block % parts;\n",
        "",
        "[drafts-of-two-parts-split]",
    ),
    bug_of(
        "few heads: every part is a tile",
        _WALK,
        "    block /= parts;\n",
        "",
        "[drafts-of-two-parts-merging]",
    ),
    bug_of(
        "few heads: the order has all query heads",
        _WALK,
        "    heads /= static_cast<unsigned>(params.heads_of_block);\n",
        "",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: the mask has a query for each row",
        _WALK,
        "const int i = c.rows.query(lane.row + Scores::row(m, group));",
        "const int i = query0 + lane.row + Scores::row(m, group);",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: the mask has the keys of the first lane",
        _WALK,
        "const int j = key0 + lane.column + Scores::column(n, which);",
        "const int j = key0 + Scores::column(n, which);",
        "[drafts-merging]",
    ),
    bug_of(
        "few heads: the scale of keys is that of the item's head",
        _WALK,
        "RowsOfQueries{c.seq.entry, c.rows.head0, query0, key0}",
        "RowsOfQueries{c.seq.entry, c.item.head, query0, key0}",
        "[drafts-float8-split]",
    ),
    bug_of(
        "few heads: keys are those of the item's head",
        _WALK,
        "rows.head0 / (shape.heads_q / shape.heads_kv);",
        "item.head / (shape.heads_q / shape.heads_kv);",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: parts lie a block of rows apart",
        _TYPES,
        "part * (Config::rows / heads)),",
        "part * Config::rows),",
        "[drafts-of-two-parts-split]",
    ),
    bug_of(
        "few heads: blocks begin one head apart",
        _TYPES,
        "head0(item.head * heads),",
        "head0(item.head),",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: queries are counted by heads",
        _TYPES,
        "return query0 + row / heads;",
        "return query0 + row % heads;",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: heads are counted by queries",
        _TYPES,
        "return head0 + row % heads;",
        "return head0 + row / heads;",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: a block has a row for each query",
        _TYPES,
        "count(queries_here(item, seq) * heads)",
        "count(queries_here(item, seq))",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: the last part goes on to the next tile",
        _TYPES,
        "const int end = min((item.q_tile + 1) * Config::block_q, seq.rows_q);",
        "const int end = seq.rows_q;",
        f"{_PACKED}[heads0-split]",
    ),
    bug_of(
        "few heads: the last part goes on after the sequence",
        _TYPES,
        "const int end = min((item.q_tile + 1) * Config::block_q, seq.rows_q);",
        "const int end = (item.q_tile + 1) * Config::block_q;",
        "[drafts-of-three-heads-split]",
    ),
    bug_of(
        "few heads: both fragments of Q are loaded from the first rows",
        _LOAD,
        "i / (128 * Types::steps) * 16 + lane",
        "lane",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: both fragments multiply the first rows of Q",
        _PRODUCTS,
        "q[(m * Types::steps + step) * 32 + lane]",
        "q[step * 32 + lane]",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: both fragments multiply the first rows of Q with bytes",
        _PRODUCTS,
        "q[(m * Types::steps + first + i) * 32 + lane]",
        "q[(first + i) * 32 + lane]",
        "[drafts-float8-split]",
    ),
    bug_of(
        "few heads: both fragments multiply the first weights with bytes",
        _PRODUCTS,
        "const auto& far = weights.value[m][k / 8 + 1];",
        "const auto& far = weights.value[0][k / 8 + 1];",
        "[drafts-float8-merging]",
    ),
    bug_of(
        "few heads: both fragments have the ends of the first rows",
        _STORE,
        "    const int row = position.row + Types::Output::row(m, group);\n    c.shared.ends",
        "    const int row = position.row + 8 * group;\n    c.shared.ends",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: the output of a block is that of its first head",
        _STORE,
        "q_row<T>(tensor, c.seq, c.rows.head(row), c.rows.query(row))",
        "q_row<T>(tensor, c.seq, c.rows.head0, c.rows.query(row))",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: the ends of rows are those of the item's head",
        _STORE,
        "  item.head = c.rows.head(row);\n",
        "",
        "[drafts-merging]",
    ),
    bug_of(
        "few heads: a block has one sink",
        _STORE,
        "end_row<Config>(c.params, c.rows.head(row), chunk.reference, chunk.sum);",
        "end_row<Config>(c.params, c.rows.head0, chunk.reference, chunk.sum);",
        _WHOLE,
    ),
    bug_of(
        "few heads: a block that merges has one sink",
        _STORE,
        "const float keep = end_row<Config>(c.params, c.rows.head(row), ends.x, ends.y);",
        "const float keep = end_row<Config>(c.params, c.rows.head0, ends.x, ends.y);",
        "[drafts-of-three-heads-merging]",
    ),
    bug_of(
        "few heads: packed entries have no more queries than was said",
        _TILES,
        "self.block_q if problem.sequences else min(self.block_q, problem.seqlen_q)",
        "min(self.block_q, problem.most_queries or problem.seqlen_q)",
        f"{_PACKED}[heads0-split]",
    ),
    bug_of(
        "few heads: heads with slopes share a block",
        _TILES,
        '_FEATURES - {"alibi", "packed_group"}',
        '_FEATURES - {"packed_group"}',
        "[features-split]",
    ),
    bug_of(
        "few heads: memory holds half of the rows of several heads",
        _TILES,
        "not (problem.sequences or heads)",
        "not problem.sequences",
        "[drafts-split]",
    ),
    bug_of(
        "few heads: a block is told the whole group",
        _PLAN,
        '("heads_of_block", max(1, tile.heads))',
        '("heads_of_block", problem.group)',
        "[drafts-of-forty-heads-split]",
    ),
    bug_of(
        "few heads: a tile has one part",
        _PLAN,
        '("parts", tile.parts(problem))',
        '("parts", 1)',
        "[drafts-of-two-parts-split]",
    ),
    Bug(
        "few heads: each query head has a block",
        _TILES,
        "problem.batch * problem.heads_q // max(1, self.heads)",
        "problem.batch * problem.heads_q",
        _TABLE,
    ),
    Bug(
        "few heads: blocks of the same keys are not counted",
        _TILES,
        "(problem.group // heads * ceil_div(queries, rows // heads), rows, -heads)",
        "(problem.group // heads, rows, -heads)",
        _TABLE,
    ),
    Bug(
        "few heads: every block has the most rows",
        _TILES,
        "for rows in (ROWS, row.most_rows)",
        "for rows in (row.most_rows,)",
        _TABLE,
    ),
    Bug(
        "few heads: as few heads as possible share a block",
        _TILES,
        "rows // heads), rows, -heads)\n",
        "rows // heads), rows, heads)\n",
        _TABLE,
    ),
    Bug(
        "few heads: all packed queries are of one entry",
        _TILES,
        "queries = min(ROWS, problem.most_queries or problem.seqlen_q)",
        "queries = min(ROWS, problem.seqlen_q)",
        "tests/unit/test_plan_few_rows.py::test_a_whole_tile_of_packed_queries_is_shared",
    ),
    Bug(
        "few heads: an entry has the queries of all entries",
        "cuflash/planning/fa2_few_time.py",
        "return self.problem.usual_lengths[0]",
        "return self.problem.seqlen_q",
        "tests/unit/test_packed_queries.py::"
        "test_chunks_are_merged_where_those_of_as_many_unpacked_entries_are",
    ),
    Bug(
        "few heads: blocks of packed queries all have some",
        "cuflash/planning/fa2_few_time.py",
        "return self.problem.num_entries * heads * self._parts",
        "return self.tile.blocks(self.problem)",
        "tests/unit/test_packed_queries.py::"
        "test_chunks_are_merged_where_those_of_as_many_unpacked_entries_are",
    ),
    Bug(
        "few heads: lengths that are given have one kind of rows",
        "cuflash/telling.py",
        "return (1, 2, 64) if of_lengths",
        "return (1, ROWS // 2) if of_lengths",
        "tests/unit/test_calls_to_come.py::"
        "test_few_queries_of_any_groups_have_their_kernels_at_lengths_that_are_given",
    ),
)
