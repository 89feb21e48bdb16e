"""Planted bugs in the device code, chosen by a reader of the code alone."""

from __future__ import annotations

from .bug import OutsideBug

__all__ = ["FA3", "SHARED"]

SHARED = (
    OutsideBug(
        "edge_one_key_late",
        "cuda_src/tile/mask.cuh",
        "(has_last && kv_last > q_begin + seq.q_last)",
        "(has_last && kv_last > q_begin + seq.q_last + 1)",
        "shared",
        "causal with a q_offset that lays one hidden pair in the corner of a tile: that query sees "
        "one key too many.",
    ),
    OutsideBug(
        "dout_moves_by_heads_of_q",
        "cuda_src/fa2/backward_loads.cuh",
        "dout.move(c.params.dout.head_stride - back * dout.row_stride);",
        "dout.move(c.params.q.head_stride - back * dout.row_stride);",
        "shared",
        "fa2 backward with grouped heads where dout has another head stride than q, as for "
        "head_dim_v unlike head_dim.",
    ),
    OutsideBug(
        "whole_copy_of_a_chunk_less",
        "cuda_src/tile/copy.cuh",
        "valid_columns > Tile::columns - Tile::chunk",
        "valid_columns >= Tile::columns - Tile::chunk",
        "shared",
        "fa1 with head_dim 24 of the bucket 32 (a whole chunk less): what lies behind a row in "
        "memory enters the scores.",
    ),
    OutsideBug(
        "delta_of_dead_rows",
        "cuda_src/steps/statistics.cu",
        "static_cast<Compute*>(params.delta)[to] = lse == infinity<Compute>() ? 0 : sum - dlse;",
        "static_cast<Compute*>(params.delta)[to] = sum - dlse;",
        "shared",
        "fa3 backward with NaN in dout or dlse of a query that sees no key: gradients of all keys "
        "become NaN.",
    ),
    OutsideBug(
        "paired_rows_beyond_the_length",
        "cuda_src/fa2/forward_store.cuh",
        "c.seq.rows_q - c.first_query() - first, valid_columns);",
        "c.seq.rows_q - c.first_query(), valid_columns);",
        "shared",
        "fa2 forward at head_dim 256 with 1024 keys and a number of queries that is no multiple of "
        "32: rows beyond the length are written, which are the next batch entry's.",
    ),
    OutsideBug(
        "dead_rows_times_zero",
        "cuda_src/tile/softmax.cuh",
        "return inverse == 0.0f ? 0.0f : x * inverse;",
        "return x * inverse;",
        "shared",
        "16-bit fa1 and fa2, a query that sees no key in a tile with others, infinite v: its "
        "output is NaN and not 0.",
    ),
    OutsideBug(
        "tiles_seen_from_beyond_the_length",
        "cuda_src/tile/schedule.cuh",
        "const int last_query = min(q_begin + Config::block_q, seq.seqlen_q) - 1;",
        "const int last_query = q_begin + Config::block_q - 1;",
        "shared",
        "fa1 backward, causal with q_offset=0 and more keys than queries, last q tile not whole: "
        "its dq is never written.",
    ),
    OutsideBug(
        "offsets_from_before",
        "cuda_src/fa2/forward_steps.cuh",
        "      offset = offsets_of(state.reference);\n"
        "      part = exponentiate<Part::count>(first);",
        "      part = exponentiate<Part::count>(first);",
        "shared",
        "fa2 forward of 16 bits with maxima on demand, scores that rise by more than 12 in log2 "
        "units after the first tile.",
    ),
)

