"""The parameters of launches: they follow the addresses, and equal ones are made only once."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from itertools import product
from typing import Any, cast

import numpy as np
import pytest

import cuflash
from cuflash.cuda import launch
from cuflash.cuda.launch import PreparedPlan
from cuflash.cuda.prepared_kernel import Places, PreparedKernel
from cuflash.cuda.tensor_map import WORDS, TensorMapEncoder

from .fake_device import ADDRESS, FakeDevice, device_array, fake_device

__all__ = ["fake_device"]


class FakeEncoder:
    """Writes the address into every word of a map."""

    def write(self, address: int, to: Any) -> None:
        to[:] = address


#: Words: one of the template, two maps, and addresses of a tensor, the counter and two buffers.
_LENGTH = 1 + 2 * WORDS + 4


def _kernel() -> PreparedKernel:
    maps = tuple(
        (1 + WORDS * i, name, cast(TensorMapEncoder, FakeEncoder())) for i, name in enumerate("qk")
    )
    at = 1 + 2 * WORDS
    places = Places(maps, ((at, "out"),), ((at + 2, 256), (at + 3, 512)), at + 1)
    return PreparedKernel("attention", 1, (1,) * 7, np.full(_LENGTH, 5, np.uint64), places)


def _read(parameters: Any, length: int = _LENGTH) -> list[int]:
    """The structure that the driver would find."""
    (structure,) = (ctypes.c_void_p * 1).from_address(parameters.address)
    return [*(ctypes.c_uint64 * length).from_address(structure)]


def _expected(q: int, k: int, out: int, workspace: int, counter: int) -> list[int]:
    return [5, *[q] * WORDS, *[k] * WORDS, out, counter, workspace + 256, workspace + 512]


def test_parameters_follow_every_address() -> None:
    kernel = _kernel()
    every = list(product((16, 48), (32, 64), (80, 96), (1 << 20, 1 << 21), (7, 8)))
    made = [kernel.parameters({"q": q, "k": k, "out": o}, w, c) for q, k, o, w, c in every]
    for addresses, parameters in zip(every, made, strict=True):  # they stay as made
        assert _read(parameters) == _expected(*addresses)


def test_an_absent_tensor_is_at_0() -> None:
    assert _read(_kernel().parameters({"q": 16, "k": 32}, 0, 7)) == _expected(16, 32, 0, 0, 7)


def test_without_maps_the_rest_is_the_template() -> None:
    places = Places((), ((1, "q"),), (), None)
    kernel = PreparedKernel("attention", 1, (1,) * 7, np.arange(3, dtype=np.uint64), places)
    assert _read(kernel.parameters({"q": 16}, 999, 0), 3) == [0, 16, 2]


SHAPE = (2, 100, 4, 64)


def _plan() -> PreparedPlan:
    return cuflash.prepare(SHAPE, SHAPE, SHAPE, dtype="float16")._launcher


def _addresses(plan: PreparedPlan, number: int = 0) -> tuple[int, ...]:
    return tuple(ADDRESS * (i + 1) + 256 * number for i in range(len(plan.names)))


def test_the_same_addresses_have_the_same_parameters(fake_device: FakeDevice) -> None:
    plan = _plan()
    for number in (0, 1, 0, 1):
        plan.run(_addresses(plan, number), ADDRESS, 0)
    assert [int(one["out"]["data"]) for one in fake_device.launched] == [
        dict(zip(plan.names, _addresses(plan, number), strict=True))["out"]
        for number in (0, 1, 0, 1)
    ]
    assert len(plan._kept) == 2


def test_another_workspace_or_counter_has_others(fake_device: FakeDevice, monkeypatch: Any) -> None:
    plan = _plan()
    counters = iter((7, 8, 8))
    monkeypatch.setattr(launch, "counter_of_launch", lambda *_: next(counters))
    for workspace in (ADDRESS, ADDRESS, 2 * ADDRESS):
        plan.run(_addresses(plan), workspace, 0)
    assert [int(one["tile_counter"]) for one in fake_device.launched] == [7, 8, 8]
    assert len(plan._kept) == 3


def test_another_stream_has_other_launches(fake_device: FakeDevice) -> None:
    plan = _plan()
    streams = [0, 77, 1, 77, 0]
    for stream in streams:
        plan.run(_addresses(plan), ADDRESS, stream)
    assert [stream for _, stream in fake_device.queued] == streams
    assert len(plan._kept) == 3


def test_what_is_no_stream_spoils_no_later_launch(fake_device: FakeDevice) -> None:
    plan = _plan()
    wrong: Any = 77.0
    with pytest.raises(TypeError):
        plan.run(_addresses(plan), ADDRESS, wrong)
    plan.run(_addresses(plan), ADDRESS, 77)
    with pytest.raises(TypeError):  # though an equal number is kept
        plan.run(_addresses(plan), ADDRESS, wrong)
    assert fake_device.queued == [(0, 77)]


def test_a_kept_launch_keeps_no_array(fake_device: FakeDevice) -> None:
    """Only its own parameters, and the driver's function."""
    arrays = [device_array(SHAPE) for _ in range(3)]
    cuflash.attention(*arrays)
    references = [weakref.ref(array) for array in arrays]
    del arrays
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *product(("float16", "float32", "float64"), (0.1, 0.125, 2.0**-100, 2.0**100)),
        ("float64", 2.0**-900),
        ("float64", 2.0**900),
    ],
)
def test_a_launch_brings_the_factor_of_the_logits(
    fake_device: FakeDevice, dtype: str, scale: float
) -> None:
    """The factor is the scale, rounded to a normal float32 number.

    For 16-bit storage it is in log2 units.
    """
    options: dict[str, Any] = {"dtype": dtype, "scale": scale, "algorithm": "fa2"}
    plan = cuflash.prepare(SHAPE, SHAPE, SHAPE, **options)._launcher
    plan.run(_addresses(plan), ADDRESS, 0)
    (launched,) = fake_device.launched
    numbers = np.finfo(np.float32)
    exact = scale * (math.log2(math.e) if dtype == "float16" else 1)
    assert launched["scale"] == scale
    assert launched["factor"] == np.float32(np.clip(exact, numbers.tiny, numbers.max))
    assert launched["factor"].dtype == np.float32


