"""Planted bugs in caches: the kernel that appends."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_KERNEL = "cuda_src/steps/append_kv.cu"
_TYPES = "cuda_src/steps/append_types.cuh"

_ON_GPU = "tests/device/test_caches.py"
_ATTENTION = "test_kvcache.py::test_attention_is_that_of_the_reference"
_BITS = (
    "test_append_kv.py::test_appended_bits_are_those_of_the_reference_and_no_other_changes[float16]"
)
_EMPTY = "test_empty_tables.py::test_an_empty_table_has_angles_for_as_many_positions"
_TURNS = "test_append_places.py::test_few_warps_take_all_rows_and_entries_in_turns"


def _bug(name: str, file: str, find: str, replace: str, emulated: str = _BITS) -> Bug:
    return Bug(name, file, find, replace, _ON_GPU, emulated)


def _shown(name: str, file: str, find: str, replace: str, test: str) -> Bug:
    """A bug that a test of the emulator kills, also where there is a GPU."""
    return Bug(name, file, find, replace, f"tests/emulator/{test}", test)


BUGS = (
    _bug(
        "a token goes to the slot behind the cache",
        _TYPES,
        "params.capacity - length_before(params, entry);",
        "params.capacity + 1 - length_before(params, entry);",
    ),
    _bug(
        "a page is not held to those there are",
        _TYPES,
        "return found < params.entries ? found : -1;",
        "return found;",
        "test_append_kv.py::test_a_page_that_is_not_there_is_not_written[8]",
    ),
    _bug(
        "the first slot of the next page is in the page before",
        _TYPES,
        "0 : slot / params.page_size;",
        "0 : (slot > 0 ? slot - 1 : slot) / params.page_size;",
    ),
    _bug(
        "values lie as keys do",
        _KERNEL,
        "of_keys ? params.k_cache : params.v_cache;",
        "true ? params.k_cache : params.v_cache;",
    ),
    _bug(
        "new values are the new keys",
        _KERNEL,
        "of_keys ? params.k : params.v;",
        "true ? params.k : params.v;",
    ),
    _bug(
        "the two conventions of pairs change places",
        _KERNEL,
        "rotation.interleaved ? 2 * pair : pair;",
        "!rotation.interleaved ? 2 * pair : pair;",
    ),
    _bug("values are rotated too", _KERNEL, "  if (!of_keys) rotation.pairs = 0;\n", ""),
    _bug(
        "columns that are not rotated come from the first ones",
        _KERNEL,
        "stored(from[rotation.pairs + i]);",
        "stored(from[i]);",
    ),
    _bug(
        "positions are slots although others are given",
        _TYPES,
        "if (params.rotary_seqlens != nullptr) return",
        "if (false) return",
    ),
    _bug(
        "a token one position behind the tables is rotated",
        _TYPES,
        "params.rotary_rows - first;",
        "params.rotary_rows + 1 - first;",
        "test_append_kv.py::test_a_token_without_angles_is_not_written",
    ),
    _bug(
        "a length below 0 leads in front of the cache",
        _TYPES,
        "return length < 0 ? 0 : length <",
        "return length <",
        "test_append_kv.py::test_lengths_are_clamped",
    ),
    _bug(
        "pages of the table are looked for as if rows had no gaps",
        _TYPES,
        "entry * params.table_stride + page",
        "entry * (params.capacity / params.page_size) + page",
    ),
    _bug(
        "tokens of lost pages are counted by the first lane's pages",
        _KERNEL,
        "page = begin / size + lane;",
        "page = begin / size;",
        "test_append_kv.py::test_a_page_that_is_not_there_is_not_written[8]",
    ),
    _bug(
        "offsets have 32 bits",
        _KERNEL,
        "batch * tensor.batch_stride",
        "static_cast<int>(batch * tensor.batch_stride)",
        "test_append_kv.py::test_offsets_have_64_bits",
    ),
    _bug(
        "the length after the append counts tokens that did not fit",
        _KERNEL,
        "static_cast<int>(length_before(params, entry)) + fitting;",
        "static_cast<int>(length_before(params, entry)) + params.shape.seqlen_kv;",
        _ATTENTION,
    ),
    _bug(
        "queries are rotated by numbers after the tables",
        _KERNEL,
        "const bool known = 0 <= position && position < params.rotary_rows;",
        "const bool known = true;",
        _ATTENTION,
    ),
    _bug(
        "queries advance without a mask",
        _KERNEL,
        "params.queries_advance != 0 ? at.row : 0;",
        "at.row;",
        _ATTENTION,
    ),
    _shown(
        "a table without elements has every angle",
        _KERNEL,
        "if (params.rotates == 0) return",
        "if (params.rotary_cos == nullptr) return",
        _EMPTY,
    ),
    _shown(
        "tokens need no angles of a table without elements",
        _TYPES,
        "if (params.rotates != 0) {",
        "if (params.rotary_cos != nullptr) {",
        _EMPTY,
    ),
    _bug(
        "an entry that begins before the tables has tokens in them",
        _TYPES,
        "first < 0 ? 0 : params.rotary_rows - first;",
        "params.rotary_rows - first;",
        "test_append_kv.py::test_a_token_without_angles_is_not_written",
    ),
    _shown(
        "a warp appends one row alone",
        _KERNEL,
        "i < 2 * of_keys + of_queries; i += all_warps",
        "i < 2 * of_keys + of_queries; i += 1LL << 60",
        _TURNS,
    ),
    _shown(
        "a warp counts the tokens of one entry alone",
        _KERNEL,
        "entry < shape.batch; entry += all_warps",
        "entry < shape.batch; entry += 1LL << 60",
        _TURNS,
    ),
)
