"""Planted bugs in calls with caches in computations of JAX."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_VALUES = "tests/unit/test_jax_cache.py::test_"
_REFUSED = "tests/unit/test_jax_cache_refused.py::test_"
_DEVICE = "tests/unit/test_jax_cache_device.py::test_"
_FLOAT8 = "tests/unit/test_jax_cache_float8.py::test_"
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
    Bug(
        "float8 in JAX: a handler swizzles rows of 64 bytes",
        "cuflash/jax/native/launching.py",
        "of(one, Map.swizzle),",
        "3,",
        _NATIVE + "a_compiled_computation_is_what_the_reference_says[float8]",
    ),
    Bug(
        "float8 in JAX: a launch table has a map's swizzle where its promotion belongs",
        "cuflash/jax/native/table.py",
        "number_of[name], *modes, *map",
        "number_of[name], modes[0], *modes[:0:-1], *map",
        _NATIVE + "a_compiled_computation_is_what_the_reference_says[float8]",
    ),
    Bug(
        "float8 in JAX: a handler loads bytes as it does halves",
        "cuflash/jax/native/launching.py",
        "of(one, Map.promotion),",
        "3,",
        _NATIVE + "a_compiled_computation_is_what_the_reference_says[float8]",
    ),
    Bug(
        "float8 in JAX: the scale of keys is that of values",
        "cuflash/jax/cached.py",
        "{name: given[word] for name, word",
        "{name: [*given.values()][-1] for name, word",
        _FLOAT8 + "every_result_is_that_of_the_reference",
    ),
    Bug(
        "float8 in JAX: calls with other numbers are one call",
        "cuflash/jax/cached.py",
        "scales: Numbers | None = None\n",
        'scales: Numbers | None = __import__("dataclasses").field(default=None, compare=False)\n',
        _FLOAT8 + "numbers_are_part_of_the_computation",
    ),
    Bug(
        "float8 in JAX: a kernel is not given the scales that are numbers",
        "cuflash/jax/cached.py",
        "plan_caches(specs, self.interleaved, self.options, self.scales)",
        "plan_caches(specs, self.interleaved, self.options, ())",
        _DEVICE + "a_callback_is_a_prepared_call",
    ),
    Bug(
        "float8 in JAX: caches come back as bytes",
        "cuflash/jax/cached.py",
        '(specs[name].shape, "float8_e4m3fn")',
        '(specs[name].shape, "uint8")',
        _FLOAT8 + "donated_caches_are_written_in_place",
    ),
    Bug(
        "float8 in JAX: an array without axes is no scale",
        "cuflash/jax/cached.py",
        "{name: scale_spec(specs[name]) for name in SCALES",
        "{name: specs[name] for name in SCALES",
        _FLOAT8 + "a_scale_may_be_a_number_or_an_array",
    ),
    Bug(
        "float8 in JAX: what is computed in float32 is not rounded into the result",
        "cuflash/caches/attend.py",
        '        _round_into(out, targets["out"])\n',
        "        pass\n",
        _FLOAT8 + "without_new_tokens_the_caches_are_those_that_were_given",
    ),
    Bug(
        "float8 in JAX: a traced number is of the dtype that JAX gives it",
        "cuflash/jax/float8.py",
        "return scale.astype(jnp.float32) if is_number else scale",
        "return scale",
        _FLOAT8 + "a_traced_number_of_python_is_float32",
    ),
    Bug(
        "float8 in JAX: one cache alone is float8",
        "cuflash/jax/float8.py",
        'dtype == "uint8" or (float8 and dtype != _NAME)',
        'dtype == "uint8"',
        _FLOAT8 + "refused_while_it_is_traced",
    ),
)
