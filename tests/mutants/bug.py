"""What a planted bug is, and the tests that bugs name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FULL_DEVICE",
    "FULL_DEVICE_DEAD",
    "HEAD_GROUPS",
    "LONG_ROWS",
    "ORDER",
    "PAIRS",
    "POISON",
    "SINGLE_STAGE",
    "STREAMS",
    "Bug",
    "OutsideBug",
    "backward",
    "checks",
    "dead_keys",
    "dead_queries",
    "dead_rows",
    "forward",
    "row",
]

#: Sequences so long that the maxima of their rows are computed on demand.
LONG_ROWS = "tests/device/test_generations.py::test_long_rows[float16-64-False-fa2]"
#: Enough heads that tiles fill a device.
FULL_DEVICE = "tests/device/test_generations.py::test_tiles_of_a_full_device[float16-dims0-False]"
#: Enough heads that tiles fill a device, and keys that kill every row.
FULL_DEVICE_DEAD = "tests/device/test_generations.py::test_dead_rows_of_a_full_device"
#: Wide heads: long sequences, and short ones.
PAIRS = "tests/device/test_wide_heads.py::test_pairs_of_warps[float16-dims0-True]"
SINGLE_STAGE = "tests/device/test_wide_heads.py::test_single_stage[float16-dims0-True]"
#: Head groups of a few heads each.
HEAD_GROUPS = "tests/device/test_head_groups.py"
#: The same bits while another stream runs beside; long rows, on which warps drift apart.
STREAMS = "tests/device/test_generations.py::test_two_streams_at_once[fa2]"
#: The same bits whatever the workspace holds before the call.
POISON = "tests/property/test_against_float64.py::test_nothing_depends_on_poison[float16-cuda-fa2]"
#: The same bits whatever else the device does.
ORDER = (
    "tests/device/test_deterministic.py::test_gradients_are_bit_equal_beside_copies"
    "[float16-(4, 333, 2500, 16, 16, 64, True)]"
)

_AGAINST = "tests/property/test_against_float64.py::"
_CHECKS = "tests/property/test_reference_free.py::test_six_checks"
_DEAD = "tests/property/test_dead_rows.py::"
_D64 = "float16-d64-dv64"


@dataclass(frozen=True)
class Bug:
    """One edit, and the pytest arguments that must then fail.

    Attributes
    ----------
    name, file, find, replace : str
        The edit: ``find`` stands exactly once in the file.
    test : str
        The test that must kill it; on a GPU if the bug is in device code.
    emulated : str
        The test in ``tests/emulator`` that must kill a bug in device code where there is
        no GPU.
    """

    name: str
    file: str
    find: str
    replace: str
    test: str
    emulated: str = ""

    @property
    def needs_gpu(self) -> bool:
        """Whether the bug is in device code."""
        return self.file.startswith("cuda_src/")


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
        A legal call, and how its result differs.
    """

    name: str
    file: str
    find: str
    replace: str
    area: str
    changes: str


def forward(runner: str, mask: str = "causal", dims: str = _D64) -> str:
    """The forward pass of a runner against float64."""
    return f"{_AGAINST}test_forward[{runner}-{dims}-{mask}]"


def backward(runner: str, mask: str = "causal", dims: str = _D64) -> str:
    """The backward pass of a runner against float64."""
    return f"{_AGAINST}test_backward[{runner}-{dims}-{mask}]"


def checks(runner: str, mask: str = "causal", dims: str = _D64) -> str:
    """The six checks of a runner."""
    return f"{_CHECKS}[{runner}-{dims}-{mask}]"


def dead_keys(runner: str, dtype: str = "float16") -> str:
    """Keys that kill every row."""
    return f"{_DEAD}test_keys_of_minus_infinity_kill_every_row[{runner}-{dtype}]"


def dead_queries(runner: str) -> str:
    """Dead queries beside live ones."""
    return f"{_DEAD}test_queries_of_minus_infinity_are_dead[rows0-{runner}-float16]"


def dead_rows(runner: str) -> str:
    """Queries before the mask that hold anything."""
    return f"{_DEAD}test_rows_before_the_mask_may_hold_anything[{runner}-float16]"


def row(name: str, test: str = "test_device_code.py::test_against_float64") -> str:
    """A row of ``tests/emulator/rows.py`` in a test of the emulator."""
    return f"{test}[{name}]"
