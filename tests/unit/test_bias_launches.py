"""Addresses, strides and maps of any bias in the parameters of launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.arrays.spec import TensorSpec
from cuflash.cuda import tensor_map
from cuflash.planning.tiles.common import ceil_div

from .fake_device import ADDRESS, FakeDevice, fake_device

__all__ = ["fake_device"]

_Q, _KV = (2, 24, 4, 64), (2, 32, 2, 64)
#: (batch, heads_q, seqlen_q, seqlen_kv).
_SIZES = (2, 4, 24, 32)
_BIAS = 7 * ADDRESS


def _bias(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> Any:
    """A CuPy array over memory that is never touched; ``strides`` are in elements."""
    import cupy

    memory = cupy.cuda.UnownedMemory(_BIAS, 1 << 30, None, 0)
    itemsize = np.dtype(dtype).itemsize
    own = None if strides is None else tuple(itemsize * stride for stride in strides)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides=own)


def _launched(
    fake: FakeDevice, operation: Any, bias: Any, **options: Any
) -> tuple[cuflash.Prepared, dict[str, Any], dict[str, int]]:
    """The prepared call, the parameters of its launches by kernel, and its arrays' addresses."""
    wrt = {"wrt": ("q", "k", "v", "bias")} if operation == "backward" else {}
    ready = cuflash.prepare(
        _Q, _KV, _KV, operation=operation, dtype="float16", bias=bias, **wrt, **options
    )
    launcher = ready._launcher
    places = {name: ADDRESS * (i + 10) for i, name in enumerate(launcher.names)}
    launcher.run(tuple(places.values()), 3 * ADDRESS, 0)
    names = [launch.config.kernel for launch in ready.plan.launches]
    return ready, dict(zip(names, fake.launched, strict=True)), places


def _full(strides: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, int]:
    """The strides of all four axes by name: 0 along axes of one element and missing axes."""
    own = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    every = (*(0,) * (4 - len(own)), *own)
    return dict(zip(("batch", "head", "row", "column"), every, strict=True))


_ARRAYS = [
    ((2, 4, 24, 32), (3072, 768, 32, 1)),
    ((2, 4, 24, 32), (4000, -900, 1, 28)),
    ((2, 4, 24, 32), (0, 0, 40, 0)),
    ((1, 4, 24, 32), (999, 768, 32, 1)),
    ((2, 1, 24, 1), (24, 77, 1, 55)),
    ((24, 32), (32, 1)),
    ((4, 1, 32), (32, 9, 1)),
    ((32,), (-1,)),
    ((1,), (5,)),
    ((), ()),
]


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("shape", "strides"), _ARRAYS, ids=str)
def test_the_strides_of_any_array(
    fake_device: FakeDevice, algorithm: Any, dtype: Any, shape: Any, strides: Any
) -> None:
    for operation in ("forward", "backward"):
        fake_device.launched.clear()
        bias, options = _bias(shape, dtype, strides), {"algorithm": algorithm, "scale": 0.125}
        _, launched, places = _launched(fake_device, operation, bias, **options)
        kernels = [operation, *["bias_gradient"] * (operation == "backward")]
        for one in (launched[kernel]["bias"] for kernel in kernels):
            assert one["bias"] == places["bias"]
            got = {axis: one[f"bias_{axis}_stride"] for axis in ("batch", "head", "row", "column")}
            assert got == _full(strides, shape)
            assert (one["inverse_unit"], one["inverse_unit_single"]) == (8, 8)
            assert one["entries"] == 1
            assert one["own_entries"] == (shape[0] if len(shape) == 4 else 1)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("shape", [shape for shape, _ in _ARRAYS], ids=str)
def test_the_gradient_is_told_where_it_goes_and_its_parts(
    fake_device: FakeDevice, algorithm: Any, shape: Any
) -> None:
    bias = _bias(shape, np.float32)
    ready, launched, places = _launched(fake_device, "backward", bias, algorithm=algorithm)
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    whole = (1,) * (4 - len(shape)) + shape
    buffers = {buffer.name: 3 * ADDRESS + buffer.offset for buffer in ready.plan.workspace}
    kernels = {"bias_gradient", "reduce_bias"} & launched.keys()
    assert (len(kernels) == 2) == (1 in whole[2:])
    for name in kernels:
        to = launched[name]["dbias"]
        assert to["data"] == places["dbias"]
        got = {axis: to[f"{axis}_stride"] for axis in ("batch", "head", "row", "column")}
        assert got == _full(strides, shape)
        assert (launched[name]["bias_batch"], launched[name]["bias_heads"]) == whole[:2]
        assert launched[name]["bias_parts"] == buffers.get("bias_parts", 0)
    tiles = launched["bias_gradient"]
    assert tiles["delta"] == buffers["delta"]
    assert tiles["scale"] == ready.plan.problem.scale
    assert tiles["factor"] == np.float32(ready.plan.problem.factor)
    assert tiles["padded_rows"] == (24 if algorithm == "fa1" else ceil_div(24, 128) * 128)
    for name in ("q", "k", "v", "dout", "lse"):
        assert tiles[name]["data"] == places[name]
    assert tiles["shape"]["seqlen_kv"] == 32
    assert (tiles["shape"]["heads_q"], tiles["shape"]["heads_kv"]) == (4, 2)
    if "reduce_bias" in kernels:
        length = whole[3] if whole[3] > 1 else _SIZES[2]
        assert launched["reduce_bias"]["length"] == length
        assert launched["reduce_bias"]["shape"]["batch"] == 2


