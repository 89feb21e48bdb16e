"""``wrt``: the computed gradients, the order of the results, and refusals."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch
from cuflash.tensors import differentiable

from .wrt_case import GivenCall, calls

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


def _saved(call: GivenCall) -> dict[str, Any]:
    out, lse = cuflash.attention(**call.inputs, **call.keywords, return_lse=True)
    rng = np.random.default_rng(0)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    return {"dout": dout, "dlse": dlse, "out": out, "lse": lse}


def _same(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


@settings(max_examples=60)
@given(call=calls(), data=st.data())
def test_any_selection_gives_the_bits_of_all(call: GivenCall, data: Any) -> None:
    """In the order of ``wrt``, gradients are returned, written to ``grads``, or pulled back."""
    saved, every = _saved(call), call.wrt
    whole = dict(
        zip(
            every,
            cuflash.attention_backward(**saved, **call.inputs, **call.keywords, wrt=every),
            strict=True,
        )
    )
    for name, gradient in whole.items():
        like = call.inputs[name]
        assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype)
    wrt = data.draw(st.permutations(every))[: data.draw(st.integers(1, len(every)))]
    some = cuflash.attention_backward(**saved, **call.inputs, **call.keywords, wrt=wrt)
    assert isinstance(some, tuple)
    assert len(some) == len(wrt)
    assert all(_same(g, whole[name]) for name, g in zip(wrt, some, strict=True))
    grads = [np.full_like(call.inputs[name], 7) for name in wrt]
    given_back = cuflash.attention_backward(
        **saved, **call.inputs, **call.keywords, wrt=wrt, grads=grads
    )
    assert all(a is b for a, b in zip(given_back, grads, strict=True))
    assert all(_same(g, whole[name]) for name, g in zip(wrt, grads, strict=True))
    _, pullback = cuflash.attention_vjp(**call.inputs, **call.keywords, wrt=wrt)
    pulled = pickle.loads(pickle.dumps(pullback))(saved["dout"], saved["dlse"])
    assert pullback.wrt == tuple(wrt)
    assert all(_same(g, whole[name]) for name, g in zip(wrt, pulled, strict=True))


def _good(**more: Any) -> dict[str, Any]:
    q = np.ones((1, 3, 2, 4), np.float32)
    out, lse = cuflash.attention(q, q, q, return_lse=True, backend="numpy")
    arrays = {"dout": out, "q": q, "k": q, "v": q, "out": out, "lse": lse}
    return {**arrays, "backend": "numpy", **more}


_NAMES = st.one_of(
    st.sampled_from([*differentiable(), "mask", "lse", "Q", "dq", "", "kv"]),
    st.sampled_from([0, None, b"q", ("q",), 1.5]),
)
_ODD = st.sampled_from([None, 0, "q", "qkv", b"q", {"q"}, {"q": 1}, iter("q"), np.array(["q"])])


def _fine(value: Any, features: Any) -> bool:
    if not isinstance(value, (tuple, list)) or not value:
        return False
    known = {"q", "k", "v", *features}
    return all(isinstance(n, str) and n in known for n in value) and len({*value}) == len(value)


@settings(max_examples=150)
@given(
    value=st.one_of(_ODD, st.lists(_NAMES, max_size=5), st.lists(_NAMES, max_size=3).map(tuple)),
    features=st.sets(st.sampled_from(["alibi_slopes", "bias", "sinks"])),
)
def test_every_other_selection_is_refused_and_nothing_runs(value: Any, features: Any) -> None:
    more = {name: np.zeros(3 if name == "bias" else 2, np.float32) for name in features}
    call = _good(**more)
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        if _fine(value, features):
            assert len(cuflash.attention_backward(**call, wrt=value)) == len(value)
            return
        with pytest.raises((_VALUE, _TYPE), match=r"^wrt: got") as caught:
            cuflash.attention_backward(**call, wrt=value)
        with pytest.raises((_VALUE, _TYPE), match=r"^wrt: got"):
            cuflash.attention_vjp(*[call[n] for n in "qkv"], backend="numpy", **more, wrt=value)
    assert caught.value.argument == "wrt"
    assert not ran


@pytest.mark.parametrize("name", ["alibi_slopes", "bias", "sinks"])
def test_arrays_of_features_are_named_only_where_they_are_given(name: str) -> None:
    q, says = np.ones((1, 3, 2, 4), np.float32), f"'{name}' and no {name}; expected {name} as an"
    with pytest.raises(_VALUE, match=says):
        cuflash.attention_backward(**_good(wrt=("q", name)))
    with pytest.raises(_VALUE, match=says):
        cuflash.attention_vjp(q, q, q, wrt=(name,))


@pytest.mark.parametrize("wrt", [("q",), ("k", "q", "v"), ("sinks",), ("alibi_slopes",), ("bias",)])
def test_a_forward_pass_takes_no_selection(wrt: Any) -> None:
    shape = (1, 3, 2, 4)
    asked = {"operation": "forward", "dtype": "float32", "backend": "numpy", "wrt": wrt}
    with pytest.raises(_VALUE, match=r"^wrt: got .*; expected operation=\"backward\""):
        cuflash.explain(shape, shape, shape, **asked)


@pytest.mark.parametrize(
    ("wrt", "grads", "error", "says"),
    [
        (("q",), 2, _TYPE, "2 arrays; expected one array: dq"),
        (("q", "k"), 1, _TYPE, "1 arrays; expected two arrays: dq, dk"),
        (("v", "q", "k"), 2, _TYPE, "expected three arrays: dv, dq, dk"),
        (("v", "q"), 0, _TYPE, "0 arrays; expected two arrays: dv, dq"),
    ],
)
def test_grads_are_as_many_as_wrt(wrt: Any, grads: int, error: Any, says: str) -> None:
    arrays = tuple(np.ones((1, 3, 2, 4), np.float32) for _ in range(grads))
    with pytest.raises(error) as caught:
        cuflash.attention_backward(**_good(wrt=wrt, grads=arrays))
    assert says in str(caught.value)


def test_grads_hold_what_wrt_names_in_its_order() -> None:
    """Each array is checked against the gradient that is written to it."""
    matrix, sink = np.ones((1, 3, 2, 4), np.float32), np.ones(2, np.float32)
    call = _good(sinks=np.zeros(2, np.float32), wrt=("sinks", "q"))
    cuflash.attention_backward(**call, grads=(sink, matrix))
    with pytest.raises(_VALUE, match="dsinks: got shape"):
        cuflash.attention_backward(**call, grads=(matrix, sink))
    with pytest.raises(_TYPE, match="dsinks: got dtype float16"):
        cuflash.attention_backward(**call, grads=(sink.astype(np.float16), matrix))
    with pytest.raises(_VALUE, match="dsinks: got memory that sinks uses"):
        cuflash.attention_backward(**call, grads=(call["sinks"], matrix))
    with pytest.raises(_VALUE, match="grads: got None"):
        cuflash.attention_backward(**call, grads=(None, matrix))


@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=str)
def test_grads_of_slopes_are_shaped_as_they_are(shape: Any) -> None:
    other = np.ones((1, 2) if shape == (2,) else (2,), np.float32)
    slopes, gradient = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    call = _good(alibi_slopes=slopes, wrt=("alibi_slopes",))
    assert cuflash.attention_backward(**call, grads=(gradient,))[0] is gradient
    with pytest.raises(_VALUE, match=r"dalibi_slopes: got shape"):
        cuflash.attention_backward(**call, grads=(other,))
    with pytest.raises(_TYPE, match="dalibi_slopes: got dtype float64"):
        cuflash.attention_backward(**call, grads=(gradient.astype(np.float64),))
    with pytest.raises(_VALUE, match="dalibi_slopes: got memory that alibi_slopes uses"):
        cuflash.attention_backward(**call, grads=(slopes,))


def test_every_selection_there_is() -> None:
    """Not generated: up to three names in any order, and more names in two orders."""
    shapes_of = {"alibi_slopes": (1, 2), "bias": (2, 1, 3), "sinks": (2,)}
    features = {name: np.zeros(shape, np.float32) for name, shape in shapes_of.items()}
    call = _good(**features)
    every = differentiable()
    some = [wrt for count in (1, 2, 3) for wrt in itertools.permutations(every, count)]
    for count in range(4, len(every) + 1):
        some += [w for wrt in itertools.combinations(every, count) for w in (wrt, wrt[::-1])]
    for wrt in some:
        shapes = [g.shape for g in cuflash.attention_backward(**call, wrt=wrt)]
        assert shapes == [call[name].shape for name in wrt]


@pytest.mark.parametrize("operand", ["sinks", "alibi_slopes", "bias", "q"])
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (0, 0, 2, 4)], ids=str)
def test_the_gradient_of_what_nothing_reads_is_written_as_zero(operand: str, shape: Any) -> None:
    """For example, the gradient of sinks is 0 if there are no rows, and not the old memory."""
    q, of_heads = np.ones(shape, np.float32), np.ones(2, np.float32)
    of_heads = of_heads[:, None, None] if operand == "bias" else of_heads
    lse = np.ones((shape[0], 2, shape[1]), np.float32)
    target = np.full_like(q if operand == "q" else of_heads, 7)
    features = {} if operand == "q" else {operand: of_heads}
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        (gradient,) = cuflash.attention_backward(
            *[q, q, q, q, q, lse], **features, wrt=(operand,), grads=(target,)
        )
    assert gradient is target
    assert (gradient == 0).all()
    assert len(ran) == (operand != "q"), "nothing runs where nothing is written"
