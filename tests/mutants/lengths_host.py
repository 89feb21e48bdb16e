"""Planted bugs in used lengths and packed sequences, on the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_BY_ENTRY = "cuflash/tiled_numpy/by_entry.py"
_PACKING = "cuflash/packing.py"
_PACKED = "cuflash/features/packed_lengths.py"
_REFERENCE = "cuflash/reference_packed.py"
_JAX = "cuflash/jax/lengths.py"
_PLANNED = "cuflash/planning/"

_USED_TESTS = "tests/unit/test_used_lengths.py::"
_PACKED_TESTS = "tests/unit/test_packed_lengths.py::"
_HELPERS = "tests/unit/test_packing.py::"
_OF_REFERENCE = "tests/unit/test_reference_packed.py::"
_OF_JAX = "tests/unit/test_jax_packed.py::"
_EMULATED = "tests/emulator/test_{}_lengths.py::test_against_the_reference[{}]"
_ROOM = "tests/unit/test_plan_packed.py::test_there_is_room_for_every_tile"

_OF_USED = (
    Bug(
        "NumPy's used lengths below 0 count from the end",
        _BY_ENTRY,
        "np.clip(lengths, 0, seqlen)",
        "np.minimum(lengths, seqlen)",
        _USED_TESTS + "test_against_the_reference",
    ),
    Bug(
        "NumPy's first key of a window is not shifted",
        _BY_ENTRY,
        "bounds = [None if bound is None else bound + shift for bound in (seen.first, seen.last)]",
        "bounds = [seen.first, None if seen.last is None else seen.last + shift]",
        _PACKED_TESTS + "test_the_rows_of_the_kit",
    ),
    Bug(
        "NumPy's slopes measure from where whole entries stand",
        _BY_ENTRY,
        'x + shift if n == "position" else x',
        "x",
        _USED_TESTS + "test_against_the_reference",
    ),
    Bug(
        "NumPy shifts an offset that was given",
        _BY_ENTRY,
        'from_the_end = bool(dict(use.numbers)["bottom_right"])',
        "from_the_end = True",
        _USED_TESTS + "test_against_the_reference",
    ),
    Bug(
        "NumPy's entries all draw as the first",
        _BY_ENTRY,
        "replace(x, batch=x.batch + number)",
        "replace(x, batch=x.batch)",
        _USED_TESTS + "test_against_the_reference",
    ),
    Bug(
        "NumPy's sinks take the arrays' first rows for every sequence",
        _BY_ENTRY,
        "array[entry : entry + 1, :, queries]",
        "array[entry : entry + 1, :, : queries.stop - queries.start]",
        _PACKED_TESTS + "test_the_rows_of_the_kit",
    ),
    Bug(
        "the gradient of sinks does not know used lengths",
        "cuflash/features/used_lengths.py",
        '("statistics", "sink_gradient", "merge")',
        '("statistics", "merge")',
        _EMULATED.format("used", "fa2-float64-d64-90-alibi_slopes-sinks-causal-True"),
    ),
    Bug(
        "the reference's lengths are not clamped to the arrays",
        "cuflash/reference_scores.py",
        "np.minimum(np.maximum(given, 0), seqlen)",
        "np.maximum(given, 0)",
        _USED_TESTS + "test_against_the_reference",
    ),
    Bug(
        "JAX's lengths below those of int32 come round",
        _JAX,
        "jnp.clip(lengths, max(here.min, there.min), min(here.max, there.max))",
        "jnp.minimum(lengths, min(here.max, there.max))",
        _OF_JAX + "test_what_int32_does_not_hold_is_the_nearest_that_it_does",
    ),
)
_OF_SEQUENCES = (
    Bug(
        "NumPy's first sequence begins at the first offset",
        _BY_ENTRY,
        "begins = [0, *np.maximum.accumulate(np.clip(offsets[1:], 0, total)).tolist(), total]",
        "begins = [*np.maximum.accumulate(np.clip(offsets, 0, total)).tolist(), total]",
        _PACKED_TESTS + "test_offsets_are_clamped",
    ),
    Bug(
        "NumPy's offsets that fall take rows of sequences before",
        _BY_ENTRY,
        "np.maximum.accumulate(np.clip(offsets[1:], 0, total)).tolist()",
        "np.clip(offsets[1:], 0, total).tolist()",
        _PACKED_TESTS + "test_offsets_are_clamped",
    ),
    Bug(
        "NumPy's rows behind the last sequence are not written",
        _BY_ENTRY,
        "return counting, [behind]",
        "return counting, []",
        _PACKED_TESTS + "test_against_the_reference",
    ),
    Bug(
        "sequences draw as entries of the arrays, which are one",
        "cuflash/jax/call.py",
        'given["cu_seqlens_q"].shape[0] if self.packed else batch[-1]',
        "batch[-1]",
        _OF_JAX + "test_dropout_draws_by_sequence",
    ),
    Bug(
        "packed sequences pass through vmap as one batch",
        "cuflash/jax/primitive.py",
        "if alone or call.packed:",
        "if alone:",
        _OF_JAX + "test_under_vmap",
    ),
    Bug(
        "offsets of different lengths are taken",
        _PACKED,
        "if shapes[0] != shapes[1]:",
        "if shapes[0] > shapes[1]:",
        "tests/unit/test_packed_arguments.py::test_both_are_as_long",
    ),
    Bug(
        "the rounding of dQ does not know sequences",
        _PACKED,
        '_STEPS = ("statistics", "convert_dq", "sink_gradient")',
        '_STEPS = ("statistics", "sink_gradient")',
        _EMULATED.format("packed", "fa2-float16-d64-90"),
    ),
    Bug(
        "the reference's first sequence begins at the first offset",
        _REFERENCE,
        "    begin = 0\n    for offset in offsets[1:]:",
        "    begin = min(max(int(offsets[0]), 0), total)\n    for offset in offsets[1:]:",
        _OF_REFERENCE + "test_offsets_are_clamped",
    ),
    Bug(
        "the reference's gradients of lse are those of other heads",
        _REFERENCE,
        '_entries(call["dlse"].T, rows).swapaxes(1, 2)',
        '_entries(call["dlse"].T[:, ::-1], rows).swapaxes(1, 2)',
        _OF_REFERENCE + "test_each_is_a_call_of_its_own",
    ),
)
_OF_PLANS = (
    Bug(
        "the list of tiles has no room for its number",
        _PLANNED + "item_lists.py",
        "_ITEM_BYTES * (1 + self.problem.tiles(length, self.rows))",
        "_ITEM_BYTES * self.problem.tiles(length, self.rows)",
        _ROOM,
    ),
    Bug(
        "the rows behind the last sequence have no tile of their own",
        _PLANNED + "problem.py",
        "(length + (self.sequences or 1) * (rows - 1)) // rows",
        "(length + max(self.sequences - 1, 1) * (rows - 1)) // rows",
        _ROOM,
    ),
    Bug(
        "a list has one entry too many",
        _PLANNED + "item_lists.py",
        'yield KernelLaunch(config, 1, (("entries", self.problem.sequences - 1),))',
        'yield KernelLaunch(config, 1, (("entries", self.problem.sequences),))',
        _ROOM,
    ),
    Bug(
        "the list of a backward pass has as many tiles as queries have",
        _PLANNED + "item_lists.py",
        'name, length = "kv_items", self.problem.seqlen_kv',
        'name, length = "kv_items", self.problem.seqlen_q',
        _ROOM,
    ),
)
_OF_HELPERS = (
    Bug(
        "the first row of a packed sequence is of the one before",
        _PACKING,
        'xp.searchsorted(offsets[1:], place, side="right")',
        'xp.searchsorted(offsets[1:], place, side="left")',
        _HELPERS + "test_rows_that_count_come_back",
    ),
    Bug(
        "offsets of sequences without room lie beyond the rows",
        _PACKING,
        'xp.minimum(xp.cumsum(_clipped(xp, lengths, seqlen), dtype="int32"), rows)',
        'xp.cumsum(_clipped(xp, lengths, seqlen), dtype="int32")',
        _HELPERS + "test_what_has_no_room_is_left_out",
    ),
    Bug(
        "lengths on a device are packed beyond those of rows",
        _PACKING,
        "xp.cumsum(_clipped(xp, lengths, seqlen), ",
        "xp.cumsum(lengths, ",
        _HELPERS + "test_jax_computes_the_same_and_differentiates_it",
    ),
    Bug(
        "offsets beyond the rows show the last of them",
        _PACKING,
        "min(most, largest)",
        "largest",
        _HELPERS + "test_rows_outside_of_the_packed_ones_are_zeros",
    ),
    Bug(
        "offsets before the rows show the first of them",
        _PACKING,
        "xp.clip(numbers, 0, ",
        "xp.clip(numbers, -9, ",
        _HELPERS + "test_rows_outside_of_the_packed_ones_are_zeros",
    ),
    Bug(
        "rows of the last number belong to no sequence",
        _PACKING,
        'xp.searchsorted(segment_ids, numbers, side="left")',
        'xp.searchsorted(segment_ids, numbers, side="right")',
        _HELPERS + "test_rows_that_count_come_back",
    ),
)
BUGS = (*_OF_USED, *_OF_SEQUENCES, *_OF_PLANS, *_OF_HELPERS)
