"""Planted bugs in the path of a call: its signature, what is copied, where it is launched."""

from __future__ import annotations

from .bug import Bug

_CALLS = "cuflash/calls.py"
_DISPATCH = "cuflash/dispatch.py"
_LAUNCH = "cuflash/cuda/launch.py"
_KERNEL = "cuflash/cuda/prepared_kernel.py"
_OVERLAP = "cuflash/cuda/overlap.py"
_PIPELINE = "cuflash/pipeline.py"
_LAUNCHES = "tests/unit/test_launch_parameters.py::test_"
_DEFAULTS = "tests/unit/test_calls_defaults.py::test_"
_EARLY = "tests/unit/test_early_launches.py::test_"


def _argument(operation: str, name: str) -> str:
    """Repeated calls with other values of an argument."""
    test = "test_an_argument_changes_the_call"
    return f"tests/unit/test_calls_generated.py::{test}[{operation}-{name}]"


BUGS = (
    Bug(
        "results made aside are not copied back",
        _DISPATCH,
        "        for name, array in aside.items():\n            _bring(array, results[name])",
        "        del aside",
        _argument("forward", "out"),
    ),
    Bug(
        "a signature has no strides",
        _CALLS,
        "parts.append((array.shape, array.strides, array.dtype,",
        "parts.append((array.shape, array.dtype,",
        _argument("forward", "q"),
    ),
    Bug(
        "a signature has no alignment",
        _CALLS,
        ", data.device_id, address & 15)",
        ", data.device_id)",
        _argument("forward", "k"),
    ),
    Bug(
        "a signature has no types",
        _CALLS,
        "(*keywords, *values, *map(type, values))",
        "(*keywords, *values)",
        _argument("backward", "deterministic"),
    ),
    Bug(
        "a signature has no names of keywords",
        _CALLS,
        "(*keywords, *values, *map(type, values))",
        "(*values, *map(type, values))",
        "tests/unit/test_calls_defaults.py::test_a_keyword_is_not_taken_for_another",
    ),
    Bug(
        "a signature has no names of arrays",
        _CALLS,
        "[operation, *arrays]",
        "[operation]",
        "tests/unit/test_calls_defaults.py::test_an_array_is_not_taken_for_another",
    ),
    Bug(
        "a signature has no device",
        _CALLS,
        "array.dtype, data.device_id, address & 15))",
        "array.dtype, address & 15))",
        _argument("forward", "q"),
    ),
    Bug(
        "a signature has no dtype",
        _CALLS,
        "array.strides, array.dtype, data.device_id",
        "array.strides, data.device_id",
        _argument("backward", "q"),
    ),
    Bug(
        "an array of another kind is taken for CuPy's",
        _CALLS,
        "        if type(array) is not ndarray:\n",
        "        if not isinstance(array, ndarray or ()):\n",
        "tests/unit/test_calls.py::test_a_subclass_is_not_plainly_an_array",
    ),
    Bug(
        "a repeated call is on the current device",
        _CALLS,
        "with self._cuda.Device(self._device):",
        "if True:",
        "tests/unit/test_calls_generated.py::test_calls_in_any_order_are_as_fresh_ones[forward]",
    ),
    Bug(
        "a repeated call makes results of q's dtype",
        _CALLS,
        "(name, spec.shape, dtype_named(spec.dtype).type)",
        "(name, spec.shape, dtype_named(plan.problem.storage).type)",
        _argument("forward", "return_lse"),
    ),
    Bug(
        "a call that copies is repeated without its copies",
        _CALLS,
        "if planned.device is None or planned.copied or",
        "if planned.device is None or",
        _argument("forward", "v"),
    ),
    Bug(
        "a float32 gradient is not rounded to q's dtype",
        _DISPATCH,
        "return contiguous(array).astype(placed.dtype, copy=False)",
        "return contiguous(array)",
        _argument("backward", "dout"),
    ),
    Bug(
        "parts of the workspace begin at one place",
        _KERNEL,
        "words[word] = workspace + offset",
        "words[word] = workspace",
        _argument("forward", "algorithm"),
    ),
    Bug(
        "kept parameters are those of any workspace",
        _LAUNCH,
        "kept = self._kept.get(key)",
        "kept = self._kept.get(next((k for k in self._kept if k[3:] == key[3:]), key))",
        _argument("backward", "workspace"),
    ),
    Bug(
        "kept launches are those of any stream",
        _LAUNCH,
        "key = (stream, workspace, counter, *addresses)",
        "key = (0, workspace, counter, *addresses)",
        _LAUNCHES + "another_stream_has_other_launches",
    ),
    Bug(
        "a launch is kept with what is no stream",
        _LAUNCH,
        "stream = operator.index(stream)",
        "pass",
        _LAUNCHES + "what_is_no_stream_spoils_no_later_launch",
    ),
    Bug(
        "the parameters of a launch do not live as long",
        _LAUNCH,
        "Launches(tuple(every), tuple(made))",
        "Launches(tuple(every), ())",
        _EARLY + "parameters_live_while_a_kernel_is_launched",
    ),
    Bug(
        "nobody holds the parameters while a kernel is launched",
        _LAUNCH,
        "        every, _ = kept  # other threads may empty what is kept",
        "        every, _ = kept\n        del kept, _",
        _EARLY + "parameters_live_while_a_kernel_is_launched",
    ),
    Bug(
        "an early launch does not keep its sizes",
        _OVERLAP,
        "ctypes.byref(config), *where",
        "ctypes.c_void_p(ctypes.addressof(config)), *where",
        _EARLY + "a_launch_keeps_its_size_as_long_as_it_lives",
    ),
    Bug(
        "an early launch has the stream of another",
        _OVERLAP,
        "config = kept.get((shape, stream))",
        "config = kept.get(next((key for key in kept if key[0] == shape), (shape, stream)))",
        _EARLY + "every_launch_has_its_own_size_and_stream",
    ),
    Bug(
        "an early launch has the size of another",
        _OVERLAP,
        "config = kept.get((shape, stream))",
        "config = kept.get(next((key for key in kept if key[1] == stream), (shape, stream)))",
        _EARLY + "every_launch_has_its_own_size_and_stream",
    ),
    Bug(
        "configurations of early launches are not kept",
        _OVERLAP,
        "            kept[shape, stream] = config\n",
        "",
        _EARLY + "a_launch_keeps_its_size_as_long_as_it_lives",
    ),
    Bug(
        "configurations of early launches are kept for ever",
        _OVERLAP,
        "= BoundedCache(_KEPT)",
        "= BoundedCache(1 << 60)",
        _EARLY + "a_launch_keeps_its_size_as_long_as_it_lives",
    ),
    Bug(
        "launches share one memory of parameters",
        _KERNEL,
        "self._room.from_buffer_copy(self._initial)",
        'self.__dict__.setdefault("one", self._room.from_buffer_copy(self._initial))',
        _LAUNCHES + "parameters_follow_every_address",
    ),
    Bug(
        "an early launch is given 32 bits of an address",
        _OVERLAP,
        "ctypes.c_void_p(parameters)",
        "ctypes.c_uint32(parameters)",
        _EARLY + "addresses_have_all_their_bits",
    ),
    Bug(
        "one aligned tensor is enough for whole vectors",
        _PIPELINE,
        "all(spec.aligned for spec in matrices)",
        "any(spec.aligned for spec in matrices)",
        _argument("forward", "q"),
    ),
    Bug(
        "a prepared run is on the current device",
        _LAUNCH,
        "with self._cuda.Device(self.device_id):",
        "if True:",
        "tests/unit/test_prepared_audited.py",
    ),
    *(
        Bug(
            f"{pass_}: {what} is taken for the default of {name}",
            f"cuflash/api/{pass_}.py",
            f"{name} is {not_ * 'not '}{default}",
            instead,
            f"{_DEFAULTS}nothing_is_mistaken_for_a_default[{pass_}-{name}]",
        )
        for what, pass_, name, default, not_, instead in (
            ("0", "forward", "causal", "False", True, "causal"),
            ("0", "backward", "causal", "False", True, "causal"),
            ("0", "backward", "deterministic", "False", False, "not deterministic"),
            ("None", "forward", "backend", "AUTO", False, "backend in (AUTO, None)"),
            ("None", "backward", "algorithm", "AUTO", False, "algorithm in (AUTO, None)"),
        )
    ),
    *(
        Bug(
            f"{pass_}: {name} alone is not noticed",
            f"cuflash/api/{pass_}.py",
            find,
            instead,
            f"{_DEFAULTS}an_argument_that_is_given_alone_is_noticed[{pass_}-{name}]",
        )
        for pass_, name, find, instead in (
            ("forward", "softcap", "softcap is None and dropout_p", "dropout_p"),
            ("forward", "out_dtype", "layout is None and out_dtype is None", "layout is None"),
            ("forward", "lse_out", "out is lse_out is workspace", "out is workspace"),
            ("forward", "cu_seqlens_kv", "cu_seqlens_q is cu_seqlens_kv", "cu_seqlens_q"),
            ("backward", "blocks", "layout is None and blocks is None", "layout is None"),
            ("backward", "sinks", "mask is sinks is dropout_seed", "mask is dropout_seed"),
            ("backward", "block_mask", "whole and block_mask is None", "whole"),
        )
    ),
    Bug(
        "None is taken for the default of wrt",
        "cuflash/api/backward.py",
        "wrt is not QKV:",
        "wrt is not QKV and wrt is not None:",
        _DEFAULTS + "nothing_is_mistaken_for_a_default[backward-wrt]",
    ),
    Bug(
        "the forward pass of a pullback has q's dtype",
        "cuflash/api/vjp.py",
        "return_lse=True, out_dtype=out_dtype, **keywords",
        "return_lse=True, **keywords",
        "tests/unit/test_calls_generated.py::test_the_vjp_takes_a_keyword_to_both_passes[out_dtype]",
    ),
)
