"""A bad call raises a typed error that names the argument, and changes nothing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from ..kit.badcalls import BAD_CALLS, BadCall, good_call, make


def _bytes(call: dict[str, Any]) -> dict[str, bytes]:
    return {name: a.tobytes() for name, a in call.items() if isinstance(a, np.ndarray)}


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD_CALLS if not bad.device_only], ids=lambda bad: bad.name
)
def test_a_bad_call_names_the_argument_and_changes_nothing(
    bad: BadCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    call = good_call(np, bad.operation)
    make(call)
    bad.break_it(call, np)
    before, ran = _bytes(call), []
    with dispatch.observe(ran.append), pytest.raises(bad.error) as caught:
        make(call)
    error = caught.value
    assert bad.is_said_by(error), error
    assert isinstance(error, (ValueError, TypeError, RuntimeError))
    assert not ran
    assert _bytes(call) == before
    make(good_call(np, bad.operation))


def test_an_unknown_keyword_is_pythons_own_error() -> None:
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(TypeError, match="softmax_scale"):
        cuflash.attention(q, q, q, softmax_scale=1.0)  # type: ignore[call-arg]


def test_cuda_without_a_device_says_why() -> None:
    if cuflash.is_available():
        pytest.skip("there is a CUDA device")
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(cuflash.BackendUnavailableError, match=r'backend="cuda" cannot be used: .+'):
        cuflash.attention(q, q, q, backend="cuda")
    with pytest.raises(cuflash.BackendUnavailableError):
        cuflash.prepare((1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4), dtype="float16")


def test_fa3_on_the_cpu_is_refused_with_the_reason() -> None:
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(cuflash.UnsupportedError, match="Hopper"):
        cuflash.attention(q, q, q, backend="numpy", algorithm="fa3")


def test_errors_survive_pickling() -> None:
    error = cuflash.ArgumentValueError("k", "batch 1", "2, as q has")
    again = pickle.loads(pickle.dumps(error))
    assert (again.argument, again.got, again.expected) == ("k", "batch 1", "2, as q has")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (cuflash.ArgumentTypeError, TypeError),
        (cuflash.ArgumentValueError, ValueError),
        (cuflash.UnsupportedError, ValueError),
        (cuflash.BackendUnavailableError, RuntimeError),
        (cuflash.ToolchainError, RuntimeError),
        (cuflash.CompileError, RuntimeError),
        (cuflash.LaunchError, RuntimeError),
    ],
)
def test_every_error_is_also_a_builtin_one(error: type, builtin: type) -> None:
    assert issubclass(error, cuflash.CuflashError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), 0.5, np.int64(1), 1])
def test_numpy_scalars_are_numbers(value: Any) -> None:
    q = np.ones((1, 2, 1, 4), np.float32)
    cuflash.attention(q, q, q, scale=value, backend="numpy")


def test_numpy_integers_and_bools_are_taken() -> None:
    q = np.ones((1, 4, 1, 4), np.float32)
    one = cuflash.attention(q, q, q, causal=np.bool_(True), q_offset=np.int16(-2), backend="numpy")
    assert (one[0, :2] == 0).all()
    assert (one[0, 2:] == 1).all()


class dtype:  # noqa: N801  (the name of such a class in other libraries)
    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        if not self.text:
            raise RuntimeError("no text")
        return self.text


class DType(dtype):
    """A dtype of another library; NumPy reads its ``dtype`` attribute."""

    dtype = np.dtype("float32")


def test_dtypes_of_other_libraries_are_taken_by_name() -> None:
    q = np.ones((1, 2, 1, 4), np.float16)
    for text, expected in (("torch.float32", np.float32), ("mlx.core.float16", np.float16)):
        assert cuflash.attention(q, q, q, out_dtype=dtype(text), backend="numpy").dtype == expected
    known = DType("<dtype: 'float32'>")
    assert cuflash.attention(q, q, q, out_dtype=known, backend="numpy").dtype == np.float32
    shape = (2, 4)
    assert "bfloat16" in str(cuflash.explain(*[shape] * 3, dtype=dtype("torch.bfloat16")))
    for text in ("torch.bfloat16", "torch.int8", "torch.qint8", "torch.", "float33", ""):
        with pytest.raises(cuflash.ArgumentTypeError, match=r"^out_dtype: got "):
            cuflash.attention(q, q, q, out_dtype=dtype(text), backend="numpy")