def test_axes_of_one_element_have_no_stride(fake_device: FakeDevice) -> None:
    """With a stride of 0, any row, even one that does not exist, is at the only row's address."""
    alone = (2, 1, 4, 64)
    options: dict[str, Any] = {"dtype": "float16", "algorithm": "fa2"}
    plan = cuflash.prepare(SHAPE, alone, alone, **options)._launcher
    plan.run(_addresses(plan), ADDRESS, 0)
    (launched,) = fake_device.launched
    assert launched["k"]["row_stride"] == launched["v"]["row_stride"] == 0
    assert launched["q"]["row_stride"] == launched["k"]["batch_stride"] == 4 * 64


def test_so_many_are_kept_and_no_more(fake_device: FakeDevice) -> None:
    plan = _plan()
    for number in range(3 * launch._KEPT):
        plan.run(_addresses(plan, number), ADDRESS, 0)
        assert 0 < len(plan._kept) <= launch._KEPT
    kept = plan._kept
    plan.run(_addresses(plan, 3 * launch._KEPT - 1), ADDRESS, 0)
    assert plan._kept is kept


def test_a_refused_launch_names_the_plan(fake_device: FakeDevice, monkeypatch: Any) -> None:
    import cupy

    class RefusedError(Exception):
        """Replaces CUDADriverError, which only the driver can make."""

    def refuse(*_: Any) -> None:
        raise RefusedError("CUDA_ERROR_INVALID_VALUE")

    plan = _plan()
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", RefusedError)
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", refuse)
    with pytest.raises(cuflash.LaunchError, match=r"fa3 on cuda.*refused: CUDA_ERROR_INVALID"):
        plan.run(_addresses(plan), ADDRESS, 0)
