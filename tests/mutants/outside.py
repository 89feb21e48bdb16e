"""Bugs chosen by a reviewer who had read the code and none of the tests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OUTSIDE", "OutsideBug"]


@dataclass(frozen=True)
class OutsideBug:
    """One edit, and what it changes.

    Attributes
    ----------
    name, file, find, replace : str
        The edit: ``find`` stands exactly once in the file.
    area : str
        "host", "planning", "shared" (device code of all generations, and
        FlashAttention-1 and 2), "fa3", "numpy" or "jax".
    changes : str
        For which legal call what is different.
    """

    name: str
    file: str
    find: str
    replace: str
    area: str
    changes: str


_HOST = (
    OutsideBug(
        "cached_by_8_bytes",
        "cuflash/calls.py",
        "address & 15)",
        "address & 7)",
        "host",
        "A float16 view that begins 8 bytes into its memory, called after an aligned one of the "
        "same shape and strides, runs kernels that copy 16 bytes at a time.",
    ),
    OutsideBug(
        "cached_workspace_not_checked",
        "cuflash/calls.py",
        "if self._workspace or self._targets:",
        "if self._targets:",
        "host",
        "A second call of a signature whose workspace is memory of q is not refused.",
    ),
    OutsideBug(
        "cached_capture_without_counter",
        "cuflash/calls.py",
        "if self._temporary and is_capturing(stream):",
        "if self._eager_bytes and is_capturing(stream):",
        "host",
        "A second forward call of fa3, in a capture, leaves the stream's tile counter in the "
        "graph: two graphs that run at once draw from one counter.",
    ),
    OutsideBug(
        "captured_copies_not_kept",
        "cuflash/dispatch.py",
        "made = [*(arrays[name] for name in copied), workspace]",
        "made = [*aside.values(), workspace]",
        "host",
        "A captured call whose k has a last stride of 2 frees the copy that the graph reads.",
    ),
    OutsideBug(
        "aligned_whatever_the_width",
        "cuflash/arrays/spec.py",
        "sizes = [self.shape[-1], *self._outer_strides()]",
        "sizes = self._outer_strides()",
        "host",
        "q and k that are the first 12 of 16 columns, v of 16: chunks of 16 bytes bring the four "
        "columns beyond into the scores.",
    ),
    OutsideBug(
        "mapped_file_without_position",
        "cuflash/arrays/mapped.py",
        "            one.position + place_a - one.start,\n"
        "            other.position + place_b - other.start,\n",
        "            place_a - one.start,\n            place_b - other.start,\n",
        "host",
        "A memmap of a file from 64 KiB on as q and one of the whole file as out: other bytes are "
        "taken for shared than are.",
    ),
    OutsideBug(
        "vjp_passes_blocks_on",
        "cuflash/api/vjp.py",
        '"blocks": backward_blocks}',
        '"blocks": backward_blocks or blocks}',
        "host",
        "attention_vjp(blocks=...) uses the forward pass's blocks backward too, where fa3 and "
        "many tiles have none such: the pullback raises.",
    ),
    OutsideBug(
        "counter_zeroed_on_another_stream",
        "cuflash/cuda/tile_counter.py",
        "other = contextlib.nullcontext() if current else "
        "cupy.cuda.ExternalStream(stream, device_id)",
        "other = contextlib.nullcontext()",
        "host",
        "The first prepare(...).run(..., stream=s) of fa3 with another stream current zeroes the "
        "tile counter out of the order of s.",
    ),
    OutsideBug(
        "stream_0_is_the_current_one",
        "cuflash/prepared.py",
        "if stream is None:",
        "if not stream:",
        "host",
        "prepare(...).run(pointers, stream=0) inside `with cupy.cuda.Stream()` launches on that "
        "stream.",
    ),
    OutsideBug(
        "null_stream_of_per_thread_default",
        "cuflash/cuda/current.py",
        "return cupy.cuda.get_current_stream(device_id).ptr or _default_stream()",
        "return int(cupy.cuda.get_current_stream(device_id).ptr)",
        "host",
        "With CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1 a call launches on the legacy default stream, "
        "not where CuPy queues its own work.",
    ),
    OutsideBug(
        "last_query_sees_a_key",
        "cuflash/checks.py",
        "max(-seqlen_q, min(seqlen_kv - 1, offset))",
        "max(1 - seqlen_q, min(seqlen_kv - 1, offset))",
        "host",
        "causal with q_offset=-seqlen_q or less: the last query sees key 0, where it should see "
        "none.",
    ),
    OutsideBug(
        "wide_dout_of_narrow_out",
        "cuflash/checks.py",
        'allowed.add(described.dtypes["out"])',
        'allowed.add(described.dtypes["lse"])',
        "host",
        "A float32 dout beside a float16 out is taken, where the contract refuses it.",
    ),
    OutsideBug(
        "broadcast_is_mappable",
        "cuflash/arrays/spec.py",
        "all(0 < stride * self.itemsize < 1 << 40 for stride in strides)",
        "all(0 <= stride * self.itemsize < 1 << 40 for stride in strides)",
        "host",
        "k broadcast over the batch on Hopper: fa3 is planned, and the driver refuses its map.",
    ),
    OutsideBug(
        "pointers_kept_without_names",
        "cuflash/addresses.py",
        "key = (workspace, type(workspace), *pointers.items(), *map(type, pointers.values()))",
        "key = (workspace, type(workspace), *pointers.values(), *map(type, pointers.values()))",
        "host",
        "prepare(...).run with {q: a, k: b, ...} and then {k: a, q: b, ...}: the second launch has "
        "the addresses of the first.",
    ),
)

_PLANNING = (
    OutsideBug(
        "turns_of_one_block_a_head",
        "cuflash/planning/row_steps.py",
        '("turns", 4 * self.blocks * self.turns)',
        '("turns", 4 * self._all_heads * self.turns)',
        "planning",
        "A deterministic backward pass of more than 128 queries writes counters beyond its "
        "workspace.",
    ),
    OutsideBug(
        "padded_keys_of_a_fragment",
        "cuflash/planning/key_parts.py",
        "return ceil_div(self.problem.seqlen_kv, self.tile.block_kv) * self.tile.block_kv",
        "return ceil_div(self.problem.seqlen_kv, fa3.SUM_ROWS) * fa3.SUM_ROWS",
        "planning",
        "fa3 backward in parts with a last kv tile that is not whole: a part's last tile lies over "
        "the next part's first rows, or beyond the workspace.",
    ),
    OutsideBug(
        "heads_ahead_not_whole_sections",
        "cuflash/planning/row_order.py",
        "return min(self.heads, sections * self.section)",
        "return min(self.heads, self.section + ceil_div(_ROUNDS * self.num_sms, self.tiles))",
        "planning",
        "fa3 backward, causal, sections of several heads: sums of dQ of some heads are cleared by "
        "nobody, and their blocks wait for ever.",
    ),
    OutsideBug(
        "fa3_without_queries",
        "cuflash/planning/fa3.py",
        'if problem.operation == "backward" and problem.heads_q * problem.seqlen_q == 0:',
        'if problem.operation == "backward" and problem.heads_q == 0:',
        "planning",
        "A backward pass of no queries on Hopper takes fa3, whose maps the driver refuses; dk and "
        "dv should be zeros.",
    ),
    OutsideBug(
        "q_tile_across_heads",
        "cuflash/planning/tiles/fa2.py",
        "if ROWS % row.block_q:",
        "if row.block_q > ROWS:",
        "planning",
        "fa2 backward with blocks=(96, 64) is taken; its last q tile adds to the next head's dq.",
    ),
    OutsideBug(
        "parts_that_do_not_divide",
        "cuflash/planning/key_parts.py",
        "best = min((p for p in range(1, group + 1) if group % p == 0), key=cost)",
        "best = min(range(1, group + 1), key=cost)",
        "planning",
        "fa3 backward, one kv head for many query heads: a number of parts that does not divide "
        "them leaves some out.",
    ),
    OutsideBug(
        "accumulator_of_the_real_width",
        "cuflash/planning/fa1.py",
        '("out_accumulator", rows * tile.head_dim_v * itemsize)',
        '("out_accumulator", rows * problem.head_dim_v * itemsize)',
        "planning",
        "fa1 forward with a head_dim_v between two buckets and several kv tiles: the output so far "
        "lies over the row maxima.",
    ),
    OutsideBug(
        "delta_of_a_rounded_output",
        "cuflash/planning/fa1.py",
        'shared = replace(config, mask="full", copies="element", head_dim=0, head_dim_v=0)',
        'shared = replace(config, mask="full", copies="element", head_dim=0, head_dim_v=0, '
        "output=config.storage)",
        "planning",
        "fa1 backward of 16-bit inputs with a float32 out reads it as 16-bit numbers.",
    ),
)

_SHARED = (
    OutsideBug(
        "edge_one_key_late",
        "cuda_src/tile/mask.cuh",
        "(causal && kv_last > q_begin + seq.q_offset)",
        "(causal && kv_last > q_begin + seq.q_offset + 1)",
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
        "c.seq.seqlen_q - c.first_query() - first, valid_columns);",
        "c.seq.seqlen_q - c.first_query(), valid_columns);",
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
        "const int last_query = min((q_tile + 1) * Config::block_q, seq.seqlen_q) - 1;",
        "const int last_query = (q_tile + 1) * Config::block_q - 1;",
        "shared",
        "fa1 backward, causal with q_offset=0 and more keys than queries, last q tile not whole: "
        "its dq is never written.",
    ),
    OutsideBug(
        "offsets_from_before",
        "cuda_src/fa2/forward_steps.cuh",
        "      offset = offsets_of(state.reference);\n      part = weigh<Part::count>(first);",
        "      part = weigh<Part::count>(first);",
        "shared",
        "fa2 forward of 16 bits with maxima on demand, scores that rise by more than 12 in log2 "
        "units after the first tile.",
    ),
)

_FA3 = (
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
        "return last_key >= c.seq.seqlen_kv ||",
        "return last_key > c.seq.seqlen_kv ||",
        "fa3",
        "fa3 backward, no mask, one key less than whole tiles, scores so low that exp(-lse) "
        "overflows: dq is NaN.",
    ),
    OutsideBug(
        "dv_times_the_rounding_factor",
        "cuda_src/fa3/backward_crowded.cuh",
        "math.store_v(dv, 1 / crowded.factor);",
        "math.store_v(dv, 1.0f);",
        "fa3",
        "fa3 backward at head_dim 192 and 128 in float16: dv is 16384 times too large.",
    ),
    OutsideBug(
        "dead_rows_of_the_next_tile",
        "cuda_src/fa3/backward_crowded.cuh",
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
        "cuda_src/fa3/backward.cu",
        "const int rows = min(Config::block_kv, c.seq.seqlen_kv - c.item.kv_begin);",
        "const int rows = Config::block_kv;",
        "fa3",
        "fa3 backward, causal, last kv tile not whole and seen by no query: zeros are written "
        "beyond the keys, over the next batch entry's dk and dv.",
    ),
)

_NUMPY = (
    OutsideBug(
        "common_part_without_dlse",
        "cuflash/tiled_numpy/gradient_rows.py",
        "exact = np.zeros_like(self.sums) if self.dlse is None else self.dlse",
        "exact = np.zeros_like(self.sums)",
        "numpy",
        "attention_backward with dlse where all keys have a component of the same sign: dq lacks "
        "what dlse gives to that component.",
    ),
    OutsideBug(
        "parts_added_as_they_come",
        "cuflash/tiled_numpy/key_sums.py",
        "while (ready := self._waiting.pop((self._next[block], block), None)) is not None:",
        "while (ready := self._waiting.pop((part, block), None)) is not None:",
        "numpy",
        "attention_backward by several threads: the bits of dk and dv depend on which is first.",
    ),
    OutsideBug(
        "large_negative_values",
        "cuflash/tiled_numpy/operands.py",
        "columns = np.maximum(values.max(axis=2), -values.min(axis=2))",
        "columns = np.maximum(values.max(axis=2), values.min(axis=2))",
        "numpy",
        "attention in float32 of 256 queries or more with v down to -1e30 in a column that also "
        "has ordinary positive values: the sum overflows, out is minus infinity.",
    ),
)

_JAX = (
    OutsideBug(
        "scratch_without_room_to_align",
        "cuflash/jax/device.py",
        "return needed + _ALIGNMENT if needed else 0",
        "return needed",
        "jax",
        "A gradient on CUDA whose scratch buffer XLA lays at no multiple of 256: the workspace "
        "reaches up to 255 bytes beyond it.",
    ),
    OutsideBug(
        "divided_as_heads_of_queries",
        "cuflash/jax/partition.py",
        "_fitting(mesh, names, key.shape[axis], taken)",
        "_fitting(mesh, names, arrays[0].shape[axis], taken)",
        "jax",
        "8 query heads on 2 key heads divided over 4 devices: the key heads cannot be.",
    ),
    OutsideBug(
        "device_gradients_in_any_order",
        "cuflash/jax/device.py",
        "            deterministic=options.deterministic,\n",
        "",
        "jax",
        "deterministic_gradients=True is ignored in a computation on CUDA.",
    ),
)

OUTSIDE = (*_HOST, *_PLANNING, *_SHARED, *_FA3, *_NUMPY, *_JAX)
