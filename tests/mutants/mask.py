"""Planted bugs in a boolean mask, on the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_NUMPY = "cuflash/features/mask.py"
_PLANS = "tests/unit/test_plan_mask.py::"
_BITS = "cuflash/planning/mask_bits.py"

BUGS = (
    Bug(
        "NumPy's mask hides what is True",
        _NUMPY,
        "where=~part_of",
        "where=part_of",
        "tests/unit/test_mask.py::test_both_passes_against_whole_matrices",
    ),
    Bug(
        "NumPy's mask is of bytes that are 1",
        _NUMPY,
        'where=~part_of(given[_NAME], place, given["entries"])',
        'where=part_of(given[_NAME], place, given["entries"]).view(np.uint8) != 1',
        "tests/unit/test_mask.py::test_every_byte_of_long_rows_is_true_or_false",
    ),
    Bug(
        "NumPy's neighbouring entries have a mask each",
        _NUMPY,
        'given["entries"]',
        "1",
        "tests/unit/test_mask.py::test_neighbouring_entries_share_one_of_the_mask",
    ),
    Bug(
        "masks of keys have lists where all tiles are counted",
        _BITS,
        "return self._packed and not (self._backward and self.problem.deterministic)",
        "return self._packed",
        _PLANS + "test_fa3_reads_bits_of_what_differs_from_key_to_key",
    ),
    Bug(
        "the bits of a mask of keys have no line of their own",
        _BITS,
        "return _LINES if self._one_row else self.block_q",
        "return self.block_q",
        _PLANS + "test_the_workspace_holds_the_bits",
    ),
    Bug(
        "bits are made by a block for each word",
        _BITS,
        "self._words * steps.BLOCKS_OF_WORD",
        "self._words",
        _PLANS + "test_the_workspace_holds_the_bits",
    ),
    Bug(
        "tiles that a mask may hide are those of a call without one",
        "cuflash/planning/tiles/fa3_tables.py",
        "square = problem.hides_tiles and",
        "square = False and",
        _PLANS + "test_tiles_that_a_mask_may_hide_are_square_at_128",
    ),
    Bug(
        "the heads of a mask are those of the queries",
        _BITS,
        '(("mask_heads", heads),)',
        '(("mask_heads", self.problem.heads_q),)',
        _PLANS + "test_the_workspace_holds_the_bits",
    ),
    Bug(
        "a mask is of any dtype",
        _NUMPY,
        '("bool",)',
        '("bool", "float32")',
        "tests/unit/test_mask_arguments.py::test_a_mask_that_is_not_boolean_is_refused",
    ),
)
