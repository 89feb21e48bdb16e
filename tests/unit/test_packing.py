"""Padded arrays packed and unpacked, by NumPy and by JAX."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash


def _jax() -> Any:
    return pytest.importorskip("jax.numpy", reason="JAX is not installed")


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=6),
    st.integers(0, 4),
    st.sampled_from(((), (2,), (3, 2))),
    st.integers(0, 2**31),
)
def test_rows_that_count_come_back(
    lengths: list[int], behind: int, more: tuple[int, ...], seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((len(lengths), 5, *more))
    total = sum(lengths) + behind
    packed, offsets = cuflash.pack(x, np.array(lengths, int), total=total)
    parts = [x[b, :length] for b, length in enumerate(lengths)]
    expected = np.concatenate([*parts, np.zeros((behind, *more))])
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(offsets, [0, *np.cumsum(lengths, dtype=int)])
    assert offsets.dtype == np.int32
    back = cuflash.unpack(packed, offsets, 5)
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(back[b, :length], x[b, :length])
        assert not back[b, length:].any()
    numbers = np.repeat(np.arange(len(lengths) + 1), [*lengths, behind])
    np.testing.assert_array_equal(cuflash.cu_seqlens_of(numbers, len(lengths)), offsets)


def test_what_does_not_count_is_not_looked_at() -> None:
    x = np.full((2, 3), np.nan)
    x[0, 0] = x[1, :2] = 7
    packed, offsets = cuflash.pack(x, np.array([1, 2]), total=6)
    np.testing.assert_array_equal(packed, [7, 7, 7, 0, 0, 0])
    packed[3:] = np.nan
    np.testing.assert_array_equal(cuflash.unpack(packed, offsets, 2), [[7, 0], [7, 7]])


def test_what_has_no_room_is_left_out() -> None:
    x = np.arange(12).reshape(3, 4)
    packed, offsets = cuflash.pack(x, np.array([2, 4, 3]), total=5)
    np.testing.assert_array_equal(packed, [0, 1, 4, 5, 6])
    np.testing.assert_array_equal(offsets, [0, 2, 5, 5])
    np.testing.assert_array_equal(cuflash.unpack(packed, offsets, 2), [[0, 1], [4, 5], [0, 0]])


@given(
    st.lists(st.integers(-6, 14), min_size=1, max_size=6).map(sorted),
    st.integers(0, 8),
    st.integers(0, 9),
)
def test_rows_outside_of_the_packed_ones_are_zeros(
    offsets: list[int], total: int, seqlen: int
) -> None:
    """An offset outside the rows is clamped to them, as in ``attention``."""
    packed = np.arange(1, total + 1)
    expected = np.zeros((len(offsets) - 1, seqlen), int)
    for b, (begin, end) in enumerate(pairwise(np.clip(offsets, 0, total).tolist())):
        rows = packed[begin:end][:seqlen]
        expected[b, : len(rows)] = rows
    np.testing.assert_array_equal(cuflash.unpack(packed, np.array(offsets), seqlen), expected)


def test_jax_computes_the_same_and_differentiates_it() -> None:
    jnp = _jax()
    import jax

    x = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)
    lengths = np.array([2, 0, 9])

    @jax.jit
    def both(x: Any, lengths: Any) -> Any:
        packed, offsets = cuflash.pack(x, lengths, total=8)
        return packed, offsets, cuflash.unpack(packed, offsets, 3)

    packed, offsets, back = both(jnp.asarray(x), jnp.asarray(lengths))
    expected, at = cuflash.pack(x, np.minimum(lengths, 4), total=8)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(offsets, at)
    np.testing.assert_array_equal(back, cuflash.unpack(expected, at, 3))
    gradient = jax.grad(lambda x: (both(x, jnp.asarray(lengths))[2] ** 2).sum())(jnp.asarray(x))
    shown = np.zeros_like(x)
    shown[0, :2] = shown[2, :3] = 1
    np.testing.assert_allclose(gradient, 2 * x * shown, rtol=1e-6)
    numbers = jax.jit(lambda ids: cuflash.cu_seqlens_of(ids, 3))(jnp.asarray([0, 0, 2, 3]))
    np.testing.assert_array_equal(numbers, [0, 2, 2, 3])


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int32"])
@pytest.mark.parametrize("name", ["numpy", "jax.numpy"])
def test_sums_of_narrow_integers_are_not_narrow(name: str, kind: str) -> None:
    """The last sequence begins at row 220, a number that int8 cannot hold."""
    xp = pytest.importorskip(name)
    x = xp.arange(3 * 120.0).reshape(3, 120, 1)
    lengths = xp.asarray([100, 120, 7], kind)
    packed, offsets = cuflash.pack(x, lengths, total=240)
    np.testing.assert_array_equal(offsets, [0, 100, 220, 227])
    assert offsets.dtype == np.int32
    np.testing.assert_array_equal(packed[220:228, 0], [*range(240, 247), 0])
    at = xp.asarray([0, 10, 120, 127], kind)
    back = cuflash.unpack(packed, at, 120)
    np.testing.assert_array_equal(back[1, :110], packed[10:120])
    assert not back[1, 110:].any()


def test_offsets_beyond_the_rows_mean_their_end() -> None:
    packed = np.arange(1.0, 6.0)
    back = cuflash.unpack(packed, np.array([-4, 2, 4, 2**40]), 3)
    np.testing.assert_array_equal(back, [[1, 2, 0], [3, 4, 0], [5, 0, 0]])


_X = np.zeros((2, 3, 1))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cuflash.pack([[1]], np.array([1])), "x: .*an array of NumPy"),
        (lambda: cuflash.pack(np.zeros(3), np.array([1])), r"x: .*shape \(3,\)"),
        (lambda: cuflash.pack(_X, [1, 2]), "lengths: .*an array of NumPy"),
        (lambda: cuflash.pack(_X, np.array([1.0, 2.0])), "lengths: .*float64.*integers"),
        (lambda: cuflash.pack(_X, np.array([1])), r"lengths: .*shape \(1,\).*\(2,\)"),
        (lambda: cuflash.pack(_X, np.array([1, 4])), "lengths: .*1 to 4.*0 to 3"),
        (lambda: cuflash.pack(_X, np.array([-1, 3])), "lengths: .*-1 to 3.*0 to 3"),
        (lambda: cuflash.pack(_X, np.array([1, 3]), total=-1), "total: .*-1.*0 or more"),
        (lambda: cuflash.pack(_X, np.array([1, 3]), total=2.0), "total: .*a number of rows"),
        (lambda: cuflash.unpack(_X, np.array([0.0, 1.0]), 2), "cu_seqlens: .*integers"),
        (lambda: cuflash.unpack(_X, np.array([], int), 2), r"cu_seqlens: .*shape \(0,\)"),
        (lambda: cuflash.unpack(_X, np.array([0, 2]), None), "seqlen: .*a number of rows"),
        (lambda: cuflash.cu_seqlens_of(np.array([1, 0]), 2), "segment_ids: .*sorted"),
        (lambda: cuflash.cu_seqlens_of(np.array([-1, 0]), 2), "segment_ids: .*-1.*0 or more"),
        (lambda: cuflash.cu_seqlens_of(np.array([0, 1]), True), "sequences: .*a number of rows"),
    ],
)
def test_what_is_refused(call: Any, says: str) -> None:
    with pytest.raises((cuflash.ArgumentTypeError, cuflash.ArgumentValueError), match=says):
        call()


def test_jax_needs_the_total() -> None:
    jnp = _jax()
    with pytest.raises(cuflash.ArgumentTypeError, match=r"total: .*known without the device"):
        cuflash.pack(jnp.zeros((1, 2)), jnp.asarray([1]))
    with pytest.raises(cuflash.ArgumentTypeError, match=r"lengths: .*jax\.numpy, as the other"):
        cuflash.pack(jnp.zeros((1, 2)), np.array([1]), total=1)
