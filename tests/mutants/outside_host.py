"""Planted bugs in the host path and in planning, chosen by a reader of the code alone."""

from __future__ import annotations

from .bug import OutsideBug

__all__ = ["HOST", "PLANNING"]

HOST = (
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
        "cuflash/features/window.py",
        "max(-seqlen_q, offset + right)",
        "max(1 - seqlen_q, offset + right)",
        "host",
        "causal with q_offset=-seqlen_q or less: the last query sees key 0, where it should see "
        "none.",
    ),
    OutsideBug(
        "wide_dout_of_narrow_out",
        "cuflash/tensors.py",
        '("storage", "output"), ("backward",)',
        '("storage", "output", "compute"), ("backward",)',
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
        "key = (workspace, type(workspace), *pointers, *values, *map(type, values))",
        "key = (workspace, type(workspace), *values, *map(type, values))",
        "host",
        "prepare(...).run with {q: a, k: b, ...} and then {k: a, q: b, ...}: the second launch has "
        "the addresses of the first.",
    ),
)

PLANNING = (
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
        "return ceil_div(self.problem.seqlen_kv, SUM_ROWS) * SUM_ROWS",
        "planning",
        "fa3 backward in parts with a last kv tile that is not whole: a part's last tile lies over "
        "the next part's first rows, or beyond the workspace.",
    ),
    OutsideBug(
        "heads_ahead_not_whole_head_groups",
        "cuflash/planning/row_order.py",
        "return min(self.heads, head_groups * self.head_group)",
        "return min(self.heads, self.head_group + ceil_div(_ROUNDS * self.num_sms, self.tiles))",
        "planning",
        "fa3 backward, causal, groups of several heads: sums of dQ of some heads are cleared by "
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
        "cuflash/planning/parts_choice.py",
        "yield from (Parts(n) for n in range(1, group + 1) if group % n == 0)",
        "yield from (Parts(n) for n in range(1, group + 1))",
        "planning",
        "fa3 backward, one kv head for many query heads: a number of parts that does not divide "
        "them leaves some out.",
    ),
    OutsideBug(
        "accumulator_of_the_real_width",
        "cuflash/planning/fa1.py",
        '("out_accumulator", numbers * tile.head_dim_v)',
        '("out_accumulator", numbers * problem.head_dim_v)',
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
