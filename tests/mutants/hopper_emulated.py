"""Planted bugs of FlashAttention-3 in the emulator, where there is no GPU.

The emulator has a record of its own. It runs more bugs than a GPU (``fa3_order``), but cannot show
all of those that a GPU shows. Its threads have any number of registers, so it does not show a wrong
setmaxnreg.
"""

from __future__ import annotations

from .bug import Bug, row
from .hopper_problems import (
    CAUSAL,
    GRADIENTS,
    HALVES_GRADIENTS,
    MANY_HEADS,
    NARROW,
    NARROW_GRADIENTS,
    ORDERED_GRADIENTS,
    PARTED_GRADIENTS,
    SERIAL_GRADIENTS,
    SERIAL_TURNS,
    SHARED_GRADIENTS,
)

__all__ = ["UNSEEN", "seen", "tests_of"]

_NARROW = "fa3-sm_90-float16-d64-dv64-causal-filled"
_WIDE = "fa3-sm_90-bfloat16-d128-dv128-causal-filled-192x80"
#: The row of the emulator for each list of problems.
_ROWS = {
    CAUSAL: _WIDE,
    NARROW: _NARROW,
    GRADIENTS: _WIDE,
    NARROW_GRADIENTS: _NARROW,
    MANY_HEADS: _WIDE,
    HALVES_GRADIENTS: "fa3-sm_90-bfloat16-d96-dv80-causal-filled",
    ORDERED_GRADIENTS: "fa3-sm_90-float16-d128-dv72-full-filled-ordered",
    SERIAL_GRADIENTS: "fa3-sm_90-float16-d192-dv128-causal-filled",
    SERIAL_TURNS: "fa3-sm_90-bfloat16-d160-dv128-causal-filled-ordered",
    SHARED_GRADIENTS: "fa3-sm_90-bfloat16-d200-dv256-causal-filled",
}
_TESTS = (
    "test_device_code.py::test_against_float64",
    "test_device_code.py::test_what_dead_rows_hold_reaches_nothing",
    "test_dead_rows.py::test_rows_before_the_mask_may_hold_anything",
    "test_dead_rows.py::test_keys_that_kill_every_row",
    "test_dead_rows.py::test_dead_rows_beside_rows_that_see_nan",
)

_STREAMS = "launches run one after the other, in one stream and without graphs"
_BLOCKS = "blocks run one after the other: what a block waits for has been done"
_WARPS = "warps run one after the other where none waits"
#: Bugs that the emulator cannot show, and why.
UNSEEN: dict[str, str] = {
    "all streams share a tile counter": _STREAMS,
    "captured launches have the counter of their stream": _STREAMS,
    "a captured counter does not begin at zero": _STREAMS,
    "all warps stage their rows in one place": _WARPS,
    "dS of short heads is stored before dQ has read the one before": _WARPS,
    "dQ is added out of turn": f"{_BLOCKS}; the threads that keep the turns are not those that add",
    "math does not wait for its turn": _BLOCKS,
    "no thread polls whether sums are cleared": _BLOCKS,
    "math does not wait until sums are cleared": _BLOCKS,
    "one share too few is waited for": _BLOCKS,
    "tiles are counted as summed before math has added": _BLOCKS,
    "a share is finished before it is summed": _BLOCKS,
    "a share is finished when one tile is yet to add to it": _BLOCKS,
    "batch entries share their heads' counters": _BLOCKS,
}


def seen(bug: Bug) -> bool:
    """Whether the emulator has to show a bug."""
    return bug.name not in UNSEEN


def tests_of(bug: Bug) -> list[str]:
    """The tests in ``tests/emulator`` that must kill a bug."""
    if bug.emulated:
        return [bug.emulated]
    if bug.test == PARTED_GRADIENTS:
        return ["test_key_parts.py"]
    name = _ROWS[bug.test]
    return [row(name, test) for test in _TESTS if "causal" in name or "test_dead" not in test]
