"""Planted bugs in the list of packed sequences' tiles, and in the code that reads it."""

from __future__ import annotations

from .packed_lengths import packed_bug

__all__ = ["BUGS"]

_LIST = "cuda_src/steps/list_items.cu"
_SCHEDULE = "cuda_src/tile/schedule.cuh"


def _listed(which: str) -> str:
    return f"test_packed_lists.py::test_tiles_are_listed[{which}-any]"


BUGS = (
    packed_bug(
        "a q tile is the one after it in the list",
        _SCHEDULE,
        "q_items(params)[tiles - item.q_tile];",
        "q_items(params)[tiles - item.q_tile + 1];",
        "fa2",
    ),
    packed_bug(
        "a kv tile is the one before it in the list",
        _SCHEDULE,
        "kv_items[1 + item.kv_begin / block_kv];",
        "kv_items[item.kv_begin / block_kv];",
        "fa2",
    ),
    packed_bug(
        "surplus blocks of fa2 read past the list of q tiles",
        "cuda_src/fa2/forward.cu",
        "  if (Config::Lengths::packed && blockIdx.x >= order.tiles * order.heads) return;\n",
        "",
        "fa2",
    ),
    packed_bug(
        "places behind a list of kv tiles repeat a tile of it",
        _LIST,
        "items[i] = {-1, 0};",
        "items[i] = {1, 0, listed_sequence<Config>(params, 1).queries,"
        " listed_sequence<Config>(params, 1).keys};",
        "fa2",
    ),
    packed_bug(
        "a tile comes with the rows of the first sequence",
        _LIST,
        "PackedItem{entry, tile, sequence.queries, sequence.keys};",
        "PackedItem{entry, tile, listed_sequence<Config>(params, 0).queries, sequence.keys};",
        "fa2",
    ),
    packed_bug(
        "sequences with short loops come first",
        _LIST,
        "return kClasses - 2 - (2 * power + half);",
        "return 2 * power + half;",
        "fa2",
        _listed("fa2-forward"),
    ),
    packed_bug(
        "a class is a whole power of two",
        _LIST,
        "(2 * power + half);",
        "2 * power;",
        "fa2",
        _listed("fa2-forward"),
    ),
    packed_bug(
        "tiles are listed by the loops of the others' rows",
        _LIST,
        "const int of_loop = Config::rows_of_keys ? queries.count : keys.count;",
        "const int of_loop = Config::rows_of_keys ? keys.count : queries.count;",
        "fa2",
        _listed("fa2-backward"),
    ),
    packed_bug(
        "tiles of a long sequence are listed 32 at most",
        _LIST,
        "i < sequence.tiles; i += 32) {",
        "i < min(sequence.tiles, 32); i += 32) {",
        "fa2",
        _listed("fa3-backward"),
    ),
    packed_bug(
        "offsets of the warps before are not looked at",
        _LIST,
        "      if (i < warp) begin = max(begin, shared.of_warp[i]);\n",
        "",
        "fa2",
        _listed("fa2-forward"),
    ),
    packed_bug(
        "offsets of the threads before are not looked at",
        _LIST,
        "    begin = max(begin, before);\n",
        "",
        "fa2",
        _listed("fa2-forward"),
    ),
    packed_bug(
        "largest offsets of warps are replaced before all have read them",
        _LIST,
        "    __syncthreads();  // every warp's offset has been read\n",
        "",
        "fa2",
        _listed("fa2-forward"),
    ),
    packed_bug(
        "the first sequence begins at its offset",
        _LIST,
        "const bool given = 0 < entry && entry <= entries;",
        "const bool given = 0 <= entry && entry <= entries;",
        "fa2",
        _listed("fa3-forward"),
    ),
    packed_bug(
        "an offset behind the array is taken as it is",
        _LIST,
        "given ? min(offsets[entry], total) : 0",
        "given ? offsets[entry] : 0",
        "fa2",
        _listed("fa3-forward"),
    ),
    packed_bug(
        "rows behind the last offset are not written",
        _LIST,
        "if (threadIdx.x == 0) begins[entries + 1] = total;",
        "if (threadIdx.x == 0) begins[entries + 1] = before;",
        "fa2",
    ),
    packed_bug(
        "rows behind the last sequence come first",
        _LIST,
        "class_of(entry < params.entries ? of_loop : 0)",
        "class_of(of_loop)",
        "fa2",
        _listed("fa2-forward"),
    ),
)
