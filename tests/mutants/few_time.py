"""Planted bugs of the host: predicted times of few queries."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_TIMES = "cuflash/planning/fa2_few_time.py"
_TIME = "tests/unit/test_few_time.py"
_CHOICE = "tests/unit/test_few_choice.py"

_RATES = "_MEMORY, _ALONE = 4.44e6, {1: 0.034e6, 2: 0.078e6}"


def _time(name: str, find: str, replace: str, test: str = _TIME) -> Bug:
    return Bug(f"few times: {name}", _TIMES, find, replace, test)


BUGS = (
    _time(
        "a multiprocessor alone reads 64 bytes a nanosecond",
        _RATES,
        _RATES.replace("0.078e6", "0.064e6"),
    ),
    _time("the memory is a tenth slower", _RATES, _RATES.replace("4.44e6", "4.0e6")),
    _time("the memory is a tenth faster", _RATES, _RATES.replace("4.44e6", "4.9e6")),
    _time(
        "float8 numbers come at half again the rate",
        _RATES,
        _RATES.replace("0.034e6", "0.051e6"),
    ),
    _time(
        "float8 numbers come at two thirds of the rate",
        _RATES,
        _RATES.replace("0.034e6", "0.023e6"),
    ),
    _time("many rows read as fast as few", "_WIDE = {1: 1.0, 2: 0.7}", "_WIDE = {1: 1.0, 2: 1.0}"),
    _time("many rows read at half the rate", "2: 0.7}", "2: 0.5}"),
    _time(
        "all blocks have many rows",
        "if self.tile.rows > ROWS else 1.0",
        "if self.tile.rows >= ROWS else 1.0",
    ),
    _time("L2 is as fast as it can be", "_SHARED = 7.5e6", "_SHARED = 15e6"),
    _time("L2 is as slow as the memory", "_SHARED = 7.5e6", "_SHARED = 4.5e6"),
    _time(
        "a full round reads from L2",
        "if blocks > sms and self._sharing > 1:",
        "if blocks >= 120 and self._sharing > 1:",
    ),
    _time(
        "blocks that share no keys read from L2",
        "if blocks > sms and self._sharing > 1:",
        "if blocks > sms and self._sharing < 0:",
    ),
    _time(
        "blocks that share keys read them each",
        "blocks / self._sharing / _MEMORY",
        "blocks / _MEMORY",
    ),
    _time(
        "only heads share keys",
        "self.problem.group // max(1, self.tile.heads) * self._parts)",
        "self.problem.group // max(1, self.tile.heads))",
        _CHOICE,
    ),
    _time(
        "a block has its first keys at once",
        "_BEGIN = {1: 0.0, 2: 0.5}",
        "_BEGIN = {1: 0.0, 2: 0.0}",
        _CHOICE,
    ),
    _time("a launch costs twice as much", "_LAUNCH = 5.7", "_LAUNCH = 11.4"),
    _time("merging a chunk costs half", "{1: 0.0, 2: 0.65}", "{1: 0.0, 2: 0.3}"),
    _time("merging a chunk costs twice as much", "{1: 0.0, 2: 0.65}", "{1: 0.0, 2: 1.3}"),
    _time("merging a row costs twice as much", "{1: 0.09, 2: 0.116}", "{1: 0.09, 2: 0.23}"),
    _time("merging a row is free in float8", "{1: 0.09, 2: 0.116}", "{1: 0.0, 2: 0.116}"),
    _time("merging costs the same for all columns", "* self.problem.head_dim_v / 128\n", "\n"),
    _time(
        "rounds cost three times as much", "_ROUND = {1: 4.0, 2: 2.3}", "_ROUND = {1: 4.0, 2: 6.9}"
    ),
    _time("rounds cost half in float8", "_ROUND = {1: 4.0, 2: 2.3}", "_ROUND = {1: 2.0, 2: 2.3}"),
    _time("rows of a block cost nothing", "_ROW = 0.07", "_ROW = 0.0", _CHOICE),
    _time(
        "the merge kernel costs three times as much",
        "_MERGE, _MERGED_CHUNK = 1.94, 0.1",
        "_MERGE, _MERGED_CHUNK = 5.8, 0.1",
    ),
    _time("partial results come at twice the rate", "_PARTS = 1.56e6", "_PARTS = 3.1e6"),
    _time(
        "a last round shows what one block needs alone",
        "idle * alone / (1 + before)",
        "idle * alone",
    ),
    _time("a last round is full", "memory + idle * alone / (1 + before)", "max(memory, alone)"),
    _time("a last round hides all", "idle * alone / (1 + before)", "0.0"),
    _time(
        "busy multiprocessors show it",
        "idle = 1 - blocks / self.limits.num_sms",
        "idle = blocks / self.limits.num_sms",
    ),
    _time(
        "a short chunk has no block",
        "return ceil_div(self._keys, self.chunk) if self.chunk else 1",
        "return max(1, self._keys // self.chunk) if self.chunk else 1",
        _CHOICE,
    ),
    _time(
        "float8 keys have the bytes of queries",
        "ELEMENTS[self.problem.stored].itemsize",
        "ELEMENTS[self.problem.storage].itemsize",
    ),
    _time("merging costs the same for all rows", "row * self.tile.result_rows)", "row * 8)"),
    _time("further rounds cost as much as the second", "math.sqrt(further)", "further"),
    _time("whole rows have a merge kernel", "if not self.chunk or self.merges:", "if self.merges:"),
    _time(
        "nothing has no block",
        "return max(1, self._tiles",
        "return max(0, self._tiles",
        _CHOICE,
    ),
    _time(
        "values are as wide as keys",
        "return (self.problem.head_dim + self.problem.head_dim_v)",
        "return (2 * self.problem.head_dim)",
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
        "a full round is followed by another",
        "further = ceil_div(blocks, self.limits.num_sms) - 1",
        "further = blocks // self.limits.num_sms",
        _CHOICE,
    ),
    _time(
        "the last part of a tile has no block",
        "ceil_div(self._queries, self.tile.rows // max(1, self.tile.heads))",
        "max(1, self._queries // (self.tile.rows // max(1, self.tile.heads)))",
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
)
