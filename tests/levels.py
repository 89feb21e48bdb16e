"""Which tests a run has: the quick ones, those of a default run, and those that are left to CI."""

from __future__ import annotations

import functools
from fnmatch import fnmatch
from pathlib import Path

import pytest

__all__ = ["LONG", "QUICK", "TURNS", "days_of_turn", "is_long", "is_quick"]

#: ``python -m pytest @tests/quick`` reads files, tests and parametrised tests from it, one a line.
QUICK = Path(__file__).with_name("quick")

#: Files whose tests are left to CI, beside tests that are marked ``long`` or take turns. They
#: compile kernels, draw problems of one feature, compile many programs with JAX, or hold the kit of
#: the tests itself to bugs.
LONG = (
    "tests/compile/test_*.py",
    "tests/emulator/test_*.py",
    "tests/property/test_alibi.py",
    "tests/property/test_bias.py",
    "tests/property/test_dropout.py",
    "tests/property/test_mask.py",
    "tests/property/test_packed_lengths.py",
    "tests/property/test_reference_free.py",
    "tests/property/test_score_mod.py",
    "tests/property/test_sinks.py",
    "tests/property/test_softcap.py",
    "tests/property/test_used_lengths.py",
    "tests/property/test_windows.py",
    "tests/tenant/test_tenants_in_kernels.py",
    "tests/unit/test_jax_*divided.py",
    "tests/unit/test_jax_*vmap.py",
    "tests/unit/test_jax_alibi.py",
    "tests/unit/test_jax_bias.py",
    "tests/unit/test_jax_dropout.py",
    "tests/unit/test_jax_equinox.py",
    "tests/unit/test_jax_flax.py",
    "tests/unit/test_jax_lengths.py",
    "tests/unit/test_jax_mask.py",
    "tests/unit/test_jax_native_registration.py",
    "tests/unit/test_jax_packed.py",
    "tests/unit/test_jax_score_mod.py",
    "tests/unit/test_jax_shard_map.py",
    "tests/unit/test_jax_sinks.py",
    "tests/unit/test_kit_*.py",
)

#: Where there is no GPU, tests of these files that are left to CI take turns: each has its turn
#: once in so many days, a property with new examples. Those of the emulator that have a row, or
#: that mark another parameter, have its turn instead.
TURNS = {
    "tests/emulator/test_*.py": 2,
    "tests/property/test_*.py": 5,
    "tests/unit/test_jax_*.py": 3,
    "tests/unit/test_kit_*.py": 6,
}


@functools.cache
def _named() -> frozenset[str]:
    return frozenset(QUICK.read_text("utf-8").splitlines())


def is_quick(test: str) -> bool:
    """Whether the quick set has a test, by its name or by that of its function or file."""
    return not _named().isdisjoint((test, test.partition("[")[0], test.partition("::")[0]))


def is_long(item: pytest.Item) -> bool:
    """Whether a default run leaves a test to CI."""
    if is_quick(item.nodeid):
        return False
    marked = any(item.get_closest_marker(name) for name in ("long", "in_turns"))
    return marked or any(fnmatch(item.nodeid.partition("::")[0], file) for file in LONG)


def days_of_turn(item: pytest.Item) -> int:
    """The days in which a whole run has a test once; 1 if it takes no turns with its file."""
    if not is_long(item):
        return 1
    file = item.nodeid.partition("::")[0]
    return next((days for pattern, days in TURNS.items() if fnmatch(file, pattern)), 1)
