"""The CUDA side of ``cuflash.jax.attention_with_kvcache``, on a fake device."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

import cuflash

from .fake_device import FakeDevice, fake_device
from .jax_case import draw, jax, jnp

__all__ = ["fake_device"]

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
from cuflash.jax import attention_with_kvcache
from cuflash.jax import device as on_device
from cuflash.jax.cached import CachedCall
from cuflash.options import check_options

Q, NEW, CACHE, TABLE = (2, 3, 4, 16), (2, 3, 2, 16), (2, 32, 2, 16), (40, 5)
SHAPES: dict[str, Any] = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": (2,)}
APPENDED = {"k": NEW, "v": NEW, "rotary_cos": TABLE, "rotary_sin": TABLE}
KINDS = {"cache_seqlens": "int32", "rotary_cos": "float32", "rotary_sin": "float32"}
FLOAT8 = {"k_cache": "float8_e4m3fn", "v_cache": "float8_e4m3fn", "k_scale": "float32"}
STREAM = 77


@pytest.fixture(autouse=True)
def two_devices(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """JAX has the two devices of the fake, and XLA calls back into Python."""
    monkeypatch.setattr(on_device, "_devices", lambda: [0, 1])
    monkeypatch.setattr(on_device, "_place_of", lambda place: place.place)
    monkeypatch.setenv("CUFLASH_JAX_NATIVE", "0")
    return fake_device


def _prepared(appends: bool, algorithm: str, float8: bool) -> Any:
    shapes, kinds = SHAPES | (APPENDED if appends else {}), KINDS
    if float8:  # k_scale is an array, v_scale is a number
        shapes, kinds = {**shapes, "k_scale": (2, 2)}, {**KINDS, **FLOAT8}
    options = check_options(causal=True, algorithm=algorithm)
    scales = (("v_number", 0.75),) if float8 else None
    call = CachedCall(options, False if appends else None, tuple(shapes), scales)
    arrays = [jax.ShapeDtypeStruct(s, kinds.get(name, "float16")) for name, s in shapes.items()]
    return on_device.prepare_device(call, arrays), shapes


def _buffer(address: int, device: int) -> Any:
    """Replaces a buffer of XLA that has elements."""
    return SimpleNamespace(shape=(1,), place=(address, device))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3", "float8"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("appends", [False, True])
def test_a_callback_is_a_prepared_call(
    fake_device: FakeDevice, appends: bool, device: int, algorithm: str
) -> None:
    """The callback launches what a prepared call launches, on XLA's stream and XLA's buffers."""
    float8 = algorithm == "float8"
    algorithm = "fa3" if float8 else algorithm
    made, shapes = _prepared(appends, algorithm, float8)
    names = [*shapes, *made.call.results, *(["workspace"] if made.scratch_bytes else [])]
    at = {name: (i + 1) << 20 for i, name in enumerate(shapes)}
    results = {name: (i + 1) << 30 for i, name in enumerate(names[len(shapes) :])}
    context = SimpleNamespace(stream=STREAM)
    made(
        context,
        [_buffer(address, device) for address in results.values()],
        *[_buffer(address, device) for address in at.values()],
    )
    count = len(fake_device.launched)
    assert fake_device.queued == [(device, STREAM)] * count
    assert count == 1 + appends
    keywords: dict[str, Any] = {"rotary_interleaved": False} if appends else {}
    given = {n: s for n, s in shapes.items() if n != "cache_seqlens"}
    given |= {"cache_seqlens": "int32", "overflow": "int32" if appends else None}
    keywords |= {"v_scale": 0.75, "cache_dtype": "float8_e4m3fn"} if float8 else {}
    ready = cuflash.prepare(
        operation="kvcache", **given, **keywords, dtype="float16", causal=True,
        algorithm=algorithm, device=device,
    )  # fmt: skip
    workspace = results.pop("workspace", 0)
    assert made.scratch_bytes == (ready.workspace_bytes + 256 if ready.workspace_bytes else 0)
    ready.run(at | results, STREAM, workspace)
    first, again = fake_device.launched[:count], fake_device.launched[count:]
    assert [a.tobytes() for a in first] == [b.tobytes() for b in again]


def test_a_computation_for_cuda_writes_its_caches_in_place() -> None:
    q, k, v, k_cache, v_cache = draw(Q, NEW, NEW, CACHE, CACHE, dtype="float16")
    step = jax.jit(lambda *a: attention_with_kvcache(*a, cache_seqlens=3))
    text = str(step.trace(q, k_cache, v_cache, k, v).lower(lowering_platforms=("cuda",)).as_text())
    (called,) = re.findall(r"custom_call @(xla_buffer_\w+)\(.*", text)
    assert called == "xla_buffer_python_gpu_callback_cmd_buffer"
    aliases = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert aliases == [("2", "1"), ("3", "2")]


def test_what_the_device_refuses_is_said_when_lowering() -> None:
    q, cache = draw(Q, CACHE, dtype="float16")
    table = jnp.zeros((2, 1), "int32")
    given: dict[str, Any] = {"cache_seqlens": 3, "page_table": table, "algorithm": "fa1"}
    step = jax.jit(lambda q, cache: attention_with_kvcache(q, cache, cache, **given))
    with pytest.raises(cuflash.UnsupportedError, match=r"^fa1 does not take page_table"):
        step.trace(q, cache).lower(lowering_platforms=("cuda",))


def test_other_kernels_refuse_float8_caches_when_lowering() -> None:
    q, cache = draw(Q, CACHE, dtype="float16")
    given: dict[str, Any] = {"cache_seqlens": 3, "k_scale": jnp.ones(()), "v_scale": 2}
    step = jax.jit(
        lambda q, cache: attention_with_kvcache(q, cache, cache, **given, algorithm="fa1")
    )
    says = r"^fa1 does not read float8 caches \(k_scale and v_scale\)"
    with pytest.raises(cuflash.UnsupportedError, match=says):
        step.trace(q, cache.astype("float8_e4m3fn")).lower(lowering_platforms=("cuda",))


def test_a_computation_for_cuda_is_given_float8_caches_as_they_are() -> None:
    """The caches are not converted to bytes, because XLA would copy them for that."""
    q, k, v, *caches = draw(Q, NEW, NEW, CACHE, CACHE, dtype="float16")
    given: dict[str, Any] = {"cache_seqlens": 3, "k_scale": 1.5, "v_scale": 2}
    step = jax.jit(lambda *a: attention_with_kvcache(*a, **given))
    stored = [cache.astype("float8_e4m3fn") for cache in caches]
    text = str(step.trace(q, *stored, k, v).lower(lowering_platforms=("cuda",)).as_text())
    assert "bitcast" not in text
    assert "stablehlo.convert" not in text
    aliases = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert aliases == [("2", "1"), ("3", "2")]
