"""Overlap by addresses and strides, compared with the sets of bytes that arrays touch."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.arrays import sums
from cuflash.arrays.overlap import overlaps_itself, share_memory
from cuflash.arrays.sums import can_reach

#: The memory of the drawn arrays; it is large enough for each.
_MEMORY = np.zeros(1 << 14, np.uint8)
_MIDDLE = _MEMORY.size // 2


def _at(place: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    start = _MEMORY[_MIDDLE + place :][: np.dtype(dtype).itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(start, shape, strides)


def _strides(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Any strides in bytes: mostly of whole elements, negative and zero too."""
    stride = st.integers(-9, 9).map(lambda n: n * itemsize) | st.integers(-60, 60)
    return tuple(draw(stride) for _ in shape)


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray:
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    shape = tuple(draw(st.lists(st.integers(1, 5) | st.integers(0, 2), max_size=4)))
    place = draw(st.integers(-90, 90))
    return _at(place, f"V{itemsize}", shape, _strides(draw, shape, itemsize))


def _touched(array: np.ndarray) -> Counter[int]:
    """How often each address belongs to an element."""
    found = Counter[int]()
    for index in itertools.product(*map(range, array.shape)):
        start = sum(i * s for i, s in zip(index, array.strides, strict=True))
        found.update(range(array.ctypes.data + start, array.ctypes.data + start + array.itemsize))
    return found


#: Settings of tests that look for rare events.
MANY = settings(max_examples=300)


@MANY
@given(_arrays(), _arrays())
@example(_at(0, "V8", (), ()), _at(7, "V1", (), ()))
@example(_at(0, "V8", (), ()), _at(8, "V1", (), ()))
def test_sharing_is_decided_exactly(a: np.ndarray, b: np.ndarray) -> None:
    share = bool(_touched(a).keys() & _touched(b).keys())
    event(f"share: {share}")
    assert share_memory(a, b) == share_memory(b, a) == share


@MANY
@given(_arrays())
@example(_at(0, "V1", (2, 3, 2), (7, 5, 3)))  # 7 + 3 is 5 + 5: an overlap
@example(_at(0, "V1", (2, 6), (5, 2)))  # 5 is no multiple of 2: no overlap
def test_overlap_of_an_array_with_itself_is_decided_exactly(array: np.ndarray) -> None:
    overlap = any(times > 1 for times in _touched(array).values())
    event(f"overlap: {overlap}")
    assert overlaps_itself(array) == overlap


@st.composite
def _calls(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A query and a destination in the same memory."""
    seqlen = draw(st.integers(1, 4))
    shapes = [(seqlen, draw(st.integers(1, 3))) for _ in range(2)]
    places = [draw(st.integers(-12, 12)) * 4 + draw(st.sampled_from([0, 0, 2])) for _ in range(2)]
    q, out = (
        _at(place, "f4", shape, _strides(draw, shape, 4))
        for place, shape in zip(places, shapes, strict=True)
    )
    return q, out


@given(_calls())
# The query has the last number of every three, the destination the first two.
@example((_at(8, "f4", (4, 1), (12, 4)), _at(0, "f4", (4, 2), (12, 4))))
# The query has the numbers 1 and 6, the destination 0, 2, 4, 3, 5 and 7.
@example((_at(4, "f4", (2, 1), (20, 4)), _at(0, "f4", (2, 3), (12, 8))))
def test_a_destination_is_refused_only_where_bytes_are_shared(
    arrays: tuple[np.ndarray, np.ndarray],
) -> None:
    q, out = arrays
    _MEMORY[...] = 0
    k, v = np.zeros((3, q.shape[1]), "f4"), np.full((3, out.shape[1]), 0.5, "f4")
    touched = _touched(out)
    why = ""
    if max(touched.values()) > 1:
        why = "an array whose elements share memory"
    elif touched.keys() & _touched(q).keys():
        why = "memory that q uses"
    event(why or "taken")
    if why:
        with pytest.raises(cuflash.ArgumentValueError, match=f"out: got {why}"):
            cuflash.attention(q, k, v, out=out, backend="numpy")
        assert not _MEMORY.any()
    else:
        assert cuflash.attention(q, k, v, out=out, backend="numpy") is out
        assert (out == 0.5).all()
        assert not q.any()


@MANY
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=5),
    st.integers(-10, 150),
    st.integers(0, 9),
)
@example([(4, 3), (6, 2)], 24, 0)  # the largest sum
def test_sums_are_found_exactly(steps: list[tuple[int, int]], low: int, width: int) -> None:
    ranges = [range(0, step * most + 1, step) if step else (0,) for step, most in steps]
    reached = {sum(one) for one in itertools.product(*ranges)}
    assert can_reach(steps, low, low + width) == any(low <= s <= low + width for s in reached)


def test_a_search_that_is_too_long_ends_in_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(101, 9), (211, 9), (307, 9)]
    assert not can_reach(steps, 500, 503)
    for most in (1, 2, 3):
        monkeypatch.setattr(sums, "MOST_STEPS", most)
        assert can_reach(steps, 500, 503)
        assert not can_reach(steps, -5, -1)
    monkeypatch.setattr(sums, "MOST_STEPS", 100)
    assert not can_reach(steps, 500, 503)
    assert can_reach([(3, 1 << 40), (2 << 40, 1 << 40)], 1, 1 << 60)


def _block(*shape: int) -> np.ndarray:
    """One number, viewed as an array of this shape, which would be too large for memory."""
    strides = [2 * int(np.prod(shape[axis + 1 :], dtype=object)) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), shape, strides)


def test_large_arrays_are_decided_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strides of slices and transposes of one block divide each other."""
    monkeypatch.setattr(sums, "MOST_STEPS", 60)
    packed = _block(64, 1 << 18, 3, 48, 128)
    q, k, v = (packed[:, :, i] for i in range(3))
    for a, b in itertools.permutations((q, k.transpose(0, 2, 1, 3), v[:, ::-1, ::2]), 2):
        assert not share_memory(a, b)
        assert not overlaps_itself(a)
        assert share_memory(a, a[1:, 7::5])
    woven = _block(8, 1 << 18, 3, 48, 128)  # one row of every three, and the other two
    assert not share_memory(woven[:, :, 1], woven[:, :, ::2])
    thirds = _block(64, 1 << 18, 48, 64, 3)
    assert not share_memory(thirds[..., 1], thirds[..., ::2])
    assert share_memory(thirds[..., 2], thirds[..., ::2])
    assert not overlaps_itself(thirds[..., ::2])
    assert overlaps_itself(np.broadcast_to(thirds, (2, *thirds.shape)))
