"""``mask`` as an argument: what is taken, and what is refused before anything runs."""

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
from cuflash.options import check_element

from ..emulator.host_cupy import host_cupy
from .told_calls import no_kernel
from .wrt_case import DTYPES, GivenCall, calls, masks, pair_sizes

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
#: (batch, heads_q, seqlen_q, seqlen_kv) of the call below, which has two kv heads.
_SIZES = (2, 4, 5, 7)
_Q, _KV = (2, 5, 4, 8), (2, 7, 2, 8)


def _call(dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    batch, heads, rows, keys = _SIZES
    q, k = np.ones((batch, rows, heads, 4), dtype), np.ones((batch, keys, 2, 4), dtype)
    return {"q": q, "k": k, "v": k, "backend": "numpy", **more}


def _refused(given_: dict[str, Any], error: Any, match: str) -> Any:
    """The error that both passes and the vjp raise before anything is computed."""
    q, ran = given_["q"], []
    statistics = np.float64 if q.dtype == np.float64 else np.float32
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), statistics)
    passes: list[Callable[..., Any]] = [cuflash.attention, cuflash.attention_vjp]
    with dispatch.observe(ran.append):
        for call in passes:
            with pytest.raises(error, match=match) as caught:
                call(**given_)
        with pytest.raises(error, match=match):
            cuflash.attention_backward(out=q, dout=q, lse=lse, **given_)
    assert not ran
    return caught.value


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.float64, DTYPES["bfloat16"], np.int8, np.uint8, np.int64]
)
def test_a_mask_that_is_not_boolean_is_refused(dtype: Any) -> None:
    """The dtype of q does not matter, nor whether the numbers are 0 and 1."""
    name = np.dtype(dtype).name
    for storage in DTYPES.values():
        call = _call(storage, mask=np.ones((5, 7), dtype))
        error = _refused(call, _TYPE, f"^mask: got dtype {name}; expected bool$")
        assert (error.argument, error.expected) == ("mask", "bool")


@pytest.mark.parametrize("kind", [np.complex64, "S1", object, "M8[s]"], ids=str)
def test_what_is_neither_is_refused(kind: Any) -> None:
    _refused(_call(mask=np.zeros((5, 7), kind)), _TYPE, "^mask: got")


@pytest.mark.parametrize("mask", [True, [[True] * 7] * 5, "bool", (5, 7), bool, 1, b"1"], ids=str)
def test_what_is_no_array_is_no_mask(mask: Any) -> None:
    _refused(_call(mask=mask), _TYPE, "^mask: got")


def test_a_masked_array_is_no_mask() -> None:
    """A masked array has a mask of its own, which would do nothing."""
    mask = np.ma.masked_array(np.ones((5, 7), bool), np.ones((5, 7), bool))
    _refused(_call(mask=mask), _TYPE, "^mask: got")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks"])
def test_no_other_array_is_boolean(name: str) -> None:
    shapes = {"bias": (5, 7), "alibi_slopes": (4,), "sinks": (4,)}
    call = _call(mask=np.ones((5, 7), bool))
    call[name] = np.ones(call[name].shape if name in call else shapes[name], bool)
    with pytest.raises(_TYPE, match=f"^{name}: got dtype bool; expected"):
        cuflash.attention(**call)


#: Shapes with an error: kv heads, exchanged lengths, too many axes, or an axis of size 0.
_WRONG = [(2, 2, 5, 7), (2, 1, 1), (4, 7, 5), (5,), (6,), (1, 1, 5, 6), (3, 1, 1, 1), (0,)]
_WRONG += [(1, 2, 4, 5, 7), (1, 1, 1, 1, 1), (2, 4, 5), (2, 7), (2, 5, 7), (4, 2, 5, 7)]


@pytest.mark.parametrize("shape", _WRONG, ids=str)
def test_other_sizes_are_refused(shape: Any) -> None:
    error = _refused(_call(mask=np.ones(shape, bool)), _VALUE, r"^mask: got shape")
    assert error.got == f"shape {shape}"
    assert "(2, 4, 5, 7) (batch, heads_q, seqlen_q, seqlen_kv" in error.expected
    assert "each may be 1, the first ones may be left out" in error.expected


