"""Bugs of a boolean mask, on the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_NUMPY = "cuflash/features/mask.py"
_PLANS = "tests/unit/test_plan_mask.py::"
_LAUNCHES = "tests/unit/test_mask_launches.py::"

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
        "a mask beside a bias is staged too",
        "cuflash/features/pairs.py",
        "array.pairs[3] > 1 and not taken",
        "array.pairs[3] > 1",
        _PLANS + "test_one_array_of_two_is_staged",
    ),
    Bug(
        "a mask is padded as halves are",
        "cuflash/planning/fa3.py",
        "16 // ELEMENTS[operand.dtype].itemsize",
        "16 // 2",
        _PLANS + "test_what_the_copy_engine_cannot_read_is_left_to_fa2_or_to_registers",
    ),
    Bug(
        "the first tile of pairs is taken whatever the array's elements are",
        "cuflash/planning/tiles/fa3.py",
        "holds and ELEMENTS[staged.dtype].itemsize == row.itemsize",
        "holds and ELEMENTS[staged.dtype].itemsize <= row.itemsize",
        _PLANS + "test_tiles_of_bytes_are_those_of_their_rows_of_the_table",
    ),
    Bug(
        "the map of a mask is one of halves",
        "cuflash/cuda/tensor_map.py",
        '"bool": (0, 1)',
        '"bool": (6, 2)',
        _LAUNCHES + "test_the_map_of_a_mask_that_comes_in_tiles",
    ),
    Bug(
        "a mask is of any dtype",
        _NUMPY,
        '("bool",)',
        '("bool", "float32")',
        "tests/unit/test_mask_arguments.py::test_a_mask_that_is_not_boolean_is_refused",
    ),
    Bug(
        "kernels of entries that share a mask are not compiled ahead",
        "cuflash/calls_to_come.py",
        'first = of_bias if "k" in of_bias else of_mask',
        "first = of_bias",
        "tests/unit/test_calls_to_come.py::"
        "test_whatever_the_lengths_and_heads_the_kernels_are_there[90]",
    ),
)
