"""``sinks`` and ``window_size`` as arguments: every wrong one is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch
from cuflash.features.window import bounds_of, mask_of
from cuflash.options import check_options

from .wrt_case import DTYPES, GivenCall, calls, sides

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


@settings(max_examples=100)
@given(call=calls(sinks=True), data=st.data())
def test_sinks_of_another_shape_or_dtype_are_refused(call: GivenCall, data: Any) -> None:
    heads, dtype = call.inputs["sinks"].size, call.inputs["q"].dtype.name
    shape = data.draw(st.sampled_from([(heads,), (heads + 1,), (1, heads), (), (heads, 1), (0,)]))
    kind = data.draw(st.sampled_from([*DTYPES]))
    sinks = np.zeros(shape, DTYPES[kind])
    allowed = {dtype, "float64" if dtype == "float64" else "float32"}
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        if shape == (heads,) and kind in allowed:
            cuflash.attention(**{**call.inputs, "sinks": sinks}, **call.keywords)
            return
        with pytest.raises((_VALUE, _TYPE), match=r"^sinks: got") as caught:
            cuflash.attention(**{**call.inputs, "sinks": sinks}, **call.keywords)
    assert not ran
    if shape != (heads,):
        assert caught.value.expected == f"({heads},) (heads_q)"
    else:
        assert caught.value.expected == " or ".join(sorted(allowed))


@pytest.mark.parametrize("sinks", [0.5, [0.5, 0.5], "float32", (2,), True], ids=str)
def test_what_is_no_array_is_no_sinks(sinks: Any) -> None:
    q = np.ones((1, 3, 2, 4), np.float32)
    with pytest.raises(_TYPE, match=r"^sinks: got"):
        cuflash.attention(q, q, q, sinks=sinks, backend="numpy")


def test_a_destination_over_the_sinks_is_refused() -> None:
    q, memory = np.ones((1, 3, 2, 4), np.float32), np.zeros(24, np.float32)
    with pytest.raises(_VALUE, match="out: got memory that sinks uses"):
        cuflash.attention(q, q, q, sinks=memory[:2], out=memory.reshape(q.shape), backend="numpy")


_SIDES = st.one_of(st.none(), st.integers(-3, 9), st.sampled_from([True, 1.0, "1", np.int8(3)]))


@settings(max_examples=150)
@given(value=st.one_of(st.lists(_SIDES, max_size=4), st.lists(_SIDES, max_size=3).map(tuple)))
def test_a_window_is_two_sides_or_refused(value: Any) -> None:
    plain = [
        side is None
        or (isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0)
        for side in value
    ]
    if len(value) == 2 and all(plain):
        got = check_options(window_size=value).keyword("window_size")
        assert got == tuple(value)
        assert all(side is None or type(side) is int for side in got)
        return
    with pytest.raises((_VALUE, _TYPE), match=r"^window_size: got .*-1 in flash-attn"):
        check_options(window_size=value)


@pytest.mark.parametrize("value", [3, "ab", {0, 1}, np.array([1, 2]), 2.5], ids=str)
def test_a_window_is_a_pair(value: Any) -> None:
    with pytest.raises(_TYPE, match=r"^window_size: got"):
        check_options(window_size=value)


_MASKS = {(0, 0): "full", (0, 1): "causal", (1, 0): "left", (1, 1): "band"}


@settings(max_examples=300)
@given(
    lengths=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    causal=st.booleans(),
    q_offset=st.one_of(st.none(), st.integers(-20, 20), st.sampled_from([2**40, -(2**40)])),
    window=st.one_of(st.none(), sides(), st.tuples(st.integers(-4, 4), st.integers(-4, 4))),
)
def test_bounds_are_those_of_the_definition(
    lengths: tuple[int, int], causal: bool, q_offset: int | None, window: Any
) -> None:
    """Calls of any size; sides may be negative here, as in JAX."""
    _check_bounds(*lengths, causal, q_offset, window)


def test_bounds_of_the_smallest_calls_are_those_of_the_definition() -> None:
    """This covers every call of up to three queries and keys, with small windows and offsets."""
    sides_ = [None, -2, -1, 0, 1, 2, 3]
    windows = [None, *itertools.product(sides_, sides_)]
    offsets = [None, *range(-4, 5)]
    for queries, keys in itertools.product(range(4), range(4)):
        for causal, offset, window in itertools.product((False, True), offsets, windows):
            _check_bounds(queries, keys, causal, offset, window)


def _check_bounds(queries: int, keys: int, causal: bool, q_offset: int | None, window: Any) -> None:
    """Compare the bounds pair by pair; a bound that hides nothing must be None."""
    offset = keys - queries if q_offset is None else q_offset
    left, right = window or (None, None)
    pairs = [(i, j) for i in range(queries) for j in range(keys)]
    before = {(i, j) for i, j in pairs if left is not None and j < i + offset - left}
    after = {(i, j) for i, j in pairs if right is not None and j > i + offset + right}
    after |= {(i, j) for i, j in pairs if causal and j > i + offset}
    first, last = bounds_of(queries, keys, causal, q_offset, window)
    assert before == {(i, j) for i, j in pairs if first is not None and j < i + first}
    assert after == {(i, j) for i, j in pairs if last is not None and j > i + last}
    if pairs:
        assert (first is not None, last is not None) == (bool(before), bool(after))
    assert mask_of((first, last)) == _MASKS[first is not None, last is not None]
    assert all(bound is None or abs(bound) <= max(queries, keys) for bound in (first, last))


@settings(max_examples=40)
@given(call=calls(), sides_=sides())
def test_a_bound_that_hides_nothing_changes_nothing(call: GivenCall, sides_: Any) -> None:
    """With sides beyond every key, the output has the same bits as without these sides."""
    left, right = sides_
    wide = (2**50 if left is None else left, 2**50 if right is None else right)
    plain = cuflash.attention(**call.inputs, **{**call.keywords, "window_size": sides_})
    same = cuflash.attention(**call.inputs, **{**call.keywords, "window_size": wide})
    assert plain.tobytes() == same.tobytes()


@settings(max_examples=40)
@given(call=calls())
def test_causal_is_the_band_without_a_left_side(call: GivenCall) -> None:
    causal = {**call.keywords, "causal": True, "window_size": None}
    band = {**call.keywords, "causal": False, "window_size": (None, 0)}
    a, b = (cuflash.attention(**call.inputs, **keywords) for keywords in (causal, band))
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_wider_array_of_sinks_stands_beside_shapes(dtype: str) -> None:
    shape = (1, 8, 4, 16)
    sinks = np.zeros(4, np.float32)
    said = cuflash.explain(shape, shape, shape, dtype=dtype, sinks=sinks, backend="numpy")
    assert f"forward {dtype}" in str(said)
    wrong = np.zeros(4, np.float64)
    with pytest.raises(_TYPE, match="sinks"):
        cuflash.explain(shape, shape, shape, dtype=dtype, sinks=wrong, backend="numpy")