@pytest.fixture
def encoded(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The driver's arguments for every map: address, dtype, sizes, strides in bytes, box."""
    made: list[Any] = []

    def encode(words: Any, kind: int, rank: int, address: Any, *more: Any) -> int:
        made.append((address.value, kind, *([*numbers] for numbers in more[:3])))
        return fake_device.encode(words, kind, rank, address)

    monkeypatch.setattr(tensor_map, "_encode", lambda: encode)
    return made


@pytest.mark.parametrize(
    ("operation", "dtype", "kind"),
    [("forward", np.float16, 6), ("forward", np.float32, 7), ("backward", np.float16, 6)],
)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 24, 32), (3072, 768, 32, 1)),
        ((2, 4, 24, 32), (8, 6000, 48, 1)),
        ((1, 4, 24, 32), (3, 768, 32, 1)),
        ((24, 32), (56, 1)),
    ],
    ids=str,
)
def test_the_map_of_a_bias_that_comes_in_tiles(
    fake_device: FakeDevice,
    encoded: list[Any],
    operation: Any,
    dtype: Any,
    kind: int,
    shape: Any,
    strides: Any,
) -> None:
    """The map has all four axes. An axis of one element gets a legal stride of 16 bytes."""
    ready, launched, places = _launched(
        fake_device, operation, _bias(shape, dtype, strides), algorithm="fa3", scale=0.125
    )
    (made,) = (one for one in encoded if one[0] == places["bias"])
    _, own, sizes, spans, box = made
    whole, itemsize = (1,) * (4 - len(shape)) + shape, np.dtype(dtype).itemsize
    assert own == kind
    assert sizes == [whole[3], whole[2], whole[1], whole[0]]
    every = _full(strides, shape)
    expected = [itemsize * every[axis] or 16 for axis in ("row", "head", "batch")]
    assert spans == expected
    rows = dict(ready.plan.launches[-1 if operation == "forward" else 1].boxes)["bias"]
    assert box == [128 // itemsize, rows, 1, 1]
    parameters = launched[operation]["bias"]
    assert parameters["bias_map"]["opaque"][0] == places["bias"]
    assert (parameters["own_entries"], parameters["own_heads"]) == whole[:2]
    assert (parameters["entries"], parameters["inverse_unit_single"]) == (1, 8)


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "offset", "boxable"),
    [
        ((24, 32), (32, 1), 2, 0, True),
        ((24, 31), (32, 1), 2, 0, True),
        ((24, 32), (33, 1), 2, 0, False),
        ((24, 32), (36, 1), 4, 0, True),
        ((24, 32), (36, 1), 2, 0, False),
        ((24, 32), (32, 1), 2, 16, True),
        ((24, 32), (32, 1), 2, 8, False),
        ((24, 32), (32, 2), 2, 0, False),
        ((24, 32), (-32, 1), 2, 0, False),
        ((4, 24, 32), (0, 32, 1), 2, 0, False),
        ((1, 24, 32), (3, 32, 1), 2, 0, True),
        ((1, 32), (3, 1), 2, 0, True),
        ((32,), (1,), 2, 0, True),
        ((32,), (-1,), 2, 0, False),
        ((24, 32), (1 << 39, 1), 2, 0, False),
        ((24, 32), (1 << 38, 1), 2, 0, True),
        ((0, 32), (33, 1), 2, 3, True),
    ],
    ids=str,
)
def test_what_the_copy_engine_reads(
    shape: Any, strides: Any, itemsize: int, offset: int, boxable: bool
) -> None:
    """Rows may have any length; the address and strides are positive multiples of 16 bytes."""
    dtype = {2: "float16", 4: "float32"}[itemsize]
    assert TensorSpec(shape, dtype, strides, itemsize, 0, offset).boxable == boxable


@pytest.mark.parametrize(("stride", "algorithm"), [(32, "fa3"), (33, "fa2")])
def test_a_bias_that_the_engine_cannot_read_decides_the_forward_pass(
    fake_device: FakeDevice, stride: int, algorithm: str
) -> None:
    for operation, expected in (("forward", algorithm), ("backward", "fa3")):
        bias = _bias((24, 32), np.float16, (stride, 1))
        ready = cuflash.prepare(_Q, _KV, _KV, operation=operation, dtype="float16", bias=bias)
        assert ready.plan.algorithm == expected


@pytest.mark.parametrize(("algorithm", "multiple"), [("fa3", 16), ("fa2", 2)])
def test_a_run_has_its_bias_where_the_engine_can_read_it(
    fake_device: FakeDevice, algorithm: Any, multiple: int
) -> None:
    bias = _bias((24, 32), np.float16)
    options = {"operation": "forward", "dtype": "float16", "algorithm": algorithm}
    ready = cuflash.prepare(_Q, _KV, _KV, bias=bias, **options)
    pointers = dict.fromkeys(("q", "k", "v", "out", "lse"), ADDRESS)
    ready.run({**pointers, "bias": ADDRESS + multiple}, workspace=ADDRESS)
    says = f"bias at {ADDRESS + 1:#x}; expected a multiple of {multiple}"
    with pytest.raises(cuflash.ArgumentValueError, match=says):
        ready.run({**pointers, "bias": ADDRESS + 1}, workspace=ADDRESS)
