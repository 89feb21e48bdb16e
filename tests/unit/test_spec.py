"""The facts that an array's description gives about ways to read it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.adopt import adopt
from cuflash.arrays.spec import TensorSpec, contiguous_strides

SHAPE = (2, 100, 4, 64)


def _spec(
    strides: tuple[int, ...] | None = (25600, 256, 64, 1),
    shape: tuple[int, ...] = SHAPE,
    offset: int = 0,
    itemsize: int = 2,
) -> TensorSpec:
    return TensorSpec(shape, {2: "float16", 4: "float32"}[itemsize], strides, itemsize, 0, offset)


def test_contiguous_rows_are_mappable() -> None:
    for shape in (SHAPE, (1, 1, 1, 8), (100, 64), (2, 100, 64)):
        assert _spec(contiguous_strides(shape), shape).mappable


@pytest.mark.parametrize(
    "strides",
    [
        (51200, 512, 128, 1),  # with room between heads
        (64, 128, 12800, 1),  # heads outside
        (6400, 64, 12800, 1),
        (8, 8, 8, 1),  # rows that overlap
    ],
)
def test_any_positive_strides_of_16_bytes_are_mappable(strides: tuple[int, ...]) -> None:
    assert _spec(strides).mappable


@pytest.mark.parametrize(
    ("axis", "stride"),
    [(axis, s) for axis in range(3) for s in (0, -256, 1 << 39, (1 << 39) + 8, 1 << 60)],
)
def test_strides_that_the_copy_engine_cannot_step(axis: int, stride: int) -> None:
    """Strides of 0, below 0, or of 2^40 bytes and more are aligned, but not mappable."""
    strides = [25600, 256, 64, 1]
    strides[axis] = stride
    spec = _spec(tuple(strides))
    assert spec.aligned
    assert not spec.mappable
    one = [*SHAPE]
    one[axis] = 1  # nothing steps along an axis of one element
    assert _spec(tuple(strides), tuple(one)).mappable


@pytest.mark.parametrize("shape", [(2, 0, 1, 40), (0, 3, 2, 64), (2, 5, 0, 8)])
@pytest.mark.parametrize(("strides", "offset"), [((0, 0, 0, 1), 0), ((7, 3, 5, 1), 6)])
def test_where_no_rows_are_their_strides_do_not_matter(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    """So a plan from shapes and a plan from arrays agree about the workspace."""
    spec = _spec(strides, shape, offset)
    assert spec.aligned
    assert spec.mappable
    assert not _spec(strides, (*shape[:-1], 36), offset).aligned


def test_the_longest_stride_is_taken() -> None:
    assert _spec(((1 << 39) - 8, 256, 64, 1)).mappable
    assert not _spec(((1 << 38), 256, 64, 1), itemsize=4).mappable
    assert _spec(((1 << 38) - 4, 256, 64, 1), itemsize=4).mappable


def test_what_is_not_aligned_is_not_mappable() -> None:
    for spec in (
        _spec(offset=8),
        _spec((25600, 260, 64, 1)),
        _spec(None),
        _spec(contiguous_strides((2, 100, 4, 60)), (2, 100, 4, 60)),
    ):
        assert not spec.aligned
        assert not spec.mappable


@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    steps=st.lists(st.sampled_from([1, 1, 2, -1]), min_size=4, max_size=4),
    order=st.permutations(range(4)),
)
def test_contiguous_is_what_numpy_calls_so(
    shape: tuple[int, ...], steps: list[int], order: list[int]
) -> None:
    """The stride of an axis of one element does not matter; without elements, no stride does."""
    whole = np.zeros([size * abs(step) for size, step in zip(shape, steps, strict=False)])
    view = whole[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    array = view.transpose([axis for axis in order if axis < len(shape)])
    assert adopt("a", array).spec.is_contiguous == array.flags.c_contiguous
