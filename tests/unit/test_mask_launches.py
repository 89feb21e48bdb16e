"""A boolean mask in the parameters of launches: its address, its strides and its packed bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from .fake_device import ADDRESS, FakeDevice, fake_device

__all__ = ["fake_device"]

_Q, _KV = (2, 24, 4, 64), (2, 32, 2, 64)
_MASK = 7 * ADDRESS
_AXES = ("batch", "head", "row", "column")


def _mask(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, offset: int = 0) -> Any:
    """A CuPy array over memory that is never touched."""
    import cupy

    memory = cupy.cuda.UnownedMemory(_MASK, 1 << 30, None, 0)
    return cupy.ndarray(shape, bool, cupy.cuda.MemoryPointer(memory, offset), strides=strides)


def _launched(
    fake: FakeDevice, operation: Any, mask: Any, **options: Any
) -> tuple[cuflash.Prepared, dict[str, Any], dict[str, int]]:
    """The prepared call, the parameters of its launches by kernel, and the addresses."""
    ready = cuflash.prepare(
        _Q, _KV, _KV, operation=operation, dtype="float16", mask=mask, **options
    )
    launcher = ready._launcher
    places = {name: ADDRESS * (i + 10) for i, name in enumerate(launcher.names)}
    launcher.run(tuple(places.values()), 3 * ADDRESS, 0)
    names = [launch.config.kernel for launch in ready.plan.launches]
    return ready, dict(zip(names, fake.launched, strict=True)), places


def _full(strides: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, int]:
    """Strides of all four axes by name; 0 for an axis of one element and for one left out."""
    own = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    return dict(zip(_AXES, (*(0,) * (4 - len(own)), *own), strict=True))


_ARRAYS = [
    ((2, 4, 24, 32), (3072, 768, 32, 1)),
    ((2, 4, 24, 32), (4000, -900, 1, 28)),
    ((2, 4, 24, 32), (0, 0, 40, 0)),
    ((1, 4, 24, 32), (999, 768, 32, 1)),
    ((2, 1, 24, 1), (24, 77, 1, 55)),
    ((24, 32), (33, 1)),
    ((4, 1, 32), (32, 9, 1)),
    ((32,), (-1,)),
    ((1,), (5,)),
    ((), ()),
]


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(("shape", "strides"), _ARRAYS, ids=str)
def test_the_strides_of_any_array(
    fake_device: FakeDevice, algorithm: Any, shape: Any, strides: Any
) -> None:
    for operation in ("forward", "backward"):
        fake_device.launched.clear()
        mask = _mask(shape, strides)
        _, launched, places = _launched(fake_device, operation, mask, algorithm=algorithm)
        one = launched[operation]["mask"]
        assert one["mask"] == places["mask"]
        assert {axis: one[f"mask_{axis}_stride"] for axis in _AXES} == _full(strides, shape)
        assert one["entries"] == 1
        assert one["own_entries"] == (shape[0] if len(shape) == 4 else 1)


def test_each_of_two_arrays_has_its_own_strides_and_address(fake_device: FakeDevice) -> None:
    """This also holds in the kernel of the bias' gradient, which reads both."""
    bias, wrt = ((4, 24, 1), "float32"), ("q", "k", "v", "bias")
    mask = _mask((2, 1, 24, 32), (800, 0, 33, 1))
    more = {"bias": bias, "wrt": wrt, "algorithm": "fa2"}
    _, launched, places = _launched(fake_device, "backward", mask, **more)
    for kernel in ("backward", "bias_gradient"):
        of_mask, of_bias = (launched[kernel][name] for name in ("mask", "bias"))
        assert (of_mask["mask"], of_bias["bias"]) == (places["mask"], places["bias"])
        got = [of_mask[f"mask_{axis}_stride"] for axis in _AXES]
        assert got == [800, 0, 33, 1]
        assert [of_bias[f"bias_{axis}_stride"] for axis in _AXES] == [0, 24, 1, 0]
        assert (of_mask["own_entries"], of_bias["own_entries"]) == (2, 1)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(("shape", "strides"), _ARRAYS, ids=str)
def test_fa3_packs_any_array_and_reads_the_bits(
    fake_device: FakeDevice, operation: Any, shape: Any, strides: Any
) -> None:
    """A mask that is the same for all keys is not packed: it is read in place."""
    ready, launched, places = _launched(
        fake_device, operation, _mask(shape, strides), algorithm="fa3"
    )
    offsets = {buffer.name: buffer.offset for buffer in ready.plan.workspace}
    whole = (1,) * (4 - len(shape)) + shape
    one = launched[operation]["mask"]
    if whole[3] == 1:
        assert "summarise_mask" not in launched
        assert one["mask"] == places["mask"]
        return
    bits = {name: 3 * ADDRESS + offsets[name] for name in ("tile_bits", "pair_bits")}
    packing = launched["summarise_mask"]
    assert {name: packing[name] for name in bits} == bits
    assert {name: one[name] for name in bits} == bits
    assert (one["entries"], one["own_entries"], one["own_heads"]) == (1, *whole[:2])
    assert packing["mask_heads"] == whole[1]
    array = packing["mask"]
    assert array["data"] == places["mask"]
    assert {axis: array[f"{axis}_stride"] for axis in _AXES} == _full(strides, shape)
    assert [packing["shape"][name] for name in ("seqlen_q", "seqlen_kv")] == [24, 32]


def test_a_run_has_its_mask_at_any_byte(fake_device: FakeDevice) -> None:
    for algorithm in ("fa2", "fa3"):
        options = {"operation": "forward", "dtype": "float16", "algorithm": algorithm}
        ready = cuflash.prepare(_Q, _KV, _KV, mask=(24, 32), **options)
        pointers = dict.fromkeys(("q", "k", "v", "out", "lse"), ADDRESS)
        ready.run({**pointers, "mask": ADDRESS + 1}, workspace=ADDRESS)


@pytest.mark.parametrize("dtype", ["float32", np.int8, "uint8"])
def test_a_mask_of_numbers_is_not_prepared(fake_device: FakeDevice, dtype: Any) -> None:
    with pytest.raises(cuflash.ArgumentTypeError, match=r"^mask: got .*bool"):
        cuflash.prepare(_Q, _KV, _KV, dtype="float16", mask=((24, 32), dtype))
    assert not fake_device.launched


@pytest.mark.parametrize("given", ["bool", bool, np.bool_, ((2, 4, 24, 32), bool), (2, 4, 24, 32)])
def test_a_mask_is_prepared_from_its_dtype_or_its_shape(
    fake_device: FakeDevice, given: Any
) -> None:
    for operation in ("forward", "backward"):
        ready = cuflash.prepare(_Q, _KV, _KV, operation=operation, dtype="float16", mask=given)
        spec = ready.tensors["mask"]
        assert (spec.shape, spec.dtype, spec.itemsize) == ((2, 4, 24, 32), "bool", 1)
        assert "dmask" not in ready.tensors
