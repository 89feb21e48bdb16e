"""The library takes any kind of array, and returns arrays of the same kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.arrays.adopt import adopt
from cuflash.arrays.overlap import overlaps_itself, share_memory
from cuflash.arrays.spec import LAYOUTS, TensorSpec, contiguous_strides
from cuflash.errors import ArgumentTypeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Capsule:
    """A foreign array that has only DLPack, and a namespace that makes such arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Namespace


class Namespace:
    """The array namespace of :class:`Capsule`."""

    @staticmethod
    def from_dlpack(array: Any) -> Capsule:
        return Capsule(np.from_dlpack(array))


class OtherDevice(Capsule):
    """A foreign array in memory that is neither the host's nor CUDA's."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0


class Interface:
    """A CUDA array with nothing but __cuda_array_interface__."""

    def __init__(self, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "typestr": typestr,
            "shape": (1, 2, 1, 4),
            "data": (4096, False),
            "version": 3,
        }


def test_numpy_is_adopted_without_a_copy() -> None:
    array = np.ones((2, 3, 4, 5), np.float16)[:, ::-1]
    adopted = adopt("q", array)
    assert adopted.native is array
    assert adopted.answer(array) is array
    assert adopted.spec.strides == (60, -20, 5, 1)
    assert (adopted.spec.device, adopted.spec.dtype, adopted.spec.itemsize) == (None, "float16", 2)


def test_dlpack_in_dlpack_out() -> None:
    array = np.random.default_rng(0).standard_normal((1, 5, 2, 4)).astype(np.float32)
    q = Capsule(array)
    assert np.shares_memory(adopt("q", q).native, array)
    out, lse = cuflash.attention(q, q, q, return_lse=True, backend="numpy")
    assert isinstance(out, Capsule)
    assert isinstance(lse, Capsule)
    expected = cuflash.attention(array, array, array, backend="numpy")
    assert np.array_equal(out.array, expected)


def test_a_destination_comes_back_as_itself() -> None:
    array = np.ones((1, 5, 2, 4), np.float32)
    out = Capsule(np.zeros_like(array))
    assert cuflash.attention(array, array, array, out=out, backend="numpy") is out
    assert (out.array == 1).all()


def test_other_memory_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="DLPack device type 8"):
        adopt("q", OtherDevice(np.ones((1, 2, 1, 4))))


def test_the_cuda_interface_cannot_say_bfloat16() -> None:
    with pytest.raises(ArgumentTypeError, match="cannot say bfloat16"):
        adopt("q", Interface("<V2"))


def test_jax_arrays_come_and_go() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    host = jax.devices("cpu")[0]
    for dtype in ("float32", "bfloat16", "float16"):
        q = jax.device_put(jax.numpy.ones((1, 5, 2, 4), dtype), host)
        out = cuflash.attention(q, q, q, backend="numpy")
        assert type(out) is type(q)
        assert out.dtype == q.dtype
        assert bool((out == 1).all())


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_reorder_sizes_both_ways(name: str) -> None:
    layout = LAYOUTS[name]
    shape = layout.shape(2, 3, 5, 7)
    batch, seqlen, heads, dim = layout.canonical(shape, 1)
    assert (seqlen, dim) == (3, 7)
    assert batch == (2 if "b" in name else 1)
    assert heads == (5 if "h" in name else 1)
    rows = layout.rows_shape(2, 5, 3)
    assert layout.canonical_rows(rows, 1) == (batch, 3, heads)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "aligned"),
    [
        ((2, 3, 4, 8), (96, 32, 8, 1), 0, True),
        ((2, 3, 4, 8), (96, 32, 8, 1), 8, False),
        ((2, 3, 4, 7), (96, 32, 8, 1), 0, False),
        ((2, 3, 4, 8), (96, 36, 8, 1), 0, False),
        ((2, 1, 4, 8), (96, 3, 8, 1), 0, True),  # the stride along one element is never used
        ((2, 3, 4, 8), (-96, 0, 8, 1), 0, True),
    ],
)
def test_alignment(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, aligned: bool
) -> None:
    assert TensorSpec(shape, "float16", strides, 2, None, offset).aligned is aligned


def test_rows_of_one_element_have_any_stride() -> None:
    assert TensorSpec((2, 3, 4, 1), "float32", (12, 4, 1, 99), 4).rows_are_unit
    assert not TensorSpec((2, 3, 4, 2), "float32", (24, 8, 2, 99), 4).rows_are_unit
    assert not TensorSpec((2, 3, 4, 2), "float32", None, 4).rows_are_unit


def test_contiguous_strides() -> None:
    assert contiguous_strides((2, 3, 5)) == (15, 5, 1)
    assert contiguous_strides(()) == ()


def test_overlaps_are_found_exactly() -> None:
    packed = np.zeros((2, 5, 3, 4, 8), np.float32)
    q, k, v = (packed[:, :, i] for i in range(3))
    assert not share_memory(q, k)
    assert not share_memory(k, v)
    assert share_memory(q, packed[:, 2:])
    assert share_memory(q, q[:, ::-1])
    assert not share_memory(q[..., ::2], q[..., 1::2])
    assert not share_memory(q[:, :0], q)
    assert share_memory(q.view(np.uint8), q)


def test_arrays_that_overlap_themselves() -> None:
    one = np.zeros((1, 5), np.float32)
    assert overlaps_itself(np.broadcast_to(one, (3, 5)))
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(9, np.float32), 3)
    assert overlaps_itself(windows)
    for fine in (one, one.T, np.zeros((2, 3, 4))[:, ::-1, ::2], np.zeros((0, 3)), np.zeros(())):
        assert not overlaps_itself(fine)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_numpy_arrays_are_taken(offset: int) -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 4)).astype(np.float32)
    odd = np.zeros(x.nbytes + offset, np.uint8)[offset:].view(np.float32).reshape(x.shape)
    odd[...] = x
    assert not adopt("q", odd).spec.whole_elements
    assert adopt("q", x).spec.whole_elements
    expected = cuflash.attention(x, x, x, backend="numpy")
    assert np.array_equal(cuflash.attention(odd, x, odd, backend="numpy"), expected)


def test_the_pullback_of_a_wide_output() -> None:
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 4)).astype(np.float16)
    out, pullback = cuflash.attention_vjp(q, q, q, out_dtype="float32", backend="numpy")
    assert out.dtype == np.float32
    assert [grad.dtype for grad in pullback(out)] == [np.float16] * 3


def test_packed_gradients_are_written_in_place() -> None:
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((2, 9, 3, 2, 4)).astype(np.float32)
    q, k, v = (qkv[:, :, i] for i in range(3))
    out, pullback = cuflash.attention_vjp(q, k, v, backend="numpy")
    expected = pullback(out)
    lse = cuflash.attention(q, k, v, return_lse=True, backend="numpy")[1]
    grads = np.full_like(qkv, np.nan)
    parts = tuple(grads[:, :, i] for i in range(3))
    got = cuflash.attention_backward(out, q, k, v, out, lse, grads=parts, backend="numpy")
    assert all(a is b for a, b in zip(got, parts, strict=True))
    for part, value in zip(parts, expected, strict=True):
        assert np.array_equal(part, value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_outputs_are_of_the_layout_and_contiguous(dtype: str, layout: str) -> None:
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    shape = LAYOUTS[layout]
    rng = np.random.default_rng(1)
    q = rng.standard_normal(shape.shape(2, 5, 4, 8)).astype(kind)
    k = rng.standard_normal(shape.shape(2, 6, 2, 8)).astype(kind)
    v = rng.standard_normal(shape.shape(2, 6, 2, 3)).astype(kind)
    out, lse = cuflash.attention(q, k, v, layout=layout, return_lse=True, backend="numpy")
    assert out.shape == shape.shape(2, 5, 4, 3)
    assert lse.shape == shape.rows_shape(2, 4, 5)
    assert out.dtype == kind
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert out.flags.c_contiguous
    assert lse.flags.c_contiguous
    grads = cuflash.attention_backward(out, q, k, v, out, lse, layout=layout, backend="numpy")
    for grad, array in zip(grads, (q, k, v), strict=True):
        assert (grad.shape, grad.dtype) == (array.shape, array.dtype)
        assert grad.flags.c_contiguous
    wide = (
        cuflash.attention(q, k, v, layout=layout, backend="numpy", out_dtype="float32")
        if (kind.itemsize == 2)
        else None
    )
    assert wide is None or wide.dtype == np.float32
