"""Planted bugs in packed queries over caches: in kernel code, and on the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_QUERIES = "cuda_src/features/packed_queries.cuh"
_TOKENS = "cuda_src/features/packed_tokens.cuh"
_SCHEDULE = "cuda_src/tile/schedule.cuh"
_MERGE = "cuda_src/steps/merge.cu"
_SEQUENCE = "cuda_src/tile/sequence.cuh"
_APPEND = "cuda_src/steps/append_types.cuh"

_ON_GPU = "tests/device/test_packed_queries.py"
_FILE = "test_packed_queries.py::test_"
_DRAWN = "tests/property/test_packed_queries.py::test_attention_is_that_of_the_reference"
_UNIT = "tests/unit/test_packed_queries.py::test_"


def _bug(name: str, file: str, find: str, replace: str, case: str) -> Bug:
    test = f"attention_is_that_of_the_reference{case}" if case.startswith("[") else case
    return Bug(name, file, find, replace, _ON_GPU, f"{_FILE}{test}")


_OF_KERNELS = (
    _bug(
        "rows of no entry count to the last one",
        _QUERIES,
        "item.entry < entries ? item.queries.count : 0;",
        "item.queries.count;",
        "[slopes-fa3]",
    ),
    _bug(
        "packed queries are aligned to the rows of all",
        _QUERIES,
        "seq.q_last += shift;",
        "seq.q_last += 0;",
        "[plain-fa2]",
    ),
    _bug(
        "a packed window begins where that of all rows does",
        _QUERIES,
        "seq.q_first += shift;",
        "seq.q_first += 0;",
        "[left-window-fa2]",
    ),
    _bug(
        "packed queries are written into the entry of the batch",
        _QUERIES,
        "seq.batch = 0;",
        "",
        "[plain-fa3]",
    ),
    _bug(
        "packed queries all begin at row 0",
        _QUERIES,
        "seq.q_row0 = item.queries.begin;",
        "seq.q_row0 = 0;",
        "[plain-fa3]",
    ),
    _bug(
        "an entry writes the rows of the next",
        _QUERIES,
        "seq.rows_q = item.queries.count;",
        "seq.rows_q = item.queries.count + 1;",
        "[plain-fa2]",
    ),
    _bug(
        "slopes go by the position of all rows",
        _SEQUENCE,
        "padding_of(params, batch, 0) +\n         shift_of_packed(params, batch, 0);",
        "padding_of(params, batch, 0);",
        "[slopes-fa2]",
    ),
    _bug(
        "a merged row is of the entry before its own",
        _QUERIES,
        "if (q_begins[middle] <= row) {",
        "if (q_begins[middle] < row) {",
        "keys_in_chunks[plain-fa2]",
    ),
    _bug(
        "a merged row is counted from the first of all",
        _MERGE,
        "row -= static_cast<int>(seq.q_row0);",
        "",
        "keys_in_chunks[plain-fa2]",
    ),
    _bug(
        "chunks of a list are looked up past its end",
        _SCHEDULE,
        "order.tiles / items_of_tile<Config>(params);",
        "order.tiles;",
        "keys_in_chunks[plain-fa2]",
    ),
    _bug(
        "a packed token is of the entry before its own",
        _TOKENS,
        "if (begin(shape, middle) <= row) {",
        "if (begin(shape, middle) < row) {",
        "[appended-fa2]",
    ),
    _bug(
        "packed tokens of no entry are appended to the first",
        _APPEND,
        "return {0, 0x7fffffff, head, 0, place};",
        "return {0, 0, head, 0, place};",
        "[appended-fa2]",
    ),
    _bug(
        "an entry's new tokens are those of all",
        _TOKENS,
        "return max(0, begin(shape, entry + 1) - begin(shape, entry));",
        "return shape.seqlen_kv;",
        "[appended-fa2]",
    ),
)

_OF_THE_HOST = (
    Bug(
        "NumPy leaves rows of no entry unwritten",
        "cuflash/caches/host_packed.py",
        "out[behind], lse[:, behind] = 0, -np.inf",
        "lse[:, behind] = -np.inf",
        _DRAWN,
    ),
    Bug(
        "NumPy's packed queries have the slopes of the first entry",
        "cuflash/caches/host_packed.py",
        "slopes[b : b + 1] if slopes.ndim == 2",
        "slopes[:1] if slopes.ndim == 2",
        _DRAWN,
    ),
    Bug(
        "NumPy's packed tokens are rows of the first entry",
        "cuflash/caches/host_packed.py",
        "return begins[entry] + token",
        "return token",
        _DRAWN,
    ),
    Bug(
        "NumPy's packed queries do not advance",
        "cuflash/caches/host_packed.py",
        "np.arange(own.stop - own.start) * advance",
        "0",
        _DRAWN,
    ),
    Bug(
        "offsets on the host may fall",
        "cuflash/caches/packed.py",
        "np.maximum.accumulate(np.clip(offsets[1:].astype(np.int64), 0, total))",
        "np.clip(offsets[1:].astype(np.int64), 0, total)",
        f"{_UNIT}offsets_that_fall_or_lead_out_count_as_the_nearest",
    ),
    Bug(
        "max_seqlen_q is not held against the entries",
        "cuflash/caches/host_packed.py",
        "if longest > call.sizes.most_queries:",
        "if False:",
        f"{_UNIT}what_is_refused_changes_nothing",
    ),
    Bug(
        "warps share merged rows by the queries of all",
        "cuflash/planning/key_chunks.py",
        "self.whole.most_queries or self.whole.seqlen_q",
        "self.whole.seqlen_q",
        f"{_UNIT}rows_of_many_chunks_are_merged_as_those_of_an_unpacked_call",
    ),
    Bug(
        "the tile of packed queries is that of their sum",
        "cuflash/planning/invariant.py",
        "max(fewest, problem.most_queries)",
        "max(fewest, problem.seqlen_q)",
        f"{_UNIT}tile_and_chunk_are_those_of_an_unpacked_call",
    ),
    Bug(
        "a mask of packed queries is left out where it hides nothing of all rows",
        "cuflash/features/window.py",
        "    if not every:\n",
        "    if True:\n",
        f"{_UNIT}tile_and_chunk_are_those_of_an_unpacked_call",
    ),
    Bug(
        "a window that ends far behind the keys does not fit in 32 bits",
        "cuflash/features/window.py",
        "None if last is None else min(last, seqlen_kv)",
        "last",
        f"{_UNIT}bounds_of_entries_are_those_of_the_definition",
    ),
)

BUGS = (*_OF_KERNELS, *_OF_THE_HOST)