def _fits(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    if len(shape) > len(sizes):
        return False
    own = sizes[len(sizes) - len(shape) :]
    return all(n in (1, size) for n, size in zip(shape, own, strict=True))


@settings(max_examples=150)
@given(call=calls(mask=False), data=st.data())
def test_masks_of_another_shape_are_refused(call: GivenCall, data: Any) -> None:
    sizes = pair_sizes(call)
    shape = list(data.draw(masks(np.random.default_rng(1), sizes)).shape)
    if data.draw(st.booleans()):
        shape.insert(data.draw(st.integers(0, len(shape))), data.draw(st.integers(0, 9)))
    elif shape and data.draw(st.booleans()):
        shape[data.draw(st.integers(0, len(shape) - 1))] += data.draw(st.sampled_from([-1, 1]))
    shape = [max(0, size) for size in shape]
    given_ = {**call.inputs, **call.keywords, "mask": np.ones(shape, bool)}
    if _fits(tuple(shape), sizes):
        cuflash.attention(**given_)
        return
    ran: list[Any] = []
    with dispatch.observe(ran.append), pytest.raises(_VALUE, match=r"^mask: got shape") as caught:
        cuflash.attention(**given_)
    assert not ran
    assert str(sizes) in caught.value.expected


@pytest.mark.parametrize(
    "shape", [*itertools.product(*((1, n) for n in _SIZES)), (4, 5, 7), (5, 1), (7,), ()], ids=str
)
def test_every_shape_that_broadcasts_is_taken(shape: Any) -> None:
    mask = np.asarray(np.random.default_rng(0).random(shape) < 0.6)
    whole = np.ascontiguousarray(np.broadcast_to(mask, _SIZES))
    out = cuflash.attention(**_call(mask=mask))
    np.testing.assert_array_equal(out, cuflash.attention(**_call(mask=whole)))
    assert ((out == 0).all(axis=-1) == ~whole.any(axis=-1).swapaxes(1, 2)).all()


@pytest.mark.parametrize("wrt", [("mask",), ("q", "mask"), ["mask"]])
def test_a_mask_has_no_gradient(wrt: Any) -> None:
    call = _call(mask=np.ones((5, 7), bool))
    out, lse = cuflash.attention(**call, return_lse=True)
    says = r"^wrt: got .*'mask'.*; expected some of 'q', 'k', 'v', 'alibi_slopes', 'bias', 'sinks'"
    with pytest.raises(_VALUE, match=says):
        cuflash.attention_backward(out, out=out, lse=lse, **call, wrt=wrt)
    with pytest.raises(_VALUE, match=says):
        cuflash.attention_vjp(**call, wrt=wrt)
    with pytest.raises(_VALUE, match=says):
        cuflash.explain(*[_Q] * 3, operation="backward", dtype="float16", mask="bool", wrt=wrt)


def test_a_result_has_memory_that_the_mask_does_not_use() -> None:
    memory = np.ones(4 * 200, np.uint8)
    out, mask = memory[:640].view(np.float32).reshape(2, 5, 4, 4), memory[639:674]
    call = _call(mask=mask.view(bool).reshape(5, 7))
    with pytest.raises(_VALUE, match=r"^out: got memory that mask uses"):
        cuflash.attention(**call, out=out)
    call["mask"] = memory[640:675].view(bool).reshape(5, 7)
    assert cuflash.attention(**call, out=out) is out


def test_a_mask_may_share_the_memory_of_other_inputs_and_its_own() -> None:
    """The mask is only read."""
    call = _call()
    call["v"] = np.random.default_rng(0).standard_normal(call["v"].shape, np.float32)
    shared = call["q"].view(np.uint8).ravel()[:35].view(bool).reshape(5, 7)
    one = np.lib.stride_tricks.as_strided(shared, _SIZES, (0, 0, 1, 1))
    copy = cuflash.attention(**call, mask=one.copy())
    np.testing.assert_array_equal(cuflash.attention(**call, mask=one), copy)
    assert not np.array_equal(copy, cuflash.attention(**call, mask=shared ^ True))


@pytest.mark.parametrize("on_device", ["mask", "q"])
def test_arrays_of_two_kinds_of_memory_are_refused(on_device: str) -> None:
    """A mask must be in the same kind of memory as q, k and v, and on the same device."""
    call = {**_call(np.float16), "mask": np.ones((5, 7), bool)}
    del call["backend"]
    with host_cupy(make=no_kernel) as host:
        names = [name for name in call if (name == "mask") == (on_device == "mask")]
        moved = {**call, **{name: host.array(call[name]) for name in names}}
        elsewhere = {name: host.array(array, int(name == "mask")) for name, array in call.items()}
        for given_ in (moved, elsewhere):
            ran: list[Any] = []
            with (
                dispatch.observe(ran.append),
                pytest.raises((_VALUE, _TYPE), match=r"^mask: got .*(device|memory)"),
            ):
                host.call(cuflash.attention, **given_)
            assert not ran


def _torch_like(name: str) -> Any:
    """A dtype of another library."""
    return type("dtype", (), {"__repr__": lambda self: f"torch.{name}"})()


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        ((7,), (7,)),
        ([4, 1, 1], (4, 1, 1)),
        ((2, 4, 5, 7), (2, 4, 5, 7)),
        ((5, 7), (5, 7)),
        ((), ()),
        ("bool", (2, 4, 5, 7)),
        (bool, (2, 4, 5, 7)),
        (np.bool_, (2, 4, 5, 7)),
        (np.dtype(bool), (2, 4, 5, 7)),
        (_torch_like("bool"), (2, 4, 5, 7)),
        (((5, 1), "bool"), (5, 1)),
        (((4, 1, 7), bool), (4, 1, 7)),
        (((1, 7), np.bool_), (1, 7)),
        (np.ones((1, 5, 1), bool), (1, 5, 1)),
    ],
    ids=str,
)
def test_a_mask_is_planned_from_an_array_a_shape_or_a_dtype(
    operation: Any, mask: Any, shape: Any
) -> None:
    """The dtype of q does not matter; from a dtype alone the mask has all axes."""
    for dtype in DTYPES:
        explained = cuflash.explain(
            _Q, _KV, _KV, operation=operation, dtype=dtype, mask=mask, backend="numpy"
        )
        (use,) = explained.problem.uses
        assert use.feature == "mask"
        (operand,) = use.operands
        assert (operand.name, operand.dtype, operand.shape) == ("mask", "bool", shape)
        assert f"mask {'x'.join(map(str, shape))}" in str(explained)


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        ((8,), _VALUE, "mask: got shape (8,)"),
        ((2, 1, 1), _VALUE, "mask: got shape (2, 1, 1)"),
        ((1, 2, 4, 5, 7), _VALUE, "mask: got shape (1, 2, 4, 5, 7)"),
        ((2, 2, 5, 7), _VALUE, "mask: got shape (2, 2, 5, 7)"),
        ((-1,), _VALUE, "a shape: non-negative integers"),
        ("float32", _TYPE, "mask: got dtype float32; expected bool"),
        (((5, 7), np.float16), _TYPE, "mask: got dtype float16; expected bool"),
        ("uint8", _TYPE, "mask: got dtype uint8; expected bool"),
        (np.int8, _TYPE, "'float64', 'bool'"),
        ("nothing", _TYPE, "'float64', 'bool'"),
        (((5, 7), None), _VALUE, "mask: got"),
        (np.ones((5, 7), np.int8), _TYPE, "mask: got dtype int8; expected bool"),
        (True, _TYPE, "mask: got builtins.bool"),
        (4, _TYPE, "mask: got builtins.int"),
    ],
    ids=str,
)
def test_other_masks_are_not_planned(mask: Any, error: Any, says: str) -> None:
    with pytest.raises(error) as caught:
        cuflash.explain(_Q, _KV, _KV, dtype="float16", mask=mask, backend="numpy")
    assert says in str(caught.value)


@pytest.mark.parametrize("other", ["sinks", "bias", "alibi_slopes"])
def test_no_other_array_is_planned_as_boolean(other: str) -> None:
    with pytest.raises(_TYPE, match=f"^{other}: got dtype bool"):
        cuflash.explain(_Q, _KV, _KV, dtype="float16", backend="numpy", **{other: bool})


@pytest.mark.parametrize(
    "value", ["bool", "?", bool, np.bool_, np.dtype(bool), _torch_like("bool")]
)
def test_every_name_of_bool_is_known(value: Any) -> None:
    assert check_element("mask", value) == "bool"


def test_the_library_asks_for_a_mask_by_name() -> None:
    """Positional arguments end with v."""
    q = np.ones((5, 4), np.float32)
    with pytest.raises(TypeError):
        cuflash.attention(q, q, q, np.ones((5, 5), bool))  # type: ignore[call-overload]
