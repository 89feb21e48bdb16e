"""Bugs of calls with caches in computations of JAX."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_VALUES = "tests/unit/test_jax_cache.py::test_"
_REFUSED = "tests/unit/test_jax_cache_refused.py::test_"
_DEVICE = "tests/unit/test_jax_cache_device.py::test_"
_NATIVE = "tests/emulator/test_native_caches.py::test_"

BUGS = (
    Bug(
        "XLA is not told which results are caches written in place",
        "cuflash/jax/site.py",
        "aliases = dict(self.call.aliases)",
        "aliases: dict[int, int] = {}",
        _VALUES + "every_result_is_that_of_the_reference",
    ),
    Bug(
        "caches of no entries come back as zeros",
        "cuflash/jax/lowering.py",
        "made[result] = arrays[argument]",
        "pass",
        _VALUES + "nothing_is_called_where_there_are_no_entries",
    ),
    Bug(
        "a traced call does not check a length that is known",
        "cuflash/jax/cache.py",
        "call.results_of(list(arrays.values()), length)",
        "call.results_of(list(arrays.values()))",
        _REFUSED + "while_it_is_traced",
    ),
    Bug(
        "a callback appends to the arguments and not to the results",
        "cuflash/jax/device.py",
        "dict(zip(names, at, strict=True))",
        "dict(reversed([*zip(names, at, strict=True)]))",
        _DEVICE + "a_callback_is_a_prepared_call",
    ),
    Bug(
        "a launch table has attention before the append",
        "cuflash/jax/native/table.py",
        "for launcher, places in steps:",
        "for launcher, places in reversed(steps):",
        _NATIVE + "a_compiled_computation_is_what_the_reference_says",
    ),
    Bug(
        "a launch table has no append",
        "cuflash/jax/native/table.py",
        "        return planned.launcher.steps\n",
        "        return planned.launcher.steps[-1:]\n",
        _NATIVE + "a_loop_appends_step_after_step",
    ),
)
