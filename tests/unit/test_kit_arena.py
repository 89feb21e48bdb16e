"""The arena notices every forbidden write, and every missing one."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.kit.arena import POISONS, Arena
from tests.kit.case import STORAGE
from tests.kit.strides import CONTIGUOUS, Strides

SHAPE = (3, 4, 5)
RECIPES = {
    "contiguous": CONTIGUOUS,
    "gaps": Strides(gaps=(7, 3, 0)),
    "last stride 2": Strides(gaps=(0, 0, 1)),
    "permuted": Strides(order=(1, 0, 2), gaps=(2, 2, 0), offset=16),
    "backwards": Strides(flipped=(0, 1), gaps=(0, 1, 0), offset=3),
}


def neighbour(array: np.ndarray, elements: int) -> np.ndarray:
    """The bytes of the element that lies ``elements`` after index 0, or before it if negative."""
    first = array.__array_interface__["data"][0]
    base = array
    while base.base is not None:
        base = base.base
    raw = np.frombuffer(base, np.uint8) if not isinstance(base, np.ndarray) else base
    start = raw.__array_interface__["data"][0]
    at = first - start + elements * array.itemsize
    assert 0 <= at < raw.nbytes
    return raw.view(np.uint8)[at : at + array.itemsize]


@pytest.fixture(params=STORAGE)
def values(request: pytest.FixtureRequest) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE).astype(STORAGE[request.param])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_honest_call_passes(values: np.ndarray, recipe: Strides, poison: str) -> None:
    arena = Arena(poison=poison)
    x = arena.input("x", values, recipe)
    y = arena.output("y", SHAPE, values.dtype, recipe)
    scratch = arena.workspace(1000)
    assert np.array_equal(x, values)
    assert x.strides == y.strides
    y[...] = x
    scratch[...] = 1
    arena.check()
    assert np.array_equal(y, values)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("offset", [-512, -1, 512])
def test_a_write_into_a_margin_is_seen(values: np.ndarray, recipe: Strides, offset: int) -> None:
    span = recipe.place(SHAPE).extent - recipe.offset
    for name in ("x", "y"):
        arena = Arena()
        x = arena.input("x", values, recipe)
        y = arena.output("y", SHAPE, values.dtype, recipe)
        y[...] = x
        arena.check()
        target = {"x": x, "y": y}[name]
        lowest = target[tuple(slice(None, None, -1 if s < 0 else 1) for s in target.strides)]
        neighbour(lowest, offset if offset < 0 else span - 1 + offset)[:1] += 1
        with pytest.raises(AssertionError, match=rf"{name} .*beside it"):
            arena.check()


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "contiguous"])
def test_a_write_into_a_gap_is_seen(values: np.ndarray, name: str) -> None:
    recipe = RECIPES[name]
    placement = recipe.place(SHAPE)
    used = np.full(SHAPE, placement.start)
    for axis, stride in enumerate(placement.strides):
        steps = np.arange(SHAPE[axis]) * stride
        used += steps.reshape([-1 if other == axis else 1 for other in range(len(SHAPE))])
    gaps = np.setdiff1d(np.arange(used.min(), used.max()), used)
    assert gaps.size
    for gap in (gaps[0], gaps[-1]):
        arena = Arena()
        y = arena.output("y", SHAPE, values.dtype, recipe)
        y[...] = values
        arena.check()
        neighbour(y, int(gap) - placement.start)[:1] += 1
        with pytest.raises(AssertionError, match="in a gap of its strides"):
            arena.check()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_write_into_an_input_is_seen(values: np.ndarray, recipe: Strides) -> None:
    arena = Arena()
    x = arena.input("x", values, recipe)
    arena.check()
    x[1, 2, 3] = -x[1, 2, 3]
    with pytest.raises(AssertionError, match=r"x: the input was written, first at \(1, 2, 3\)"):
        arena.check("the repro line")


def test_the_repro_line_is_told() -> None:
    arena = Arena()
    arena.output("y", (2,), np.float32)
    with pytest.raises(AssertionError, match="repro: B=1"):
        arena.check("B=1")


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_element_left_out_is_seen(values: np.ndarray, recipe: Strides, poison: str) -> None:
    arena = Arena(poison=poison)
    y = arena.output("y", SHAPE, values.dtype, recipe)
    left = y[2, 0, 4].copy()
    y[...] = values
    y[2, 0, 4] = left
    with pytest.raises(AssertionError, match=r"y: 1 elements not written.*first \(2, 0, 4\)"):
        arena.check()


@pytest.mark.parametrize("way", [lambda gap: gap, lambda gap: gap * 1])
def test_a_result_made_from_a_gap_is_seen(way: Callable[[np.ndarray], np.ndarray]) -> None:
    arena = Arena()
    x = arena.input("x", np.ones((2, 3), np.float32), Strides(gaps=(1, 0)))
    y = arena.output("y", (2, 3), np.float32)
    y[...] = x
    y[1, 1] = way(neighbour(x, 3).view(np.float32))[0]  # the gap after row 0
    with pytest.raises(AssertionError, match=r"computed from memory beside an input"):
        arena.check()


def test_a_computed_nan_is_no_poison() -> None:
    arena = Arena()
    y = arena.output("y", (4,), ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        y[...] = np.array(np.inf, ml_dtypes.bfloat16) - np.array(np.inf, ml_dtypes.bfloat16)
    arena.check()
    assert np.isnan(y).all()


@pytest.mark.parametrize("dtype", STORAGE)
def test_poison_is_not_a_number_or_huge(dtype: str) -> None:
    for poison, patterns in POISONS.items():
        assert len(set(patterns[dtype])) == 2
        for bits in patterns[dtype]:
            unsigned = np.array(bits, f"u{np.dtype(STORAGE[dtype]).itemsize}")
            value = float(unsigned.view(STORAGE[dtype]).astype(np.float64))
            largest = float(ml_dtypes.finfo(STORAGE[dtype]).max)
            assert np.isnan(value) if poison == "nan" else largest / 2 < value < largest


def test_margins_are_wide_and_everything_starts_aligned(values: np.ndarray) -> None:
    for recipe in (CONTIGUOUS, Strides(offset=8)):
        x = Arena().input("x", values, recipe)
        address = x.__array_interface__["data"][0] - recipe.offset * x.itemsize
        assert address % 256 == 0
        margin = max(512, 4096 // x.itemsize)
        neighbour(x, -margin - recipe.offset)
        neighbour(x, recipe.place(SHAPE).extent - recipe.offset + margin - 1)


@pytest.mark.parametrize("nbytes", [0, 1, 255, 4096])
def test_a_workspace_is_aligned_poisoned_and_guarded(nbytes: int) -> None:
    arena = Arena()
    scratch = arena.workspace(nbytes)
    assert scratch.dtype == np.uint8
    assert scratch.shape == (nbytes,)
    assert scratch.__array_interface__["data"][0] % 256 == 0
    whole = scratch[: nbytes // 4 * 4].view(np.float32)
    assert np.isnan(whole).all()
    assert (whole.view(np.int32) > 2**30).all()
    arena.check()  # a workspace need not be written
    neighbour(scratch, (nbytes + 3) // 4 * 4)[:] = 0
    with pytest.raises(AssertionError, match=r"workspace .*beside it"):
        arena.check()


def test_empty_tensors_have_margins_too() -> None:
    arena = Arena()
    x = arena.input("x", np.zeros((0, 4), np.float32))
    arena.output("y", (3, 0), np.float32)
    arena.check()
    neighbour(x, 0)[:] = 0
    with pytest.raises(AssertionError, match="x"):
        arena.check()


def test_broadcast_inputs_keep_their_values() -> None:
    recipe = Strides(broadcast=(0,))
    same = np.broadcast_to(np.arange(4.0, dtype=np.float32), (3, 4))
    arena = Arena()
    x = arena.input("x", same, recipe)
    assert x.strides[0] == 0
    assert np.array_equal(x, same)
    arena.check()
    with pytest.raises(ValueError, match="not constant"):
        Arena().input("x", np.arange(12.0, dtype=np.float32).reshape(3, 4), recipe)
