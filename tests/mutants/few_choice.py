"""Planted bugs of the host: ways of few queries, and plans for all batches."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_CHOICES = "cuflash/planning/fa2_few.py"
_TILES = "cuflash/planning/tiles/fa2_few.py"
_INVARIANT = "cuflash/planning/invariant.py"
_CHOICE = "tests/unit/test_few_choice.py"
_WAYS = "tests/unit/test_few_ways.py"
_PLANS = "tests/unit/test_plan_invariant.py"

#: A call of ``plan`` for the NumPy code.
_OF_NUMPY = "return plan(problem, limits"


def _way(name: str, find: str, replace: str, test: str = _WAYS) -> Bug:
    return Bug(f"few ways: {name}", _CHOICES, find, replace, test)


def _plan(name: str, find: str, replace: str, test: str = _PLANS) -> Bug:
    return Bug(f"all batches: {name}", _INVARIANT, find, replace, test)


BUGS = (
    _way("at most 32 chunks", "_MOST_CHUNKS = 64", "_MOST_CHUNKS = 32", _CHOICE),
    _way(
        "no keys are merged in a block",
        "if chunk and problem.has_pairs else None",
        "if chunk else None",
        _CHOICE,
    ),
    _way(
        "one chunk too many is tried",
        "ceil_div(keys, _MOST_CHUNKS))",
        "keys // _MOST_CHUNKS)",
        _CHOICE,
    ),
    _way("all keys are a chunk", "least <= c < keys", "least <= c <= keys", _CHOICE),
    _way(
        "ratios are added as they are",
        "(times[chunk] / shortest) ** 2",
        "(times[chunk] / shortest)",
        _CHOICE,
    ),
    _way(
        "the worst batch alone counts",
        "squares[chunk] += (times[chunk] / shortest) ** 2",
        "squares[chunk] = max(squares[chunk], times[chunk] / shortest)",
        _CHOICE,
    ),
    _way("the slowest way is taken", "best = min(works", "best = max(works"),
    _way("merged chunks are split too", "0 if best.merges else best.chunk", "best.chunk"),
    _way("a chunk that is asked for is not kept", "if chunk is None else [chunk]", ""),
    _way(
        "blocks with many rows merge chunks",
        "merging_tile(tiles[-1], limits, chunk) if",
        "merging_tile(tiles[0], limits, chunk) if",
    ),
    _way(
        "blocks have the most rows",
        "    for tile in tiles:\n        yield _with",
        "    for tile in tiles[:1]:\n        yield _with",
    ),
    _way("blocks merge no chunks", "    if merging is not None:", "    if False:"),
    _way(
        "loads of many rows are even",
        "if work.problem.float8 or work.tile.rows > ROWS:",
        "if work.problem.float8:",
    ),
    _way(
        "loads of float8 are even",
        "if work.problem.float8 or work.tile.rows > ROWS:",
        "if work.tile.rows > ROWS:",
    ),
    _way("loads are even from half on", "{False: 0.45, True: 0.57}", "{False: 0.5, True: 0.57}"),
    _way(
        "merging blocks have even loads as early",
        "{False: 0.45, True: 0.57}",
        "{False: 0.45, True: 0.45}",
    ),
    _way("a full device has even loads", "True: 0.57}, 0.9", "True: 0.57}, 1.1"),
    _way(
        "loads are never even",
        "return replace(work, tile=work.tile.with_even_loads())",
        "return work",
    ),
    _way(
        "nothing is compiled for even loads",
        "if tile.rows == ROWS and not problem.float8:",
        "if False:",
    ),
    _way("nothing is compiled for merged chunks", "*(((merging, 0),) if merging else ())", ""),
    _way("nothing is compiled for whole keys", "_CHUNKS[:2] if", "_CHUNKS[1:2] if"),
    Bug(
        "few ways: even loads are longer than the ring",
        _TILES,
        "min(self.num_slots, max(needed, self._fewest_slots))",
        "max(needed, self._fewest_slots)",
        _WAYS,
    ),
    Bug(
        "few ways: even loads leave results no room",
        _TILES,
        "min(self.num_slots, max(needed, self._fewest_slots))",
        "min(self.num_slots, needed)",
        _WAYS,
    ),
    Bug("few ways: 64 KiB are on their way", _TILES, "= 96 * 1024", "= 64 * 1024", _WAYS),
    Bug(
        "few ways: heads share only blocks with many rows",
        _TILES,
        "(tile,) if tile.rows == ROWS else (tile, tile_of_row(problem, limits, fewer))",
        "(tile,)",
        _WAYS,
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
        "if problem.most_queries and isinstance(tiles[0], Fa2FewTile):",
        "if False:",
    ),
    _plan(
        "rows without room are planned as before",
        "usual = _usual(problem, FEWEST_OF_WHOLE_TILES)",
        "usual = _usual(problem)",
    ),
    _plan("rows without room have no tile", "        if not tiles:\n", "        if False:\n"),
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
        "steadiest(packed, limits, _BATCHES)",
        "steadiest(packed, limits, (_USUAL_BATCH,))",
    ),
    _plan(
        "groups are not packed when fa3 is timed",
        "steadiest(packed, limits, _BATCHES)",
        "steadiest(usual, limits, _BATCHES)",
    ),
    _plan(
        "a chunk that is asked for is not taken",
        "    if kv_chunk is not None:\n        return first, tiles, kv_chunk, first.reason\n",
        "",
    ),
    _plan(
        "few queries have the reason of one batch",
        'steady_chunk, "for few queries, in batches of any size"',
        "steady_chunk, first.reason",
    ),
    _plan(
        "fa3 has the reason of one batch",
        '(tile,), chunk, "nearly the fastest in batches of any size"',
        "(tile,), chunk, first.reason",
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
    _plan("one entry counts once", "_BATCHES = (1, 1, 2", "_BATCHES = (1, 2", _CHOICE),
    _plan(
        "the batch chooses the chunk",
        "fastest_way(with_packed_group(problem), limits, tiles, chunk)",
        "fastest_way(with_packed_group(problem), limits, tiles)",
        "tests/unit/test_plan_key_chunks.py",
    ),
    _plan(
        "all batches have the first way",
        "tile, chunk = fastest_way(with_packed_group(problem), limits, tiles, chunk)",
        "pass",
        _WAYS,
    ),
)
