"""Planted bugs in packed sequences in FlashAttention-3; only the emulator runs them."""

from __future__ import annotations

from .packed_lengths import packed_bug

__all__ = ["BUGS"]

_FEATURE = "cuda_src/features/packed_lengths.cuh"
_FA3_LOAD = "cuda_src/fa3/forward_load.cuh"
_FA3_BACKWARD = "cuda_src/fa3/backward.cu"
_FA3_CLEAR = "cuda_src/fa3/backward_clear.cuh"

BUGS = (
    packed_bug(
        "fa3's queries are those of the first sequence",
        _FA3_LOAD,
        "static_cast<int>(tile.seq.q_row0) + tile.q_begin()",
        "tile.q_begin()",
        "fa3",
    ),
    packed_bug(
        "fa3's gradients of keys see the queries of the first sequence",
        "cuda_src/fa3/backward_load.cuh",
        "static_cast<int>(c.seq.q_row0) + row,",
        "row,",
        "fa3",
    ),
    packed_bug(
        "rows of the next sequence are no tail",
        "cuda_src/tile/tail.cuh",
        "Config::Lengths::packed || seq.seqlen_kv < seq.rows_kv;",
        "seq.seqlen_kv < seq.rows_kv;",
        "fa3",
    ),
    packed_bug(
        "surplus blocks of fa3 read past the list of q tiles",
        _FA3_LOAD,
        "if ((Config::Lengths::packed || Config::Chunks::split) && first >= tiles) {",
        "if (false) {",
        "fa3",
    ),
    packed_bug(
        "blocks behind the list clear no sums",
        _FA3_BACKWARD,
        "      if (threadIdx.x < 32) clear_role(c, tile);\n",
        "",
        "fa3 heads",
    ),
    packed_bug(
        "sums beyond as many rows as there are queries are not cleared",
        _FA3_CLEAR,
        "return params.padded_rows / kRowsOfUnit;",
        "return params.shape.seqlen_q / kRowsOfUnit;",
        "fa3 heads",
    ),
    packed_bug(
        "sums of a head are cleared for each sequence by itself",
        "cuda_src/fa3/backward_types.cuh",
        "return Config::Lengths::packed ? c.seq.batch : c.item.entry;",
        "return c.item.entry;",
        "fa3 heads",
    ),
    packed_bug(
        "queries of the next sequence move the references of fa3",
        "cuda_src/fa3/forward_math.cuh",
        "    clear_surplus_queries(tile, blocks.row0);\n",
        "",
        "fa3",
        "test_packed_lengths.py::test_no_other_sequence_changes_a_bit[fa3]",
    ),
    packed_bug(
        "the last tile of outputs of fa3 reaches into the next sequence",
        "cuda_src/fa3/forward_store.cuh",
        "const int valid_rows = tile.seq.rows_q - row0;",
        "const int valid_rows ="
        " c.params.shape.seqlen_q - static_cast<int>(tile.seq.q_row0) - row0;",
        "fa3",
    ),
    packed_bug(
        "the last block of dK of fa3 reaches into the next sequence",
        "cuda_src/fa3/backward_store.cuh",
        "c.seq.rows_kv - key, columns);",
        "c.params.shape.seqlen_kv - static_cast<int>(c.seq.kv_row0) - key, columns);",
        "fa3",
    ),
    packed_bug(
        "zeros of keys that no query sees reach into the next sequence",
        "cuda_src/fa3/backward_stay.cuh",
        "c.seq.rows_kv - c.item.kv_begin)",
        "c.params.shape.seqlen_kv - static_cast<int>(c.seq.kv_row0) - c.item.kv_begin)",
        "fa3",
    ),
    packed_bug(
        "an offset that was given is shifted by a sequence's lengths",
        _FEATURE,
        "    if (bottom_right == 0) return 0;\n",
        "",
        "fa3 offset",
    ),
    packed_bug(
        "slopes of all sequences measure as those of the first in fa3",
        "cuda_src/fa3/forward_math.cuh",
        "return {tile.item.entry, tile.item.head, row0 + warp_row, key0};",
        "return {tile.seq.batch, tile.item.head, row0 + warp_row, key0};",
        "fa3 slopes",
    ),
    packed_bug(
        "gradients of all sequences stand as those of the first in fa3",
        "cuda_src/fa3/backward_math.cuh",
        "RowsOfKeys place{c.item.entry, state.place.head,",
        "RowsOfKeys place{c.seq.batch, state.place.head,",
        "fa3 slopes",
    ),
    packed_bug(
        "turns of a sequence are those of the first",
        "cuda_src/fa3/backward_turns.cuh",
        "c.head_row(place.head) / Config::block_q",
        "(c.head_row(place.head) - c.seq.work_row0) / Config::block_q",
        "fa3 ordered",
    ),
)
