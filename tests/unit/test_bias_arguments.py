"""The argument ``bias``: the arrays that are taken, and the refusals before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch

from ..emulator.host_cupy import host_cupy
from .told_calls import no_kernel
from .wrt_case import DTYPES, GivenCall, biases, calls, pair_sizes

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
_KINDS = {**DTYPES, **{np.dtype(t).name: t for t in (bool, np.int8, np.int64, np.complex64)}}
#: (batch, heads_q, seqlen_q, seqlen_kv) of the call below, which has two kv heads.
_SIZES = (2, 4, 5, 7)


def _refused(given_: dict[str, Any], error: Any, match: str) -> Any:
    """The error, which both passes and the vjp raise before anything is computed."""
    q, ran = given_["q"], []
    heads = (q.shape[0], q.shape[2], q.shape[1])
    statistics = np.float64 if q.dtype == np.float64 else np.float32
    saved = {"out": q, "dout": q, "lse": np.zeros(heads, statistics)}
    passes: list[Callable[..., Any]] = [cuflash.attention, cuflash.attention_vjp]
    with dispatch.observe(ran.append):
        for call in passes:
            with pytest.raises(error, match=match) as caught:
                call(**given_)
        with pytest.raises(error, match=match):
            cuflash.attention_backward(**saved, **given_)
    assert not ran
    return caught.value


def _call(dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    batch, heads, rows, keys = _SIZES
    q, k = np.ones((batch, rows, heads, 4), dtype), np.ones((batch, keys, 2, 4), dtype)
    return {"q": q, "k": k, "v": k, "backend": "numpy", **more}


def _fits(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    if len(shape) > len(sizes):
        return False
    own = sizes[len(sizes) - len(shape) :]
    return all(n in (1, size) for n, size in zip(shape, own, strict=True))


@settings(max_examples=150)
@given(call=calls(bias=False), data=st.data())
def test_biases_of_another_shape_or_dtype_are_refused(call: GivenCall, data: Any) -> None:
    sizes = pair_sizes(call)
    random = np.random.default_rng(1)
    shape = list(data.draw(biases(random, sizes, "float32")).shape)
    if data.draw(st.booleans()):
        shape.insert(data.draw(st.integers(0, len(shape))), data.draw(st.integers(0, 9)))
    elif shape and data.draw(st.booleans()):
        shape[data.draw(st.integers(0, len(shape) - 1))] += data.draw(st.sampled_from([-1, 1]))
    kind = data.draw(st.sampled_from([*_KINDS]))
    shape = [max(0, size) for size in shape]
    bias = np.zeros(shape, _KINDS[kind])
    ran: list[Any] = []
    given_ = {**call.inputs, **call.keywords, "bias": bias}
    fits, known = _fits(tuple(shape), sizes), kind in (call.inputs["q"].dtype.name, "float32")
    if fits and known:
        cuflash.attention(**given_)
        return
    with dispatch.observe(ran.append), pytest.raises((_VALUE, _TYPE)) as caught:
        cuflash.attention(**given_)
    assert not ran
    error = caught.value
    assert error.argument == "bias"
    if kind not in DTYPES or fits:
        assert isinstance(error, _TYPE)
        assert kind in error.got
        return
    assert error.got == f"shape {tuple(shape)}"
    assert str(sizes) in error.expected
    assert "each may be 1, the first ones may be left out" in error.expected


#: Wrong shapes: the number of kv heads, exchanged lengths, other sizes, too many axes.
_WRONG = [(2, 2, 5, 7), (2, 1, 1), (4, 7, 5), (5,), (6,), (1, 1, 5, 6), (3, 1, 1, 1), (0,)]
_WRONG += [(1, 2, 4, 5, 7), (1, 1, 1, 1, 1), (2, 4, 5)]


@pytest.mark.parametrize("shape", _WRONG, ids=str)
def test_other_sizes_are_refused(shape: Any) -> None:
    error = _refused(_call(bias=np.zeros(shape, np.float32)), _VALUE, r"^bias: got shape")
    assert error.got == f"shape {shape}"
    assert "(2, 4, 5, 7) (batch, heads_q, seqlen_q, seqlen_kv" in error.expected


@pytest.mark.parametrize(
    "shape", [*itertools.product(*((1, n) for n in _SIZES)), (4, 5, 7), (5, 1), (7,), ()], ids=str
)
def test_every_shape_that_broadcasts_is_taken(shape: Any) -> None:
    bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    whole = np.ascontiguousarray(np.broadcast_to(bias, _SIZES))
    np.testing.assert_allclose(
        cuflash.attention(**_call(bias=np.asarray(bias))),
        cuflash.attention(**_call(bias=whole)),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("dtype", "bias", "expected"),
    [
        ("float32", "float16", "float32"),
        ("float32", "float64", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float16", "bfloat16", "float16 or float32"),
        ("float16", "float64", "float16 or float32"),
        ("bfloat16", "float16", "bfloat16 or float32"),
        ("float64", "float16", "float32 or float64"),
    ],
)
def test_another_dtype_is_refused(dtype: str, bias: str, expected: str) -> None:
    call = _call(DTYPES[dtype], bias=np.zeros((5, 7), DTYPES[bias]))
    error = _refused(call, _TYPE, f"^bias: got dtype {bias}")
    assert error.expected == expected


@pytest.mark.parametrize("kind", [bool, np.int32, np.uint8, np.complex64, "S1", object], ids=str)
def test_what_is_no_number_that_scores_are_is_refused(kind: Any) -> None:
    _refused(_call(bias=np.zeros((5, 7), kind)), _TYPE, "^bias: got")


@pytest.mark.parametrize("bias", [0.5, [[0.5] * 7] * 5, "float32", (5, 7), True], ids=str)
def test_what_is_no_array_is_no_bias(bias: Any) -> None:
    _refused(_call(bias=bias), _TYPE, "^bias: got")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 2.0**-90), ("scale", 2.0**61), ("softcap", 2.0**-61), ("softcap", 2.0**61)],
)
def test_units_out_of_range_are_refused(dtype: Any, name: str, value: float) -> None:
    """The unit of the scores is the cap, or without a cap the scale. float64 takes any unit."""
    more = {name: value, **({"scale": 1.0} if name == "softcap" else {})}
    call = _call(dtype, bias=np.zeros((5, 7), dtype), **more)
    if dtype == np.float64:
        cuflash.attention(**call)
        return
    error = _refused(call, _VALUE, f"^{name}: got .* with bias")
    assert error.expected == "8.67e-19 to 1.15e+18"
    call[name] = 2.0 ** (60 if value > 1 else -60)
    cuflash.attention(**call)
    del call["bias"]
    cuflash.attention(**{**call, name: value})


@settings(max_examples=20)
@given(call=calls(sinks=False, bias=False))
def test_its_gradient_needs_a_bias(call: GivenCall) -> None:
    out, lse = cuflash.attention(**call.inputs, **call.keywords, return_lse=True)
    given_ = {**call.inputs, "out": out, "lse": lse, **call.keywords}
    with pytest.raises(_VALUE, match=r"^wrt: got 'bias' and no bias; expected bias as an argument"):
        cuflash.attention_backward(out, **given_, wrt=("bias",))
    with pytest.raises(_VALUE, match=r"^wrt: got .*bias"):
        cuflash.attention_vjp(**call.inputs, **call.keywords, wrt=("q", "bias"))


def _backward(**more: Any) -> dict[str, Any]:
    call = _call()
    out, lse = cuflash.attention(**call, bias=more["bias"], return_lse=True)
    return {**call, "dout": out, "out": out, "lse": lse, **more}


@pytest.mark.parametrize("shape", [(5, 7), (4, 1, 7), (7,), (2, 4, 5, 7)], ids=str)
def test_destinations_are_shaped_as_the_bias_is(shape: Any) -> None:
    bias, target = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    call = _backward(bias=bias, wrt=("bias",))
    assert cuflash.attention_backward(**call, grads=(target,))[0] is target
    for other in (np.ones((1, *shape), np.float32), np.ones(shape[1:], np.float32)):
        with pytest.raises(_VALUE, match=r"^dbias: got shape"):
            cuflash.attention_backward(**call, grads=(other,))
    for dtype in (np.float64, np.float16, np.int32):
        with pytest.raises(_TYPE, match=r"^dbias: got dtype"):
            cuflash.attention_backward(**call, grads=(target.astype(dtype),))


def test_destinations_have_memory_of_their_own() -> None:
    """A destination must not use the memory of the bias or of another result.

    Its elements must not share memory, and it must be writable.
    """
    memory = np.zeros(400, np.float32)
    bias, whole = memory[:35].reshape(5, 7), np.ones((5, 7), np.float32)
    call = _backward(bias=bias, wrt=("bias",))
    read_only = whole.copy()
    read_only.flags.writeable = False
    wrong = {
        "memory that bias uses": memory[34:69].reshape(5, 7),
        "an array whose elements share memory": np.lib.stride_tricks.as_strided(
            whole, (5, 7), (0, 4)
        ),
        "a read-only array": read_only,
    }
    for says, target in wrong.items():
        with pytest.raises(_VALUE, match=f"^dbias: got {says}"):
            cuflash.attention_backward(**call, grads=(target,))
    dq = memory[100:260].reshape(call["q"].shape)
    beside = memory[255:290].reshape(5, 7)
    with pytest.raises(_VALUE, match=r"^dbias: got memory that dq uses"):
        cuflash.attention_backward(**{**call, "wrt": ("q", "bias")}, grads=(dq, beside))
    with pytest.raises(_VALUE, match=r"^out: got memory that bias uses"):
        cuflash.attention(**_call(bias=bias), out=memory[:160].reshape(call["q"].shape))


def test_a_bias_may_share_the_memory_of_other_inputs_and_its_own() -> None:
    """A bias is only read."""
    call = _call()
    shared = call["q"].ravel()[:35].reshape(5, 7)
    one = np.lib.stride_tricks.as_strided(shared, _SIZES, (0, 0, 4, 4))
    assert cuflash.attention(**call, bias=shared).shape == call["q"].shape
    copy = cuflash.attention(**call, bias=one.copy())
    np.testing.assert_array_equal(cuflash.attention(**call, bias=one), copy)


@pytest.mark.parametrize("on_device", ["bias", "q"])
def test_arrays_of_two_kinds_of_memory_are_refused(on_device: str) -> None:
    """A bias must be in the same kind of memory as q, k and v, and on the same device."""
    call = {**_call(np.float16), "bias": np.zeros((5, 7), np.float16)}
    del call["backend"]
    with host_cupy(make=no_kernel) as host:
        names = [name for name in call if (name == "bias") == (on_device == "bias")]
        moved = {**call, **{name: host.array(call[name]) for name in names}}
        for given_, devices in ((moved, "bias"), (_on(host, call), "bias")):
            ran: list[Any] = []
            with (
                dispatch.observe(ran.append),
                pytest.raises((_VALUE, _TYPE), match=f"^{devices}: got .*(device|memory)"),
            ):
                host.call(cuflash.attention, **given_)
            assert not ran


def _on(host: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The arrays on device 0, except the bias on device 1."""
    return {name: host.array(array, int(name == "bias")) for name, array in call.items()}
