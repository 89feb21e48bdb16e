"""Bugs in caches of pages and in padding: in kernel code, and on the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_KERNEL = "cuda_src/features/cached_keys.cuh"
_SEQUENCE = "cuda_src/tile/sequence.cuh"
_PROBLEM = "cuflash/planning/problem.py"
_FEATURE = "cuflash/features/cached_keys.py"
_DEVICE = "cuflash/caches/device.py"
_TILES = "cuflash/planning/tiles/fa3.py"

_ON_GPU = "tests/device/test_caches.py"
_FILE = "test_paged_caches.py"


def _bug(name: str, file: str, find: str, replace: str, case: str) -> Bug:
    test = f"attention_is_that_of_the_reference{case}" if case.startswith("[") else case
    emulated = f"{_FILE}::test_{test}"
    if file.startswith("cuflash/"):
        return Bug(name, file, find, replace, f"tests/emulator/{emulated}")
    return Bug(name, file, find, replace, _ON_GPU, emulated)


BUGS = (
    _bug(
        "a page's box is that of a whole block",
        _KERNEL,
        "return table_pages == 1 ? block_kv : min(page_size, block_kv);",
        "return block_kv;",
        "[pages-of-16-fa3]",
    ),
    _bug(
        "boxes of a block overwrite each other",
        _KERNEL,
        "Matrix::panel_bytes + begin * Matrix::row_bytes, map",
        "Matrix::panel_bytes, map",
        "[pages-of-16-fa3]",
    ),
    _bug(
        "all boxes of a block are of its first page",
        _KERNEL,
        "place(cache, seq, key + i * rows).page : 0;",
        "place(cache, seq, key).page : 0;",
        "[pages-of-16-fa3]",
    ),
    _bug(
        "the fifth page of a block is its first",
        _KERNEL,
        "place(cache, seq, key + begin).page, 0);",
        "place(cache, seq, key).page, 0);",
        "[pages-of-8-fa3]",
    ),
    _bug(
        "the copy engine brings a part of a page from its beginning",
        _KERNEL,
        "place_in(cache, static_cast<int>(seq.kv_row0) + key).row);",
        "0);",
        "pages_have_the_bits_of_rows_that_follow_each_other[256-fa3]",
    ),
    _bug(
        "every size of a page is a power of two",
        _FEATURE,
        "if is_power else -1",
        "if True else -1",
        "tiles_go_with_pages",
    ),
    _bug(
        "the second half of wide keys is the first",
        _KERNEL,
        "Matrix::first_column(i), row, head",
        "Matrix::first_column(0), row, head",
        "[pages-of-128-fa3]",
    ),
    _bug(
        "a page beyond the keys is looked up",
        _KERNEL,
        "[min(in_entry.page, last)];",
        "[in_entry.page];",
        "a_table_is_read_where_keys_count",
    ),
    _bug(
        "the page of the last key is the one after",
        _KERNEL,
        "max(0, seq.seqlen_kv - 1)",
        "seq.seqlen_kv",
        "a_table_is_read_where_keys_count",
    ),
    _bug(
        "a page that is not there is read",
        _KERNEL,
        "return max(0, min(page, cache.pages - 1));",
        "return page;",
        "a_page_that_is_not_there_is_not_read",
    ),
    _bug(
        "the row in a page is that of the entry",
        _KERNEL,
        "slot - number * cache.page_size};",
        "slot};",
        "[pages-of-64-fa2]",
    ),
    _bug(
        "an entry's row of the table is the first",
        _KERNEL,
        "static_cast<long long>(seq.entry) * cache.table_pages;",
        "0 * cache.table_pages;",
        "[pages-of-64-fa2]",
    ),
    _bug(
        "gathered rows beyond the keys are not cleared",
        _KERNEL,
        "key + row < seq.seqlen_kv && column",
        "column",
        "[many-queries-fa2]",
    ),
    _bug(
        "a gathered part of a row is the first",
        _KERNEL,
        "(valid ? column : 0);",
        "0;",
        "[many-queries-fa2]",
    ),
    _bug(
        "a tail behind all keys of an entry is not cleared",
        _KERNEL,
        "    seq.rows_kv = 0x7fffffff;",
        "",
        "a_tail_behind_the_last_page_is_cleared",
    ),
    _bug(
        "padding counts as keys",
        _KERNEL,
        "    seq.seqlen_kv -= padding;\n",
        "",
        "[padding-fa2]",
    ),
    _bug(
        "keys begin at the padding",
        _KERNEL,
        "    seq.kv_row0 = padding;\n",
        "",
        "[padding-fa3]",
    ),
    _bug(
        "padding moves the last query",
        _KERNEL,
        "    seq.q_last -= padding;\n",
        "",
        "[padding-causal-fa3]",
    ),
    _bug(
        "padding moves a window",
        _KERNEL,
        "    seq.q_first -= padding;\n",
        "",
        "[padding-of-own-entries-fa2]",
    ),
    _bug(
        "slopes measure over the padding",
        _SEQUENCE,
        "params.used_lengths.shift(params.shape, batch) - padding_of(params, batch, 0) +",
        "params.used_lengths.shift(params.shape, batch) +",
        "[padding-causal-fa2]",
    ),
    _bug(
        "padding beyond the length is no less",
        _KERNEL,
        "min(cache_leftpad[entry], params.used_lengths.keys(params.shape, entry)));",
        "cache_leftpad[entry]);",
        "padding_is_clamped",
    ),
    _bug(
        "a map has the rows of entries",
        _PROBLEM,
        "entries, rows = self.pages if any(self.pages) else",
        "entries, rows = self.pages if False else",
        "[pages-of-16-fa3]",
    ),
    _bug(
        "a page counts the entries of the batch",
        _FEATURE,
        'shift), ("pages", pages))',
        'shift), ("pages", problem.batch))',
        "[pages-of-16-fa2]",
    ),
    _bug(
        "entries of the batch are those of the caches",
        _DEVICE,
        '    if "cache_batch_idx" in call.arrays:\n        entries',
        "    if False:\n        entries",
        "[entries-fa2]",
    ),
    _bug(
        "blocks may begin in the middle of a page",
        _TILES,
        "return not size or size % block_kv == 0 or block_kv % size == 0",
        "return True",
        "tiles_go_with_pages",
    ),
)
