"""Planted bugs in the path of a call: its signature, what is copied, where it is launched."""

from __future__ import annotations

from .bug import Bug

_CALLS = "cuflash/calls.py"
_DISPATCH = "cuflash/dispatch.py"
_LAUNCH = "cuflash/cuda/launch.py"
_PIPELINE = "cuflash/pipeline.py"


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
        "parts += (array.shape, array.strides, array.dtype,",
        "parts += (array.shape, array.dtype,",
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
        "*values, *map(type, values), *arrays]",
        "*values, *arrays]",
        _argument("backward", "deterministic"),
    ),
    Bug(
        "a repeated call makes results of q's dtype",
        _CALLS,
        "(name, spec.shape, dtype_named(spec.dtype))",
        "(name, spec.shape, dtype_named(plan.problem.storage))",
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
        _LAUNCH,
        "words[word] = workspace + offset",
        "words[word] = workspace",
        _argument("forward", "algorithm"),
    ),
    Bug(
        "kept parameters are those of any workspace",
        _LAUNCH,
        "every = self._kept.get(key)",
        "every = self._kept.get(next((k for k in self._kept if k[2:] == key[2:]), key))",
        _argument("backward", "workspace"),
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
    Bug(
        "the forward pass of a pullback has q's dtype",
        "cuflash/api/vjp.py",
        "return_lse=True, out_dtype=out_dtype, **keywords",
        "return_lse=True, **keywords",
        "tests/unit/test_calls_generated.py::test_the_vjp_takes_a_keyword_to_both_passes[out_dtype]",
    ),
)
