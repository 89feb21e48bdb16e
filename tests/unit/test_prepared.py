"""Prepared calls and the refusals of their runs; a fake device shows the launches."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import addresses
from cuflash.addresses import Addresses
from cuflash.arrays.adopt import adopt
from cuflash.dispatch import _check_workspace
from cuflash.options import Options
from cuflash.pipeline import plan_call

from .fake_device import ADDRESS, FakeDevice, device_array, fake_device

__all__ = ["fake_device"]

Q, KV = (2, 5, 4, 8), (2, 7, 2, 8)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


def _prepare(operation: str = "forward", **options: Any) -> Any:
    return cuflash.prepare(Q, KV, KV, operation=operation, **{"dtype": "float16", **options})


def _pointers(prepared: Any, *without: str) -> dict[str, int]:
    names = [name for name in prepared.tensors if name not in without]
    return {name: ADDRESS * (i + 1) for i, name in enumerate(names)}


def test_a_backward_run_takes_dlse(fake_device: FakeDevice) -> None:
    prepared = _prepare("backward")
    pointers = _pointers(prepared)
    prepared.run(pointers, workspace=ADDRESS)
    dlse = fake_device.launched[0]["dlse"]
    assert int(dlse["data"]) == pointers["dlse"]
    assert [int(dlse[f"{axis}_stride"]) for axis in ("batch", "head", "row")] == [20, 5, 1]


@pytest.mark.parametrize("absent", [{}, {"dlse": 0}])
def test_dlse_may_be_absent(fake_device: FakeDevice, absent: dict[str, int]) -> None:
    prepared = _prepare("backward")
    prepared.run({**_pointers(prepared, "dlse"), **absent}, workspace=ADDRESS)
    assert int(fake_device.launched[0]["dlse"]["data"]) == 0


@pytest.mark.parametrize(
    ("operation", "change", "error", "says"),
    [
        ("forward", {"dlse": ADDRESS}, VALUE, "'dlse'; expected k, lse, out, q, v"),
        ("backward", {"dLse": ADDRESS}, VALUE, "'dLse'"),
        ("forward", {"q": 0}, VALUE, "q at 0"),
        ("backward", {"lse": 0}, VALUE, "lse at 0"),
        ("forward", {"lse": ADDRESS + 2}, VALUE, "lse at 0x100002; expected a multiple of 4"),
        ("backward", {"dlse": ADDRESS + 1}, VALUE, "dlse at 0x100001; expected a multiple of 4"),
        ("forward", {"v": ADDRESS + 8}, VALUE, "v at 0x100008; expected a multiple of 16"),
        ("forward", {"v": None}, TYPE, "v at None; expected an integer"),
    ],
)
def test_addresses_that_were_not_planned_are_refused(
    fake_device: FakeDevice, operation: str, change: dict[str, Any], error: type, says: str
) -> None:
    prepared = _prepare(operation)
    with pytest.raises(error, match="pointers: got") as caught:
        prepared.run({**_pointers(prepared), **change}, workspace=ADDRESS)
    assert says in str(caught.value)
    assert not fake_device.launched

    with pytest.raises(error, match="pointers: got"):
        prepared.bound({**_pointers(prepared), **change}, workspace=ADDRESS)
    assert not fake_device.launched


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_bound_run_launches_what_a_run_does(fake_device: FakeDevice, operation: str) -> None:
    prepared = _prepare(operation)
    pointers = _pointers(prepared)
    bound = prepared.bound(pointers, ADDRESS)
    assert not fake_device.launched
    prepared.run(pointers, stream=77, workspace=ADDRESS)
    for stream in (78, 79):
        bound(stream)
    count = len(prepared.plan.launches)
    assert fake_device.queued == [(0, stream) for stream in (77, 78, 79) for _ in range(count)]
    first = [words.tobytes() for words in fake_device.launched[:count]]
    for at in (count, 2 * count):
        assert [words.tobytes() for words in fake_device.launched[at : at + count]] == first


def test_a_bound_run_of_nothing_launches_nothing(fake_device: FakeDevice) -> None:
    prepared = cuflash.prepare((2, 0, 4, 8), KV, KV, dtype="float16")
    prepared.bound({**_pointers(prepared), "q": 0, "out": 0, "lse": 0}, ADDRESS)(77)
    assert not fake_device.launched


def test_unaligned_rows_still_need_whole_elements(fake_device: FakeDevice) -> None:
    shape = (2, 5, 4, 7)
    prepared = cuflash.prepare(shape, shape, shape, dtype="float64")
    assert prepared.plan.problem.alignment == "element"
    prepared.run({**_pointers(prepared), "q": ADDRESS + 8}, workspace=ADDRESS)
    with pytest.raises(VALUE, match="expected a multiple of 8"):
        prepared.run({**_pointers(prepared), "q": ADDRESS + 4}, workspace=ADDRESS)


def test_memory_of_nothing_has_no_address(fake_device: FakeDevice) -> None:
    prepared = cuflash.prepare(Q, (2, 0, 2, 8), (2, 0, 2, 8), dtype="float16")
    prepared.run({**_pointers(prepared), "k": 0, "v": 0}, workspace=ADDRESS)
    assert len(fake_device.launched) == 1


@pytest.mark.parametrize("fault", ["a last stride of 2", "an odd address", "odd strides"])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_what_needs_a_copy_is_refused(fake_device: FakeDevice, operation: str, fault: str) -> None:
    k = {
        "a last stride of 2": lambda: device_array((*KV[:3], 16))[..., ::2],
        "an odd address": lambda: device_array(KV, address=ADDRESS + 1),
        "odd strides": lambda: device_array((*KV[:3], 17), np.uint8)[..., :16].view(np.float16),
    }[fault]()
    with pytest.raises(VALUE, match=r"k: got strides or an address"):
        cuflash.prepare(device_array(Q), k, device_array(KV), operation=operation)


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_host_arrays_are_refused(fake_device: FakeDevice, operation: str) -> None:
    q, kv = np.ones(Q, np.float16), np.ones(KV, np.float16)
    with pytest.raises(TYPE, match="q: got an array in host memory"):
        cuflash.prepare(q, kv, kv, operation=operation)


def test_dout_has_the_storage_dtype(fake_device: FakeDevice) -> None:
    prepared = _prepare("backward", out_dtype="float32")
    dtypes = {name: spec.dtype for name, spec in prepared.tensors.items()}
    assert (dtypes["out"], dtypes["dout"], dtypes["dlse"]) == ("float32", "float16", "float32")


def test_a_run_is_on_the_stream_of_its_device(fake_device: FakeDevice) -> None:
    prepared = _prepare(device=1)
    prepared.run(_pointers(prepared), stream=77, workspace=ADDRESS)
    fake_device.streams[1] = 78
    prepared.run(_pointers(prepared), workspace=ADDRESS)
    assert fake_device.queued == [(1, 77), (1, 78)]
    assert fake_device.current == 0


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [
        (2, VALUE, "device: got 2; expected 0 to 1"),
        (-1, VALUE, "device: got -1"),
        (True, TYPE, "device: got True"),
        ("cuda:0", TYPE, "device: got 'cuda:0'"),
        (0.0, TYPE, "device: got 0.0"),
    ],
)
def test_the_device_is_checked(
    fake_device: FakeDevice, device: Any, error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        _prepare(device=device)


def test_the_device_is_that_of_the_arrays(fake_device: FakeDevice) -> None:
    with pytest.raises(VALUE, match="device: got 1; expected 0, where q is"):
        cuflash.prepare(device_array(Q), device_array(KV), device_array(KV), device=1)
    of_arrays = cuflash.prepare(device_array(Q), device_array(KV), device_array(KV))
    assert of_arrays.plan.backend == "cuda"


def test_operations_and_sizes_are_checked(fake_device: FakeDevice) -> None:
    for operation in ("sideways", ["forward"], None):
        with pytest.raises(VALUE, match="operation: got"):
            _prepare(operation)  # type: ignore[arg-type]
    with pytest.raises(VALUE, match=r"k: got .*non-negative integers"):
        cuflash.prepare(Q, (2, True, 2, 8), KV, dtype="float16")
    with pytest.raises(TYPE, match="dtype: got"):
        _prepare(dtype=np.zeros(2))


def test_unaligned_arrays_are_copied(fake_device: FakeDevice) -> None:
    arrays = {name: device_array(Q) for name in ("q", "k", "v")}
    arrays |= {"k": device_array(Q, address=ADDRESS + 1), "out": device_array(Q, address=1)}
    arrays["lse_out"] = device_array((2, 4, 5), np.float32, ADDRESS + 2)
    given = tuple((name, adopt(name, array).spec) for name, array in arrays.items())
    planned = plan_call("forward", given, Options(), 0)
    assert set(planned.copied) == {"k", "out", "lse"}
    assert all(planned.placed[name].offset == 0 for name in planned.copied)


@pytest.mark.parametrize("over", ["q", "out"])
def test_a_workspace_in_use_is_refused(fake_device: FakeDevice, over: str) -> None:
    arrays = {name: device_array(Q, address=ADDRESS) for name in ("q", "k", "v")}
    arrays["out"] = device_array(Q, address=ADDRESS * 3)
    given = tuple((name, adopt(name, array).spec) for name, array in arrays.items())
    others = {over: adopt(over, arrays[over])}
    planned = plan_call("forward", given, Options(), 0)
    start = arrays[over].data.ptr + 256
    free = device_array((1 << 19,), np.uint8, start + (1 << 18))
    _check_workspace(free, planned, others)
    with pytest.raises(VALUE, match=f"workspace: got memory that {over} uses"):
        _check_workspace(device_array((1 << 19,), np.uint8, start), planned, others)


def test_pointers_are_a_mapping(fake_device: FakeDevice) -> None:
    with pytest.raises(TYPE, match="a mapping of names to addresses"):
        _prepare().run([ADDRESS])


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_same_addresses_are_looked_at_once(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    prepared = _prepare(operation, algorithm="fa1")  # fa1 has a workspace
    looked: list[Any] = []
    check = Addresses._checked

    def look(self: Addresses, *given: Any) -> Any:
        looked.append(given)
        return check(self, *given)

    monkeypatch.setattr(Addresses, "_checked", look)
    pointers = _pointers(prepared)
    moved = {name: address + 256 for name, address in pointers.items()}
    turned = dict(reversed(pointers.items()))
    for given in (pointers, moved, pointers, moved, turned, {**moved}):
        prepared.run(given, workspace=ADDRESS * 50)
        last = {name: int(fake_device.launched[-1][name]["data"]) for name in "qkv"}
        assert last == {name: given[name] for name in "qkv"}
    assert [given for given, _ in looked] == [pointers, moved, turned]
    for workspace in (0, ADDRESS + 4):
        with pytest.raises(VALUE, match="workspace: got address"):
            prepared.run(pointers, workspace=workspace)


@pytest.mark.parametrize("address", [float(ADDRESS), None, [ADDRESS], str(ADDRESS)])
def test_what_only_looks_the_same_is_refused(fake_device: FakeDevice, address: Any) -> None:
    prepared = _prepare()
    pointers = {**_pointers(prepared), "k": ADDRESS}
    for _ in range(2):
        prepared.run(pointers, workspace=ADDRESS)
        with pytest.raises(TYPE, match="pointers: got k at"):
            prepared.run({**pointers, "k": address}, workspace=ADDRESS)
        with pytest.raises(TYPE, match="workspace: got"):
            prepared.run(pointers, workspace=address)
        with pytest.raises(VALUE, match="pointers: got k at -"):
            prepared.run({**pointers, "k": -ADDRESS}, workspace=ADDRESS)
    prepared.run({**pointers, "k": np.uint64(ADDRESS)}, workspace=ADDRESS)  # type: ignore[dict-item]
    prepared.run(MappingProxyType(pointers), workspace=ADDRESS)
    assert len(fake_device.launched) == 4


def test_so_many_addresses_are_kept_and_no_more(fake_device: FakeDevice) -> None:
    prepared = _prepare()
    for number in range(3 * addresses._KEPT):
        pointers = _pointers(prepared)
        prepared.run({**pointers, "q": ADDRESS + 256 * number}, workspace=ADDRESS)
        assert 0 < len(prepared._addresses._kept) <= addresses._KEPT
