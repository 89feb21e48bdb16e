"""Explaining calls with caches: the arguments, what is refused, and what is told."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.cuda import launch

from .fake_device import FakeDevice, device_array, fake_device

__all__ = ["fake_device"]

Q, NEW, CACHE = (2, 3, 4, 16), (2, 3, 2, 16), (2, 32, 2, 16)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
_CACHES: dict[str, Any] = {"k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": "int32"}
_ROTATING = {"rotary_cos": (32, 8), "rotary_sin": (32, 8), "rotary_interleaved": True}
_PAGED = {**dict.fromkeys(("k_cache", "v_cache"), (9, 8, 2, 16)), "page_table": (2, 4)}
_FLOAT8 = {"cache_dtype": "float8_e4m3fn", "k_scale": 2.0, "v_scale": "float32"}
_PACKED = {"q": (9, 4, 16), "k": (9, 2, 16), "v": (9, 2, 16), "cu_seqlens_q": (3,)}


def _given(operation: str, **changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"q": Q, "k": NEW, "v": NEW, **_CACHES, "dtype": "float16"}
    if operation == "append":
        del given["q"]
    return {"operation": operation, **given, **changed}


def _explain(operation: str = "kvcache", **changed: Any) -> cuflash.Explanation:
    return cuflash.explain(**_given(operation, **changed))


def test_the_arguments_are_those_of_prepare() -> None:
    explain, prepare = (
        dict(inspect.signature(f).parameters) for f in (cuflash.explain, cuflash.prepare)
    )
    assert {*explain} - {*prepare} == {"backend", "compile"}
    assert {*prepare} - {*explain} == {"device"}
    for name in {*explain} & {*prepare}:
        assert explain[name].default == prepare[name].default, name
        assert explain[name].kind == prepare[name].kind, name


@pytest.mark.parametrize(
    ("operation", "changed"),
    [
        ("kvcache", {}),
        ("kvcache", {"k": None, "v": None}),
        ("kvcache", {"causal": True, "algorithm": "fa3", "scale": 0.5}),
        ("kvcache", {"algorithm": "fa2", "kv_chunk": 16, **_ROTATING}),
        ("kvcache", {"algorithm": "fa2", "blocks": (64, 64), "window_size": (4, 0)}),
        ("kvcache", {"softcap": 8.0, "alibi_slopes": (4,), "sinks": "float16"}),
        ("kvcache", {**_PAGED, "cache_leftpad": "int32", "overflow": "int32"}),
        ("kvcache", {"cache_batch_idx": "int32", "k_cache": (5, 32, 2, 16),
                     "v_cache": (5, 32, 2, 16)}),
        ("kvcache", {**_FLOAT8, "v_scale": (1,)}),
        ("kvcache", {**_PACKED, "max_seqlen_q": 6}),
        ("append", {}),
        ("append", {**_ROTATING, **_PAGED, "rotary_seqlens": "int32"}),
    ],
)  # fmt: skip
def test_it_tells_what_prepare_plans(
    fake_device: FakeDevice, operation: str, changed: dict[str, Any]
) -> None:
    given = _given(operation, **changed)
    said, ready = cuflash.explain(**given), cuflash.prepare(**given)
    assert said.problem == ready.plan.problem
    assert said.workspace_bytes == ready.workspace_bytes
    assert (said.block_q, said.block_kv) == (ready.plan.tile.block_q, ready.plan.tile.block_kv)
    assert (said.reason, said.not_taken) == (ready.plan.reason, ready.plan.rejected)
    assert (said.backend, said.copies) == ("cuda", ())
    launches = [one for step in ready._launcher.steps for one in step.launcher.launches]
    assert [kernel.name.rpartition("/")[2] for kernel in said.kernels] == [n.name for n in launches]
    assert [kernel.grid for kernel in said.kernels] == [one.shape[0] for one in launches]


@pytest.mark.parametrize(
    ("operation", "changed", "error", "says"),
    [
        ("append", {"q": Q}, VALUE, "q: .*nothing: operation='append' has none"),
        ("append", {"causal": True}, VALUE, "causal: got True; expected nothing"),
        ("append", {"scale": 0.5}, VALUE, r"scale: got 0\.5"),
        ("append", {"k": None, "v": None}, TYPE, "k: got None; expected an array"),
        ("append", {"k": ()}, VALUE, r"k: got shape \(\); expected \(batch, rows, heads"),
        ("kvcache", {"q": ()}, VALUE, r"q: got shape \(\); expected \(batch, rows, heads"),
        ("kvcache", {"q": None}, TYPE, "q: got None"),
        ("kvcache", {"bias": (1,)}, VALUE, r"bias: got \(1,\); expected nothing"),
        ("kvcache", {"layout": "bshd"}, VALUE, "layout: got 'bshd'"),
        ("kvcache", {"dropout_p": 0.5}, VALUE, r"dropout_p: got 0\.5"),
        ("kvcache", {"q_offset": 3}, VALUE, "q_offset: got 3"),
        ("kvcache", {"k": None}, VALUE, "k: got None beside v"),
        ("kvcache", {"k_cache": None}, TYPE, "k_cache: got None"),
        ("kvcache", {"cache_seqlens": None}, TYPE, "cache_seqlens: got None"),
        ("kvcache", {"cache_seqlens": 2.5}, TYPE, r"cache_seqlens: got 2\.5"),
        ("kvcache", {"cache_seqlens": True}, TYPE, "cache_seqlens: got True"),
        ("kvcache", {"cache_seqlens": 33}, VALUE, "cache_seqlens: got 33; expected 0 to 32"),
        ("kvcache", {"cache_seqlens": 30}, VALUE, "k: got 3 new tokens behind 30"),
        ("kvcache", {"cache_seqlens": "int64"}, TYPE, "cache_seqlens: got dtype int64"),
        ("kvcache", {"page_table": (3, 1)}, VALUE, r"page_table: got shape \(3, 1\)"),
        ("kvcache", {"cache_batch_idx": (3,)}, VALUE, r"cache_batch_idx: got shape \(3,\)"),
        ("kvcache", {"cache_leftpad": "int64"}, TYPE, "cache_leftpad: got dtype int64"),
        ("kvcache", {"overflow": "int64"}, TYPE, "overflow: got dtype int64"),
        ("kvcache", {"rotary_interleaved": True}, VALUE, "rotary_interleaved: got True"),
        ("kvcache", {**_ROTATING, "rotary_cos": (31, 8)}, VALUE, "rotary_"),
        ("kvcache", {**_ROTATING, "rotary_sin": (31, 8)}, VALUE, "rotary_sin: got shape"),
        ("kvcache", {"rotary_seqlens": "int32"}, VALUE, "rotary_seqlens: "),
        ("kvcache", {"k_scale": 2.0}, VALUE, r"k_scale: got 2\.0"),
        ("kvcache", {**_FLOAT8, "v_scale": None}, TYPE, "v_scale: got None"),
        ("kvcache", {"max_seqlen_q": 3}, VALUE, "max_seqlen_q: got 3"),
        ("kvcache", _PACKED, TYPE, "max_seqlen_q: got None"),
        ("kvcache", {"k_cache": np.zeros(CACHE, np.float16)}, TYPE, "k_cache: .*host memory"),
        ("kvcache", {"compile": 1}, TYPE, "compile: got 1"),
        ("kvcache", {"dtype": None}, TYPE, "dtype: got None"),
        ("forward", {}, VALUE, "k_cache: .*nothing: operation='forward' has none"),
        ("backward", {}, VALUE, "k_cache: .*nothing: operation='backward' has none"),
        ("cache", {}, VALUE, "operation: got 'cache'; expected one of 'forward'"),
    ],
)  # fmt: skip
def test_what_is_refused(
    fake_device: FakeDevice, operation: str, changed: Any, error: Any, says: str
) -> None:
    with pytest.raises(error, match=f"^{says}"):
        _explain(operation, **changed)


def test_a_length_for_all_stands_for_an_array_of_it(fake_device: FakeDevice) -> None:
    assert _explain(cache_seqlens=29) == _explain()
    assert _explain(cache_seqlens=np.int64(30), overflow="int32") == _explain(overflow="int32")


def test_nothing_compiles_unless_asked(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> Any:
        raise cuflash.ToolchainError("no compiler")

    said = _explain(compile=True)
    assert [kernel.registers for kernel in said.kernels] == [32] * len(said.kernels)
    assert [kernel.local_bytes for kernel in said.kernels] == [0] * len(said.kernels)
    (append,) = _explain("append", compile=True).kernels
    assert append.registers == 32
    cuflash.calls.forget()
    monkeypatch.setattr(launch, "compile_kernels", refuse)
    assert [kernel.name for kernel in _explain().kernels] == [k.name for k in said.kernels]
    assert all(kernel.registers is None for kernel in _explain().kernels)
    _explain("append")
    for operation in ("kvcache", "append"):
        with pytest.raises(cuflash.ToolchainError, match="no compiler"):
            _explain(operation, compile=True)
    assert not fake_device.launched


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("rotating", [{}, _ROTATING], ids=["plain", "rotating"])
def test_copies_are_named(fake_device: FakeDevice, name: str, rotating: Any) -> None:
    shape = Q if name == "q" else NEW
    gaps = device_array((*shape[:3], 32))[..., ::2]
    said = _explain(**{name: gaps}, **rotating)
    assert said.copies == (name,)
    assert said.kernels == _explain(**rotating).kernels


def test_a_copied_cache_without_slots_has_its_own_name(fake_device: FakeDevice) -> None:
    gaps = device_array((2, 0, 2, 32))[..., ::2]
    others: dict[str, Any] = {"v_cache": (2, 0, 2, 16), "k": None, "v": None}
    assert _explain(k_cache=gaps, **others).copies == ("k_cache",)
    with pytest.raises(VALUE, match=r"^k_cache: got strides or an address"):
        cuflash.prepare(**_given("kvcache", k_cache=gaps, **others))


@pytest.mark.parametrize("operation", ["kvcache", "append"])
def test_numpy_is_refused(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    says = f"operation='{operation}' is not explained for NumPy"
    with pytest.raises(cuflash.UnsupportedError, match=says):
        _explain(operation, backend="numpy")
    assert _explain(operation, backend="cuda").backend == "cuda"
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    with pytest.raises(cuflash.UnsupportedError, match=says):
        _explain(operation)


def test_without_a_device_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_BACKEND", raising=False)
    monkeypatch.setattr(cuflash.cuda.available, "_why_not", lambda: "there is no CUDA device")
    says = "operation='append' is explained, cannot be used: there is no CUDA device"
    with pytest.raises(cuflash.BackendUnavailableError, match=says):
        _explain("append")


def test_an_append_prints_no_algorithm(fake_device: FakeDevice) -> None:
    lines = str(_explain("append")).splitlines()
    assert lines[0] == "problem      append float16 batch 2 heads 2 tokens 3 head_dim 16/16"
    assert lines[1].startswith("runs         cuda (")
    assert lines[2] == "tile         a warp for each row"
    assert lines[3].startswith("kernel       steps/append_kv (sm_90): ")
    both = str(_explain(algorithm="fa2")).splitlines()
    assert both[1].startswith("runs         fa2 on cuda (")
    assert " queries x " in both[2]
    assert both[3] == lines[3]


def test_without_entries_no_kernel_is_told(fake_device: FakeDevice) -> None:
    none: dict[str, Any] = dict.fromkeys(("k", "v"), (0, *NEW[1:]))
    none |= dict.fromkeys(("k_cache", "v_cache"), (0, *CACHE[1:]))
    assert _explain(q=(0, *Q[1:]), **none).kernels == ()
    assert _explain("append", **none).kernels == ()
    assert [kernel.name for kernel in _explain(q=(2, 0, 4, 16)).kernels] == ["steps/append_kv"]
