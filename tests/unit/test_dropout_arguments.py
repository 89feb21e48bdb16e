"""The values that ``dropout_p`` and ``dropout_seed`` take, and those refused before a call runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.options import check_element

from ..emulator.host_cupy import host_cupy
from .told_calls import no_kernel
from .wrt_case import DTYPES

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
_Q, _KV = (2, 5, 4, 8), (2, 7, 2, 8)


def _call(dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    q, k = np.ones((2, 5, 4, 4), dtype), np.ones((2, 7, 2, 4), dtype)
    return {"q": q, "k": k, "v": k, "backend": "numpy", **more}


def _refused(given_: dict[str, Any], kind: Any, match: str) -> None:
    """Both passes, the vjp and ``explain`` refuse the arguments before they compute anything."""
    q, ran = given_["q"], []
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    passes: list[Callable[..., Any]] = [cuflash.attention, cuflash.attention_vjp, cuflash.explain]
    with dispatch.observe(ran.append):
        for call in passes:
            with pytest.raises(kind, match=match):
                call(**given_)
        with pytest.raises(kind, match=match):
            cuflash.attention_backward(out=q, dout=q, lse=lse, **given_)
    assert not ran


@pytest.mark.parametrize("p", [1, 1.0, -0.1, -(2.0**-60), 2, math.nan, math.inf, 10**400])
def test_a_part_out_of_range_is_refused(p: Any) -> None:
    _refused(_call(dropout_p=p, dropout_seed=1), _VALUE, "^dropout_p: got .*0 to below 1$")


@pytest.mark.parametrize("p", [1 - 2.0**-15, 0.99999, np.nextafter(1, 0)])
def test_a_part_that_leaves_nothing_is_refused(p: float) -> None:
    _refused(_call(dropout_p=p, dropout_seed=1), _VALUE, "^dropout_p: got .* which keeps nothing")
    cuflash.attention(**_call(dropout_p=1 - 1.01 * 2.0**-15, dropout_seed=1))


@pytest.mark.parametrize("p", ["0.1", True, False, np.True_, 1j, [0.1], (0.1,), np.array(0.1)])
def test_what_is_no_number_is_no_part(p: Any) -> None:
    _refused(_call(dropout_p=p, dropout_seed=1), _TYPE, "^dropout_p: got")


@pytest.mark.parametrize("p", [0.1, np.float32(0.1), np.float64(0.5)])
def test_a_part_needs_a_seed(p: Any) -> None:
    _refused(_call(dropout_p=p), _VALUE, "^dropout_seed: got None with dropout_p .*an integer")


@pytest.mark.parametrize("p", [None, 0, 0.0, -0.0, np.float32(0)])
@pytest.mark.parametrize("seed", [0, 5, np.zeros(2, np.uint32)], ids=str)
def test_a_seed_needs_a_part(p: Any, seed: Any) -> None:
    """A seed would do nothing without dropout, so it is refused."""
    says = "^dropout_seed: got a seed with.*; expected None, or dropout_p above 0"
    _refused(_call(dropout_p=p, dropout_seed=seed), _VALUE, says)


def test_nothing_and_none_drop_nothing() -> None:
    random = np.random.default_rng(0)
    q = random.standard_normal((1, 9, 2, 4))
    plain = cuflash.attention(q, q, q, backend="numpy")
    for p in (None, 0, 0.0, np.float16(0)):
        got = cuflash.attention(q, q, q, backend="numpy", dropout_p=p)
        np.testing.assert_array_equal(got, plain)
    explained = cuflash.explain(q, q, q, backend="numpy", dropout_p=0)
    assert explained.problem.uses == ()


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**70), np.int64(-1)])
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    says = rf"^dropout_seed: got .*an integer from 0 to {2**64 - 1}"
    _refused(_call(dropout_p=0.1, dropout_seed=seed), _VALUE, says)


@pytest.mark.parametrize("seed", [1.0, True, np.float32(3), 1j, np.True_, "3", b"3", [1, 2]])
def test_what_is_neither_is_no_seed(seed: Any) -> None:
    _refused(_call(dropout_p=0.1, dropout_seed=seed), (_TYPE, _VALUE), "^dropout_seed: got")


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5,), (1, 2), (2, 1), (2, 2)], ids=str)
def test_arrays_of_other_shapes_are_refused(shape: Any) -> None:
    seed = np.zeros(shape, np.uint32)
    says = r"^dropout_seed: got shape .*; expected \(2,\) or \(4,\)$"
    _refused(_call(dropout_p=0.1, dropout_seed=seed), _VALUE, says)


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float32, np.uint8, bool], ids=str)
def test_arrays_of_other_dtypes_are_refused(dtype: Any) -> None:
    seed = np.zeros(2, dtype)
    says = f"^dropout_seed: got dtype {np.dtype(dtype).name}; expected uint32$"
    _refused(_call(dropout_p=0.1, dropout_seed=seed), _TYPE, says)


def test_no_other_array_is_of_uint32() -> None:
    for name, shape in {"bias": (5, 7), "sinks": (4,), "q": _Q, "mask": (5, 7)}.items():
        with pytest.raises(_TYPE, match=f"^{name}: got dtype uint32; expected"):
            cuflash.attention(**_call() | {name: np.zeros(shape, np.uint32)})


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.uint64(2**63), np.int8(3), 2**32])
def test_seeds_of_every_integer_type(seed: Any) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 2, 6, 2, 4))
    call: dict[str, Any] = {"backend": "numpy", "dropout_p": 0.5}
    words = np.array([int(seed) % 2**32, int(seed) // 2**32], np.uint32)
    expected = cuflash.attention(*x, **call, dropout_seed=words)
    np.testing.assert_array_equal(cuflash.attention(*x, **call, dropout_seed=seed), expected)


def test_a_seed_may_have_any_strides() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 2, 6, 2, 4))
    call: dict[str, Any] = {"backend": "numpy", "dropout_p": 0.5}
    words = np.array([1, 2, 3, 4], np.uint32)
    expected = cuflash.attention(*x, **call, dropout_seed=words)
    for view in (words[::-1].copy()[::-1], np.repeat(words, 2)[::2]):
        np.testing.assert_array_equal(cuflash.attention(*x, **call, dropout_seed=view), expected)


@pytest.mark.parametrize("wrt", [("dropout_seed",), ("q", "dropout_seed"), ("dropout_p",)])
def test_there_is_no_gradient(wrt: Any) -> None:
    call = _call(dropout_p=0.1, dropout_seed=np.zeros(2, np.uint32))
    out, lse = cuflash.attention(**call, return_lse=True)
    with pytest.raises(_VALUE, match=r"^wrt: got .*; expected some of 'q'"):
        cuflash.attention_backward(out, out=out, lse=lse, **call, wrt=wrt)


def test_a_result_has_memory_that_the_seed_does_not_use() -> None:
    memory = np.ones(170, np.float32)
    call = _call(dropout_p=0.1, dropout_seed=memory[159:161].view(np.uint32))
    with pytest.raises(_VALUE, match=r"^out: got memory that dropout_seed uses"):
        cuflash.attention(**call, out=memory[:160].reshape(2, 5, 4, 4))


def test_a_seed_lies_where_the_other_arrays_do() -> None:
    call = {**_call(np.float16), "dropout_p": 0.1, "dropout_seed": np.zeros(2, np.uint32)}
    del call["backend"]
    with host_cupy(make=no_kernel) as host:
        for names in ("dropout_seed",), ("q", "k", "v"):
            moved = {**call, **{name: host.array(call[name]) for name in names}}
            with pytest.raises((_VALUE, _TYPE), match=r"^dropout_seed: got .*(device|memory)"):
                host.call(cuflash.attention, **moved)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        ((2,), (2,)),
        ([4], (4,)),
        ("uint32", (2,)),
        (np.uint32, (2,)),
        (np.dtype(np.uint32), (2,)),
        (((4,), "uint32"), (4,)),
        (np.zeros(4, np.uint32), (4,)),
    ],
    ids=str,
)
def test_a_seed_is_planned_from_an_array_a_shape_or_a_dtype(
    operation: Any, seed: Any, shape: Any
) -> None:
    for dtype in DTYPES:
        explained = cuflash.explain(
            *(_Q, _KV, _KV),
            operation=operation,
            dtype=dtype,
            dropout_p=0.25,
            dropout_seed=seed,
            backend="numpy",
        )
        (use,) = explained.problem.uses
        (operand,) = use.operands
        assert (operand.name, operand.dtype, operand.shape) == ("dropout_seed", "uint32", shape)
        assert "full dropout 0.25 dropout_seed uint32" in str(explained)


def test_an_integer_is_planned_as_such() -> None:
    explained = cuflash.explain(
        *(_Q, _KV, _KV), dtype="float16", dropout_p=0.25, dropout_seed=7, backend="numpy"
    )
    (use,) = explained.problem.uses
    assert not use.operands
    assert str(explained.problem).endswith("full dropout 0.25")


@pytest.mark.parametrize("value", ["uint32", np.uint32, np.dtype("u4"), np.dtype(np.uint32)])
def test_every_name_of_uint32_is_known(value: Any) -> None:
    assert check_element("dropout_seed", value) == "uint32"


class TestDropoutMask:
    """``cuflash.dropout_mask``."""

    def test_it_keeps_about_the_part_that_stays(self) -> None:
        for p in (0.1, 0.5, 0.9):
            kept = cuflash.dropout_mask((2, 3, 200, 300), dropout_p=p, dropout_seed=1)
            assert kept.shape == (2, 3, 200, 300)
            assert kept.dtype == bool
            assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.size)

    def test_a_larger_one_begins_with_a_smaller_one(self) -> None:
        large = cuflash.dropout_mask((3, 4, 90, 70), dropout_p=0.3, dropout_seed=5)
        small = cuflash.dropout_mask((2, 4, 33, 17), dropout_p=0.3, dropout_seed=5)
        np.testing.assert_array_equal(large[:2, :, :33, :17], small)

    def test_other_numbers_of_heads_draw_other_bits_from_the_second_entry_on(self) -> None:
        four, two = (
            cuflash.dropout_mask((2, heads, 60, 60), dropout_p=0.3, dropout_seed=5)
            for heads in (4, 2)
        )
        np.testing.assert_array_equal(four[0, :2], two[0])
        np.testing.assert_array_equal(four[0, 2:], two[1])
        assert (four[1, :2] != two[1]).any()

    def test_a_seed_may_lie_on_a_device(self) -> None:
        words = np.array([1, 2, 3, 4], np.uint32)
        with host_cupy() as host:
            seed = host.array(words)
            got = cuflash.dropout_mask((1, 2, 20, 20), dropout_p=0.3, dropout_seed=seed)
        expected = cuflash.dropout_mask((1, 2, 20, 20), dropout_p=0.3, dropout_seed=words)
        np.testing.assert_array_equal(got, expected)

    def test_a_larger_part_drops_more_of_the_same(self) -> None:
        some, more = (
            cuflash.dropout_mask((1, 2, 50, 60), dropout_p=p, dropout_seed=5) for p in (0.2, 0.6)
        )
        assert (some | ~more).all()

    def test_entries_and_heads_differ(self) -> None:
        kept = cuflash.dropout_mask((2, 3, 40, 40), dropout_p=0.5, dropout_seed=5)
        assert len({one.tobytes() for one in kept.reshape(6, -1)}) == 6

    def test_seeds_of_every_spelling(self) -> None:
        masks = [
            cuflash.dropout_mask((1, 1, 40, 40), dropout_p=0.5, dropout_seed=seed)
            for seed in (
                2**33 + 1,
                np.array([1, 2], np.uint32),
                np.array([1, 2, 0, 0], np.uint32),
            )
        ]
        assert len({mask.tobytes() for mask in masks}) == 1

    def test_without_dropout_all_are_kept(self) -> None:
        assert cuflash.dropout_mask((1, 2, 3, 4), dropout_p=0.0).all()
        with pytest.raises(_VALUE, match=r"^dropout_seed: got a seed with dropout_p 0"):
            cuflash.dropout_mask((1, 2, 3, 4), dropout_p=0, dropout_seed=3)

    def test_sizes_of_nothing(self) -> None:
        for shape in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
            assert cuflash.dropout_mask(shape, dropout_p=0.1, dropout_seed=3).shape == shape

    @pytest.mark.parametrize(
        ("shape", "error"),
        [
            ((2, 3, 4), _VALUE),
            ((1, 2, 3, 4, 5), _VALUE),
            ((1, -1, 2, 3), _VALUE),
            ((1, 1, 2**31, 3), _VALUE),
            ((2**16, 2**16, 1, 1), _VALUE),
            ((1.0, 2, 3, 4), _TYPE),
            ((True, 2, 3, 4), _TYPE),
            (12, _TYPE),
            ("1234", _TYPE),
        ],
    )
    def test_what_is_no_shape_is_refused(self, shape: Any, error: Any) -> None:
        with pytest.raises(error, match=r"^shape: got"):
            cuflash.dropout_mask(shape, dropout_p=0.1, dropout_seed=3)

    @pytest.mark.parametrize("seed", [None, -1, 1.5, np.zeros(3, np.uint32), np.zeros(2, int), "a"])
    def test_what_is_no_seed_is_refused(self, seed: Any) -> None:
        with pytest.raises((_VALUE, _TYPE), match=r"^dropout_seed: got"):
            cuflash.dropout_mask((1, 1, 3, 4), dropout_p=0.1, dropout_seed=seed)