FA3 = (
    OutsideBug(
        "staged_row_of_64",
        "cuda_src/fa3/backward_rows.cuh",
        "return columns % 64 == 0 ? rest : min(columns, rest);",
        "return rest;",
        "fa3",
        "fa3 backward at head_dim 80 or 96: 32 columns of dq are written with what is left in "
        "staging.",
    ),
    OutsideBug(
        "parts_of_dv_cleared_as_wide_as_dk",
        "cuda_src/fa3/backward.cu",
        "clear_part<Config::head_dim_v, Config::block_kv, threads>(",
        "clear_part<Config::head_dim, Config::block_kv, threads>(",
        "fa3",
        "fa3 backward at head_dim 192 and 128 in parts, keys that no query sees: other rows of dv "
        "are cleared than theirs.",
    ),
    OutsideBug(
        "dead_rows_of_the_first_warpgroup",
        "cuda_src/fa3/backward_math.cuh",
        "    const int row =\n"
        "        (Types::q_parted_by_rows ? warpgroup * kRowsOfProduct : 0) + "
        "warp_row() + lane.row;\n",
        "    const int row = warp_row() + lane.row;\n",
        "fa3",
        "fa3 backward at head_dim 64, causal, some of the first 64 queries dead: the queries 64 "
        "further on lose a part of their dq.",
    ),
    OutsideBug(
        "edge_beyond_one_key_more",
        "cuda_src/fa3/backward_math.cuh",
        "is_edge<Config::block_q, kKeysOfWarpgroup>(\n"
        "        c.seq, place.tile * Config::block_q, first_key());",
        "is_edge<Config::block_q, kKeysOfWarpgroup>(\n"
        "        c.seq, place.tile * Config::block_q, first_key() - 1);",
        "fa3",
        "fa3 backward, no mask, one key less than whole tiles, scores so low that exp(-lse) "
        "overflows: dq is NaN.",
    ),
    OutsideBug(
        "dv_times_the_rounding_factor",
        "cuda_src/fa3/backward_serial.cuh",
        "math.store_v(dv, 1 / serial.factor);",
        "math.store_v(dv, 1.0f);",
        "fa3",
        "fa3 backward at head_dim 192 and 128 in float16: dv is 16384 times too large.",
    ),
    OutsideBug(
        "dead_rows_of_the_next_tile",
        "cuda_src/fa3/backward_serial.cuh",
        "before.tile * Config::block_q + math.warp_row() + lane.row;",
        "state.place.tile * Config::block_q + math.warp_row() + lane.row;",
        "fa3",
        "fa3 backward at head_dim 192 and 128, first queries dead, last q tile not whole: live "
        "queries lose a part of their dq.",
    ),
    OutsideBug(
        "kv_head_of_interleaved_parts",
        "cuda_src/fa3/backward_types.cuh",
        "return static_cast<int>(static_cast<unsigned>(item.head) / parts);",
        "return static_cast<int>(static_cast<unsigned>(item.head) %\n"
        "                              (static_cast<unsigned>(params.shape.heads_kv) / parts));",
        "fa3",
        "fa3 backward in parts with two kv heads or more: blocks load K and V of another head.",
    ),
    OutsideBug(
        "dead_rows_of_the_upper_half",
        "cuda_src/fa3/forward_store.cuh",
        "const bool dead = inverse.value[0][0] == 0.0f || inverse.value[0][1] == 0.0f;",
        "const bool dead = inverse.value[0][0] == 0.0f;",
        "fa3",
        "fa3 forward, a single dead query in the second eight of sixteen, infinite v: its output "
        "is NaN and not 0.",
    ),
    OutsideBug(
        "dead_queries_of_the_first_64",
        "cuda_src/fa3/backward_score.cuh",
        "for (int query = 0; query < Config::block_q; query += 32) {",
        "for (int query = 0; query < kRowsOfProduct; query += 32) {",
        "fa3",
        "fa3 backward at head_dim 64, queries before the mask in the second half of a tile alone "
        "that hold NaN: gradients of keys become NaN.",
    ),
    OutsideBug(
        "zeros_beyond_the_keys",
        "cuda_src/fa3/backward_stay.cuh",
        "const int rows = min(Config::block_kv, c.seq.rows_kv - c.item.kv_begin);",
        "const int rows = Config::block_kv;",
        "fa3",
        "fa3 backward, causal, last kv tile not whole and seen by no query: zeros are written "
        "beyond the keys, over the next batch entry's dk and dv.",
    ),
)
