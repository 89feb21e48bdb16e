"""Repeated calls with tuples as keywords: equal tuples share a decision, others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from .call_case import ROWS, SHAPE, Decided, decided, qkv
from .fake_device import ADDRESS, FakeDevice, device_array, fake_device

__all__ = ["decided", "fake_device"]


def _backward(**changed: Any) -> dict[str, Any]:
    matrices = {
        n: device_array(SHAPE, np.float16, ADDRESS * i) for n, i in (("out", 80), ("dout", 81))
    }
    return {**qkv(), **matrices, "lse": device_array(ROWS, np.float32, ADDRESS * 82), **changed}


@pytest.mark.parametrize(
    "keywords",
    [
        {"window_size": (9, 0)},
        {"window_size": (None, 3)},
        {"window_size": (np.int64(9), 0)},
        {"blocks": (128, 128)},
        {"blocks": (128, 128), "window_size": (7, None), "algorithm": "fa2"},
    ],
    ids=str,
)
def test_a_call_with_tuples_is_decided_once(
    fake_device: FakeDevice, decided: Decided, keywords: dict[str, Any]
) -> None:
    for number in range(3):
        again = {n: (*v,) if isinstance(v, tuple) else v for n, v in keywords.items()}
        cuflash.attention(**qkv(number), **again)
    assert decided.count == 1
    assert len(fake_device.launched) == 3


@pytest.mark.parametrize("wrt", [("v",), ("k", "q"), ("q", "k", "v")], ids=str)
def test_a_selection_of_gradients_is_decided_once(
    fake_device: FakeDevice, decided: Decided, wrt: Any
) -> None:
    for _ in range(3):
        grads = cuflash.attention_backward(**_backward(), wrt=(*wrt,))
        assert len(grads) == len(wrt)
    assert decided.count == 1


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("window_size", (1, 2), (True, 2)),
        ("window_size", (1, 0), (1.0, 0)),
        ("window_size", (0, 0), (0, False)),
        ("blocks", (64, 64), (64.0, 64)),
    ],
)
def test_what_is_equal_and_of_another_type_is_refused_after_it_too(
    fake_device: FakeDevice, decided: Decided, name: str, first: Any, second: Any
) -> None:
    """True equals 1 inside a tuple too, so the types inside tuples are compared."""
    for _ in range(2):
        cuflash.attention(**qkv(), algorithm="fa2", **{name: first})
        with pytest.raises(cuflash.ArgumentTypeError, match=f"{name}: got"):
            cuflash.attention(**qkv(), algorithm="fa2", **{name: second})


def test_two_ways_to_say_a_window_are_each_decided_and_do_the_same(
    fake_device: FakeDevice, decided: Decided
) -> None:
    for sides in ((9, 0), (np.int64(9), 0), (9, np.int32(0)), (9, 0)):
        cuflash.attention(**qkv(), window_size=sides)
    first, *others = (launch.tobytes() for launch in fake_device.launched)
    assert all(len(one) == len(first) for one in others)


def test_a_window_is_part_of_what_tells_calls_apart(
    fake_device: FakeDevice, decided: Decided
) -> None:
    for _ in range(2):
        for sides in ((9, 0), (0, 9), (9, None), None):
            cuflash.attention(**qkv(), window_size=sides)
    assert decided.count == 4


def test_a_list_is_looked_at_every_time(fake_device: FakeDevice, decided: Decided) -> None:
    """A list is not hashable, and may change before the next call."""
    sides: list[int | None] = [9, 0]
    for _ in range(2):
        cuflash.attention(**qkv(), window_size=sides)  # type: ignore[arg-type]
    sides[1] = None
    cuflash.attention(**qkv(), window_size=sides)  # type: ignore[arg-type]
    assert decided.count == 3
