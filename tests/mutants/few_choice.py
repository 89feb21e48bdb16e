"""Planted bugs of the host: times of few queries, and plans for all batches."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_FEW = "cuflash/planning/fa2_few.py"
_INVARIANT = "cuflash/planning/invariant.py"
_TIME = "tests/unit/test_few_time.py"
_CHOICE = "tests/unit/test_few_choice.py"
_PLANS = "tests/unit/test_plan_invariant.py"

#: A call of ``plan`` for the NumPy code.
_OF_NUMPY = "return plan(problem, limits"


def _time(name: str, find: str, replace: str, test: str = _TIME) -> Bug:
    return Bug(f"few times: {name}", _FEW, find, replace, test)


def _plan(name: str, find: str, replace: str) -> Bug:
    return Bug(f"all batches: {name}", _INVARIANT, find, replace, _PLANS)


BUGS = (
    _time(
        "a multiprocessor alone reads 43 bytes a nanosecond",
        "_ALONE = 4.5e6, {1: 0.034e6, 2: 0.064e6}",
        "_ALONE = 4.5e6, {1: 0.034e6, 2: 0.043e6}",
    ),
    _time(
        "float8 numbers come at half again the rate",
        "_ALONE = 4.5e6, {1: 0.034e6, 2: 0.064e6}",
        "_ALONE = 4.5e6, {1: 0.051e6, 2: 0.064e6}",
    ),
    _time(
        "float8 numbers come at two thirds of the rate",
        "_ALONE = 4.5e6, {1: 0.034e6, 2: 0.064e6}",
        "_ALONE = 4.5e6, {1: 0.023e6, 2: 0.064e6}",
    ),
    _time("multiprocessors do not crowd each other", "_CROWDED = 0.2", "_CROWDED = 0.0"),
    _time("multiprocessors crowd each other more", "_CROWDED = 0.2", "_CROWDED = 0.3"),
    _time("merging blocks crowd others as soon", "True: 0.15}, 0.35", "True: 0.04}, 0.35", _CHOICE),
    _time("whole rows crowd others as late", "{False: 0.04, True", "{False: 0.15, True", _CHOICE),
    _time("the last third crowds like the others", "0.15}, 0.35", "0.15}, 0.05"),
    _time("a launch costs twice as much", "_LAUNCH, _CHUNK = 5.0", "_LAUNCH, _CHUNK = 10.0"),
    _time("merging a chunk costs half", "_CHUNK = 5.0, 0.75", "_CHUNK = 5.0, 0.35"),
    _time("merging a chunk costs twice as much", "_CHUNK = 5.0, 0.75", "_CHUNK = 5.0, 1.5"),
    _time("rounds cost twice as much", "_ROUND = {1: 4.0, 2: 3.3}", "_ROUND = {1: 4.0, 2: 6.6}"),
    _time("rounds cost half in float8", "_ROUND = {1: 4.0, 2: 3.3}", "_ROUND = {1: 2.0, 2: 3.3}"),
    _time("rows of a block cost nothing", "_ROW = 0.1", "_ROW = 0.0"),
    _time(
        "the merge kernel costs twice as much",
        "_MERGE, _MERGED_CHUNK = 3.0, 0.1",
        "_MERGE, _MERGED_CHUNK = 6.0, 0.1",
    ),
    _time("partial results come at twice the rate", "_PARTS = 2.6e6", "_PARTS = 5.2e6"),
    _time(
        "a short chunk has no block",
        "chunks = ceil_div(self._keys, self.chunk) if self.chunk else 1",
        "chunks = max(1, self._keys // self.chunk) if self.chunk else 1",
    ),
    _time(
        "float8 keys have the bytes of queries",
        "size = ELEMENTS[problem.stored].itemsize",
        "size = ELEMENTS[problem.storage].itemsize",
    ),
    _time("merging costs the same for all rows", "* self.tile.result_rows / 8 if", "if"),
    _time(
        "the last round is full",
        "main += self._round(others, read",
        "main += self._round(self.limits.num_sms, read",
    ),
    _time(
        "a third of the multiprocessors crowd each other",
        "(busy - 0.5) /",
        "(busy - 0.33) /",
    ),
    _time("further rounds cost as much as the second", "math.sqrt(further)", "further"),
    _time("whole rows have a merge kernel", "if not self.chunk or self.merges:", "if self.merges:"),
    _time("at most 32 chunks", "_MOST_CHUNKS = 64", "_MOST_CHUNKS = 32", _CHOICE),
    _time(
        "nothing has no block",
        "blocks = max(1, self._tiles",
        "blocks = max(0, self._tiles",
        _CHOICE,
    ),
    _time(
        "values are as wide as keys",
        "read = (problem.head_dim + problem.head_dim_v)",
        "read = (2 * problem.head_dim)",
        _CHOICE,
    ),
    _time(
        "partial results are as wide as keys",
        "self._rows * self.problem.head_dim_v * size",
        "self._rows * self.problem.head_dim * size",
        _CHOICE,
    ),
    _time(
        "a chunk is longer than all keys",
        "min(self.chunk or self._keys, self._keys)",
        "(self.chunk or self._keys)",
        _CHOICE,
    ),
    _time(
        "blocks crowd each other on all multiprocessors",
        "crowded = max(0.0, min(1.0, (busy - 0.5)",
        "crowded = max(0.3, min(1.0, (busy - 0.5)",
        _CHOICE,
    ),
    _time(
        "a full round is followed by another",
        "further = ceil_div(blocks, self.limits.num_sms) - 1",
        "further = blocks // self.limits.num_sms",
        _CHOICE,
    ),
    _time(
        "the last part of a tile has no block",
        "ceil_div(self._queries, self.tile.rows // heads)",
        "max(1, self._queries // (self.tile.rows // heads))",
        _CHOICE,
    ),
    _time(
        "a block has the rows of one head",
        "self._queries * max(1, self.tile.heads))",
        "self._queries)",
        _CHOICE,
    ),
    _time(
        "a block has the rows of all queries",
        "return min(self.tile.rows, self._queries * max(1, self.tile.heads))",
        "return self._queries * max(1, self.tile.heads)",
        _CHOICE,
    ),
    _time(
        "keys that no query sees are read",
        "return max(1, end - begin)",
        "return max(1, self.problem.seqlen_kv)",
        _CHOICE,
    ),
    _time(
        "keys are those of the first query",
        "keys_seen(0, self.problem.seqlen_q)",
        "keys_seen(0, 1)",
        _CHOICE,
    ),
    _time(
        "no keys are merged in a block",
        "if not chunk or not problem.has_pairs:",
        "if not chunk:",
        _CHOICE,
    ),
    _time(
        "one chunk too many is tried",
        "ceil_div(keys, _MOST_CHUNKS))",
        "keys // _MOST_CHUNKS)",
        _CHOICE,
    ),
    _time("all keys are a chunk", "least <= c < keys", "least <= c <= keys", _CHOICE),
    _time(
        "chunks are merged where there is no room",
        "if chunk and merging_tile(tile, limits, chunk) is not None:",
        "if chunk:",
        _CHOICE,
    ),
    _time(
        "ratios are added as they are",
        "(times[chunk] / shortest) ** 2",
        "(times[chunk] / shortest)",
        _CHOICE,
    ),
    _time(
        "the worst batch alone counts",
        "squares[chunk] += (times[chunk] / shortest) ** 2",
        "squares[chunk] = max(squares[chunk], times[chunk] / shortest)",
        _CHOICE,
    ),
    _plan(
        "the NumPy code takes other blocks than those asked for",
        f"{_OF_NUMPY}, algorithm=algorithm, blocks=blocks, kv_chunk=kv_chunk)\n    asked_for",
        f"{_OF_NUMPY}, algorithm=algorithm, kv_chunk=kv_chunk)\n    asked_for",
    ),
    _plan(
        "the NumPy code takes another algorithm than that asked for",
        f"{_OF_NUMPY}, algorithm=algorithm, blocks=blocks, kv_chunk=kv_chunk)\n    asked_for",
        f"{_OF_NUMPY}, blocks=blocks, kv_chunk=kv_chunk)\n    asked_for",
    ),
    _plan(
        "packed queries have results of half the rows",
        "if isinstance(tile, Fa2FewTile) and problem.most_queries:",
        "if False:",
    ),
    _plan(
        "rows without room are planned as before",
        "usual = _usual(problem, FEWEST_OF_WHOLE_TILES)",
        "usual = _usual(problem)",
    ),
    _plan("rows without room have no tile", "        if tile is None:\n", "        if False:\n"),
    _plan(
        "blocks that are asked for come in chunks",
        "and blocks is None and kv_chunk is None",
        "and kv_chunk is None",
    ),
    _plan(
        "fa3 has the chunk of the usual batch",
        'if first.algorithm == "fa3" and',
        'if first.algorithm == "none" and',
    ),
    _plan(
        "fa3 is timed with the usual batch alone",
        "steadiest(with_packed_group(usual), limits, _BATCHES)",
        "steadiest(with_packed_group(usual), limits, (_USUAL_BATCH,))",
    ),
    _plan(
        "groups are not packed when fa3 is timed",
        "steadiest(with_packed_group(usual), limits, _BATCHES)",
        "steadiest(usual, limits, _BATCHES)",
    ),
    _plan(
        "a chunk that is asked for is not taken",
        "if isinstance(first.tile, Fa2FewTile) and kv_chunk is None:",
        "if isinstance(first.tile, Fa2FewTile):",
    ),
    _plan(
        "few queries have the reason of one batch",
        'steady_chunk, "for few queries, in batches of any size"',
        "steady_chunk, first.reason",
    ),
    _plan(
        "fa3 has the reason of one batch",
        '*steady, "nearly the fastest in batches of any size"',
        "*steady, first.reason",
    ),
    _plan("one packed query is planned alone", "fewest: int = 2", "fewest: int = 1"),
    _plan("two packed queries are planned like three", "fewest: int = 2", "fewest: int = 3"),
    _plan(
        "totals of packed queries without a mask are choices of their own",
        "q_offset=problem.q_offset + further if problem.has_last else 0",
        "q_offset=problem.q_offset + further",
    ),
    _plan("a window stays where it was", 'v + further if n == "first" else v', "v"),
    Bug("all batches: 64 entries are the most", _INVARIANT, "32, 64, 128)", "32, 64)", _CHOICE),
)
