"""A boolean mask in the parameters of launches: addresses, strides and maps, of any array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.arrays.spec import TensorSpec
from cuflash.cuda import tensor_map

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
    """What is prepared, the parameters of its launches by kernel, and the addresses."""
    ready = cuflash.prepare(
        _Q, _KV, _KV, operation=operation, dtype="float16", mask=mask, **options
    )
    launcher = ready._launcher
    places = {name: ADDRESS * (i + 10) for i, name in enumerate(launcher.names)}
    launcher.run(tuple(places.values()), 3 * ADDRESS, 0)
    names = [launch.config.kernel for launch in ready.plan.launches]
    return ready, dict(zip(names, fake.launched, strict=True)), places


def _full(strides: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, int]:
    """Strides of all four axes by their names; 0 along axes of one element and left out."""
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
    """Also in the kernel of the gradient of the bias, which reads both."""
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


@pytest.fixture
def encoded(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver was asked of every map: address, dtype, sizes, strides in bytes, box."""
    made: list[Any] = []

    def encode(words: Any, kind: int, rank: int, address: Any, *more: Any) -> int:
        made.append((address.value, kind, *([*numbers] for numbers in more[:4]), *more[4:]))
        return fake_device.encode(words, kind, rank, address)

    monkeypatch.setattr(tensor_map, "_encode", lambda: encode)
    return made


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 24, 32), (3072, 768, 32, 1)),
        ((2, 4, 24, 32), (16, 6000 * 16, 48, 1)),
        ((1, 4, 24, 32), (3, 768, 32, 1)),
        ((24, 32), (112, 1)),
    ],
    ids=str,
)
def test_the_map_of_a_mask_that_comes_in_tiles(
    fake_device: FakeDevice, encoded: list[Any], operation: Any, shape: Any, strides: Any
) -> None:
    """Bytes as [batch, head, query, key]; an axis of one element has any legal stride."""
    ready, launched, places = _launched(
        fake_device, operation, _mask(shape, strides), algorithm="fa3"
    )
    (made,) = (one for one in encoded if one[0] == places["mask"])
    _, kind, sizes, spans, box, steps, *others = made
    whole = (1,) * (4 - len(shape)) + shape
    assert kind == 0  # CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert sizes == [whole[3], whole[2], whole[1], whole[0]]
    every = _full(strides, shape)
    assert spans == [every[axis] or 16 for axis in ("row", "head", "batch")]
    (launch,) = (one for one in ready.plan.launches if one.config.kernel == operation)
    rows = dict(launch.boxes)["mask"]
    assert box == [128, rows, 1, 1]
    assert steps == [1, 1, 1, 1]
    assert others == [0, 3, 3, 0]  # swizzled by 128 bytes; what lies outside is 0, which hides
    parameters = launched[operation]["mask"]
    assert parameters["mask_map"]["opaque"][0] == places["mask"]
    assert (parameters["own_entries"], parameters["own_heads"]) == whole[:2]
    assert parameters["entries"] == 1


def test_a_mask_of_keys_alone_has_a_map_of_one_row(
    fake_device: FakeDevice, encoded: list[Any]
) -> None:
    """A padding mask: a tile of eight rows, of which one is there."""
    _, launched, places = _launched(fake_device, "forward", (2, 1, 1, 32), algorithm="fa3")
    (made,) = (one for one in encoded if one[0] == places["mask"])
    assert made[1:5] == (0, [32, 1, 1, 2], [16, 16, 32], [128, 8, 1, 1])
    assert (launched["forward"]["mask"]["own_entries"]) == 2


def test_beside_a_bias_that_comes_in_tiles_it_has_no_map(
    fake_device: FakeDevice, encoded: list[Any]
) -> None:
    mask = _mask((24, 32), (33, 1))
    more = {"bias": (24, 32), "algorithm": "fa3"}
    _, launched, places = _launched(fake_device, "forward", mask, **more)
    mapped = [one[0] for one in encoded]
    assert places["bias"] in mapped
    assert places["mask"] not in mapped
    one = launched["forward"]["mask"]
    assert (one["mask"], one["mask_row_stride"], one["mask_column_stride"]) == (
        places["mask"],
        33,
        1,
    )


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "boxable"),
    [
        ((24, 32), (32, 1), 0, True),
        ((24, 31), (32, 1), 0, True),
        ((24, 31), (31, 1), 0, False),
        ((24, 32), (40, 1), 0, False),
        ((24, 32), (48, 1), 0, True),
        ((24, 32), (32, 1), 16, True),
        ((24, 32), (32, 1), 8, False),
        ((24, 32), (64, 2), 0, False),
        ((24, 32), (-32, 1), 0, False),
        ((4, 24, 32), (0, 32, 1), 0, False),
        ((4, 1, 100), (100, 100, 1), 0, False),
        ((4, 1, 100), (112, 100, 1), 0, True),
        ((1, 24, 32), (3, 32, 1), 0, True),
        ((100,), (1,), 0, True),
        ((100,), (1,), 1, False),
        ((32,), (-1,), 0, False),
    ],
    ids=str,
)
def test_what_the_copy_engine_reads(shape: Any, strides: Any, offset: int, boxable: bool) -> None:
    """Rows of any length, at positive multiples of 16 bytes: 16 elements."""
    assert TensorSpec(shape, "bool", strides, 1, 0, offset).boxable == boxable


@pytest.mark.parametrize(
    ("stride", "offset", "algorithm"),
    [(32, 0, "fa3"), (48, 16, "fa3"), (33, 0, "fa2"), (40, 0, "fa2"), (32, 8, "fa2")],
)
def test_a_mask_that_the_engine_cannot_read_decides_the_forward_pass(
    fake_device: FakeDevice, stride: int, offset: int, algorithm: str
) -> None:
    """And says why; the backward pass reads it by elements."""
    for operation, expected in (("forward", algorithm), ("backward", "fa3")):
        mask = _mask((24, 32), (stride, 1), offset)
        ready = cuflash.prepare(_Q, _KV, _KV, operation=operation, dtype="float16", mask=mask)
        assert ready.plan.algorithm == expected
        said = "".join(why for _, why in ready.plan.rejected)
        assert ("pad the last axis in memory to a multiple of 16 elements" in said) == (
            expected == "fa2"
        )
        kernel = next(x for x in ready.plan.launches if x.config.kernel == operation)
        (feature,) = kernel.config.features
        assert feature.device.struct.startswith("Staged") == (algorithm == "fa3")


@pytest.mark.parametrize(("algorithm", "multiple"), [("fa3", 16), ("fa2", 1)])
def test_a_run_has_its_mask_where_the_engine_can_read_it(
    fake_device: FakeDevice, algorithm: Any, multiple: int
) -> None:
    """Elsewhere at any byte."""
    options = {"operation": "forward", "dtype": "float16", "algorithm": algorithm}
    ready = cuflash.prepare(_Q, _KV, _KV, mask=(24, 32), **options)
    pointers = dict.fromkeys(("q", "k", "v", "out", "lse"), ADDRESS)
    ready.run({**pointers, "mask": ADDRESS + multiple}, workspace=ADDRESS)
    if multiple == 1:
        return
    says = f"mask at {ADDRESS + 8:#x}; expected a multiple of 16"
    with pytest.raises(cuflash.ArgumentValueError, match=says):
        ready.run({**pointers, "mask": ADDRESS + 8}, workspace=ADDRESS)


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
