"""Planted bugs in FlashAttention-2's forward pass for few queries: how warps walk over keys."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS", "bug_of"]

_WALK = "cuda_src/fa2/forward_few.cu"
_LOAD = "cuda_src/fa2/forward_few_load.cuh"
_PRODUCTS = "cuda_src/fa2/forward_few_products.cuh"
_TYPES = "cuda_src/fa2/forward_few_types.cuh"

_ON_GPU = "tests/device/test_few_rows.py"
_FILE = "test_few_rows.py"


def bug_of(name: str, file: str, find: str, replace: str, case: str) -> Bug:
    """Return a bug; ``case`` is a case of the first test with its way, or another test."""
    test = f"attention_is_that_of_the_reference{case}" if case.startswith("[") else case
    emulated = f"{_FILE}::test_{test}"
    if file.startswith("cuflash/"):
        return Bug(name, file, find, replace, f"tests/emulator/{emulated}")
    return Bug(name, file, find, replace, _ON_GPU, emulated)


BUGS = (
    bug_of(
        "few rows: the ring begins with values",
        _WALK,
        "load(i % 2 == 0);",
        "load(i % 2 != 0);",
        "[wide-split]",
    ),
    bug_of(
        "few rows: what follows keys is loaded for an even ring alone",
        _WALK,
        "load_next(slots % 2 == 0);",
        "load_next(true);",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: a matrix is read before its copies are there",
        _WALK,
        "wait_copies<Config::copies, slots - 1>();",
        "wait_copies<Config::copies, slots>();",
        "[wide-split]",
    ),
    bug_of(
        "few rows: lanes read the copies of others too early",
        _WALK,
        "    __syncwarp();\n    auto* const data",
        "    auto* const data",
        "[float8-split]",
    ),
    bug_of(
        "few rows: the output keeps its old reference",
        _WALK,
        "{ x *= keep.value[m][group]; });\n  }",
        "{ x *= 1.0f; });\n  }",
        "[steep-split]",
    ),
    bug_of(
        "few rows: no tile is at an edge",
        _WALK,
        "const bool edge = is_edge_tile<Config>(c.seq, query0, key0);",
        "const bool edge = false;",
        "[sixteen-queries-split]",
    ),
    bug_of(
        "few rows: chunks begin where the window does",
        _WALK,
        "(c.range.begin / tiles + 1) * tiles;",
        "c.range.begin + tiles;",
        "every_way_has_the_same_bits[window]",
    ),
    bug_of(
        "few rows: the last chunk ends after the last tile",
        _WALK,
        "min(end, c.range.end)",
        "end",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: results are overwritten while they are merged",
        _WALK,
        "    merge_chunk(c, number);\n    __syncthreads();",
        "    merge_chunk(c, number);",
        "[wide-merging]",
    ),
    bug_of(
        "few rows: results are merged before all warps have posted them",
        _WALK,
        "  post_rows(c, state);\n  __syncthreads();",
        "  post_rows(c, state);",
        "[wide-split]",
    ),
    bug_of(
        "few rows: Q is read before it is there",
        _WALK,
        "  __syncthreads();  // Q is there\n",
        "",
        "[wide-split]",
    ),
    bug_of(
        "few rows: a window moves tiles to other warps",
        _TYPES,
        "range.begin % Config::warps;",
        "0;",
        "every_way_has_the_same_bits[window]",
    ),
    bug_of(
        "few rows: the second register of Q has other columns",
        _LOAD,
        "* 16 + lane / 4 + part % 2 * 8;",
        "* 16 + lane / 4 + part / 2 * 8;",
        "[sixteen-queries-split]",
    ),
    bug_of(
        "few rows: pages are those of the tile in hand",
        _LOAD,
        "places.find(c, tile + Config::warps);",
        "places.find(c, tile);",
        "[pages-merging]",
    ),
    bug_of(
        "few rows: rows beyond the keys are loaded",
        _LOAD,
        "key0 + row < c.seq.seqlen_kv && chunk",
        "chunk",
        "[narrow-split]",
    ),
    bug_of(
        "few rows: columns beyond the head are loaded",
        _LOAD,
        " && chunk * Tile::chunk < columns;",
        ";",
        "[narrow-split]",
    ),
    bug_of(
        "few rows: values are as wide as keys",
        _LOAD,
        "c.params.v, c.params.shape.head_dim_v);",
        "c.params.v, c.params.shape.head_dim);",
        "[narrow-split]",
    ),
    bug_of(
        "few rows: lanes step by the same rows at any width",
        _LOAD,
        "i > 0 && 32 % Tile::chunks == 0;",
        "i > 0;",
        "[two-widths-split]",
    ),
    bug_of(
        "few rows: bytes of two keys are not sorted",
        _PRODUCTS,
        "__byte_perm(bytes, 0, 0x3120)",
        "__byte_perm(bytes, 0, 0x3210)",
        "[float8-split]",
    ),
    bug_of(
        "few rows: neighbouring columns of float8 values change places",
        _PRODUCTS,
        "4 * column + 2 * which + n % 2;",
        "4 * column + which + 2 * (n % 2);",
        "[float8-split]",
    ),
    bug_of(
        "few rows: a chunk of float8 values is read twice",
        _PRODUCTS,
        "v.chunk_at(k + lane % 16, chunk + lane / 16)",
        "v.chunk_at(k + lane % 16, chunk)",
        "[float8-split]",
    ),
    bug_of(
        "few rows: every query head has keys of its own",
        _WALK,
        "rows.head0 / (shape.heads_q / shape.heads_kv);",
        "rows.head0 % shape.heads_kv;",
        "[features-split]",
    ),
    Bug(
        "few rows: a page that is not there is read",
        _LOAD,
        "Keys::existing(c.params.cached_keys, next.page)",
        "next.page",
        "tests/device/test_caches.py",
        "test_paged_caches.py::test_a_page_that_is_not_there_is_not_read",
    ),
)
