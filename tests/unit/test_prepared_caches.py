"""Preparing calls with caches: arguments, refusals, and the needs of their runs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.caches.planned import TAKEN

from .fake_device import ADDRESS, FakeDevice, device_array, fake_device

__all__ = ["fake_device"]

Q, NEW, CACHE = (2, 3, 4, 16), (2, 3, 2, 16), (2, 32, 2, 16)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
_CACHES: dict[str, Any] = {"k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": "int32"}
_ROTATING = {"rotary_cos": (32, 8), "rotary_sin": (32, 8), "rotary_interleaved": True}


def _prepare(operation: str = "kvcache", **changed: Any) -> Any:
    given: dict[str, Any] = {"q": Q, "k": NEW, "v": NEW, **_CACHES, "dtype": "float16"}
    if operation == "append":
        del given["q"]
    return cuflash.prepare(operation=operation, **given | changed)  # type: ignore[arg-type]


def _pointers(prepared: Any) -> dict[str, int]:
    return {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}


@pytest.mark.parametrize(
    ("operation", "function", "others"),
    [
        ("append", cuflash.append_kv, {"backend"}),
        (
            "kvcache",
            cuflash.attention_with_kvcache,
            {"backend", "return_lse", "out", "lse_out"},
        ),
    ],
)
def test_the_arguments_are_those_of_the_call(operation: str, function: Any, others: Any) -> None:
    """The exceptions are the backend, and the arrays that a run takes by address."""
    expected = {*inspect.signature(function).parameters} - others
    assert {*TAKEN[operation]} == expected
    assert expected <= {*inspect.signature(cuflash.prepare).parameters}


@pytest.mark.parametrize(
    ("operation", "changed", "error", "says"),
    [
        ("append", {"q": Q}, VALUE, "q: .*nothing: operation='append' has none"),
        ("append", {"causal": True}, VALUE, "causal: got True; expected nothing"),
        ("append", {"algorithm": "fa2"}, VALUE, "algorithm: got 'fa2'"),
        ("append", {"cache_leftpad": "int32"}, VALUE, "cache_leftpad: got 'int32'"),
        ("append", {"scale": 0.5}, VALUE, r"scale: got 0\.5"),
        ("append", {"k": None, "v": None}, TYPE, "k: got None; expected an array"),
        ("kvcache", {"q": None}, TYPE, "q: got None"),
        ("kvcache", {"bias": (1,)}, VALUE, r"bias: got \(1,\); expected nothing"),
        ("kvcache", {"layout": "bshd"}, VALUE, "layout: got 'bshd'"),
        ("kvcache", {"wrt": ("q",)}, VALUE, "wrt: "),
        ("kvcache", {"deterministic": True}, VALUE, "deterministic: got True"),
        ("kvcache", {"seqused_kv": "int32"}, VALUE, "seqused_kv: "),
        ("kvcache", {"k": None}, VALUE, "k: got None beside v"),
        ("kvcache", {"k_cache": None}, TYPE, "k_cache: got None"),
        ("kvcache", {"cache_seqlens": None}, TYPE, "cache_seqlens: got None; .*on the device"),
        ("kvcache", {"cache_seqlens": 5}, TYPE, "cache_seqlens: got 5; .*on the device"),
        ("kvcache", {"cache_seqlens": "int64"}, TYPE, "cache_seqlens: got dtype int64"),
        ("kvcache", {"cache_seqlens": (3,)}, VALUE, r"cache_seqlens: got shape \(3,\)"),
        ("kvcache", {"rotary_interleaved": True}, VALUE, "rotary_interleaved: got True"),
        ("kvcache", {**_ROTATING, "rotary_cos": "float32"}, VALUE, "rotary_cos: .*alone"),
        ("kvcache", {**_ROTATING, "rotary_sin": (31, 8)}, VALUE, "rotary_sin: got shape"),
        ("kvcache", {"v_cache": (2, 31, 2, 16)}, VALUE, "v_cache: got shape"),
        ("kvcache", {"blocks": (7, 7)}, VALUE, "blocks: "),
        ("kvcache", {"window_size": (-1, 0)}, VALUE, "window_size: "),
        ("kvcache", {"page_table": (3, 1)}, VALUE, r"page_table: got shape \(3, 1\)"),
        ("kvcache", {"cache_leftpad": "int64"}, TYPE, "cache_leftpad: got dtype int64"),
        ("kvcache", {"alibi_slopes": (3,)}, VALUE, "alibi_slopes: got shape"),
        ("kvcache", {"k_cache": np.zeros(CACHE, np.float16)}, TYPE, "k_cache: .*host memory"),
        ("kvcache", {"device": 2}, VALUE, "device: got 2"),
        ("kvcache", {"dtype": None}, TYPE, "dtype: got None"),
        ("forward", {}, VALUE, "k_cache: .*nothing: operation='forward' has none"),
        ("cache", {}, VALUE, "operation: got 'cache'; expected one of 'forward'"),
    ],
)
def test_what_is_refused(
    fake_device: FakeDevice, operation: str, changed: Any, error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        _prepare(operation, **changed)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_needs_a_copy_is_refused(fake_device: FakeDevice, name: str) -> None:
    shape = Q if name == "q" else NEW
    gaps = device_array((*shape[:3], 32))[..., ::2]
    with pytest.raises(VALUE, match=f"^{name}: got strides or an address"):
        _prepare(**{name: gaps})


def test_a_workspace_holds_what_the_append_leaves(fake_device: FakeDevice) -> None:
    """After attention's own workspace it has the lengths, and the queries if they are rotated."""
    split: dict[str, Any] = {"algorithm": "fa2", "kv_chunk": 16}
    plain = _prepare(k=None, v=None, **split)
    appending, rotating = _prepare(**split), _prepare(**split, **_ROTATING)
    assert plain.workspace_bytes > 0
    of_attention = -(-plain.workspace_bytes // 256) * 256
    assert appending.workspace_bytes == of_attention + 2 * 4
    assert rotating.workspace_bytes == of_attention + 256 + 2 * int(np.prod(Q))
    assert _prepare("append").workspace_bytes == 0
    assert _prepare("append").plan != plain.plan


def test_addresses_go_where_they_belong(fake_device: FakeDevice) -> None:
    """The append reads the caller's queries; attention reads the rotated ones in the workspace."""
    prepared = _prepare(**_ROTATING, overflow="int32", algorithm="fa2")
    pointers = _pointers(prepared)
    place = ADDRESS * 100
    prepared.run(pointers, stream=7, workspace=place)
    append, forward = fake_device.launched[0], fake_device.launched[1]
    assert {stream for _, stream in fake_device.queued} == {7}
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        assert int(append[name]["data"]) == pointers[name]
    for name in ("cache_seqlens", "rotary_cos", "rotary_sin", "overflow"):
        assert int(append[name]) == pointers[name]
    left = int(append["lengths_after"]), int(append["q_rotated"]["data"])
    assert place <= left[0] < left[1] < place + prepared.workspace_bytes
    assert int(forward["q"]["data"]) == left[1]
    assert int(forward["k"]["data"]) == pointers["k_cache"]
    assert int(forward["out"]["data"]) == pointers["out"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k_cache": ADDRESS + 8}, "k_cache at 0x100008; expected a multiple of 16"),
        ({"k": ADDRESS + 1}, "k at 0x100001; expected a multiple of 2"),
        ({"cache_seqlens": ADDRESS + 2}, "cache_seqlens at 0x100002; expected a multiple of 4"),
        ({"overflow": ADDRESS}, "'overflow'; expected cache_seqlens, k"),
        ({"out": 0}, "out at 0"),
    ],
)
def test_addresses_that_were_not_planned_are_refused(
    fake_device: FakeDevice, change: Any, says: str
) -> None:
    prepared = _prepare()
    pointers = _pointers(prepared)
    without = {name: pointers[name] for name in pointers if name != "lse"}
    prepared.run(without, workspace=ADDRESS)  # only lse may be left out
    assert len(fake_device.launched) >= 2
    fake_device.launched.clear()
    with pytest.raises(VALUE) as caught:
        prepared.run({**pointers, **change}, workspace=ADDRESS)
    assert says in str(caught.value)
    with pytest.raises(VALUE, match="pointers: got no cache_seqlens"):
        prepared.run({n: p for n, p in pointers.items() if n != "cache_seqlens"}, workspace=ADDRESS)
    with pytest.raises(VALUE, match="workspace: got address 0x0"):
        prepared.run(pointers)
    assert not fake_device.launched


@pytest.mark.parametrize("operation", ["append", "kvcache"])
def test_it_runs_on_the_device_that_is_named(fake_device: FakeDevice, operation: str) -> None:
    prepared = _prepare(operation, device=1)
    assert {spec.device for spec in prepared.tensors.values()} == {1}
    fake_device.streams[1] = 7
    prepared.run(_pointers(prepared), workspace=ADDRESS)
    assert {*fake_device.queued} == {(1, 7)}
    with pytest.raises(VALUE, match=r"^device: got 1; expected 0, where k is"):
        _prepare(operation, k=device_array(NEW), device=1)


def test_without_entries_nothing_runs(fake_device: FakeDevice) -> None:
    none: dict[str, Any] = dict.fromkeys(("k", "v"), (0, *NEW[1:]))
    caches = dict.fromkeys(("k_cache", "v_cache"), (0, *CACHE[1:]))
    for prepared in (
        _prepare("append", **none, **caches),
        _prepare(q=(0, *Q[1:]), **none, **caches),
    ):
        prepared.run(_pointers(prepared), workspace=ADDRESS)
    assert not fake_device.launched
