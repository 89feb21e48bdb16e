"""A bias and a mask on the CUDA side of ``cuflash.jax``, on a fake device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .fake_device import FakeDevice, fake_device
from .jax_case import draw, jax, jnp

__all__ = ["fake_device"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention
from cuflash.jax import device as on_device  # noqa: E402
from cuflash.jax.call import Call  # noqa: E402
from cuflash.options import Options  # noqa: E402

Q, KV, ROWS = (2, 5, 4, 8), (2, 9, 2, 8), (2, 4, 5)


@pytest.fixture(autouse=True)
def one_device(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(on_device, "_devices", lambda: [0])
    monkeypatch.setattr(on_device, "_place_of", lambda buffer: (buffer.address, 0))
    monkeypatch.setenv("CUFLASH_JAX_NATIVE", "0")
    return fake_device


def _buffer(shape: tuple[int, ...], dtype: Any, address: int) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype, address=address)


#: The sizes of a bias along the two mapped axes and the batch, where q has (3, 2, 2); the
#: parameters ``entries`` and ``own_entries`` of the bias; the number of entries of its gradient.
PATTERNS = [
    ((3, 2, 2), (1, 12), 12),
    ((1, 1, 1), (1, 1), 6),
    ((3, 1, 1), (4, 3), 6),
    ((1, 2, 1), (2, 2), 6),
    ((1, 2, 2), (1, 4), 12),
    ((1, 1, 2), (1, 2), 12),
]


@pytest.mark.parametrize(("own", "numbers", "of_gradient"), PATTERNS, ids=str)
def test_entries_reach_the_kernels(
    fake_device: FakeDevice, own: tuple[int, ...], numbers: tuple[int, int], of_gradient: int
) -> None:
    """Kernels read the bias in XLA's buffer, and every mapped entry has its own gradient."""
    mapped, kind = (3, 2), (4, 1, 9)
    shapes = {"q": Q, "k": KV, "v": KV, "dout": Q, "out": Q, "lse": ROWS}
    shapes = {name: (*mapped, *shape) for name, shape in shapes.items()} | {"bias": (*own, *kind)}
    for operation in ("forward", "backward"):
        names = ["q", "k", "v", "bias", *(["dout", "out", "lse"] if operation[0] == "b" else [])]
        options = Options(layout="bshd", q_offset=0, algorithm="fa2", wrt=("bias", "q"))
        call = Call(operation, options).taking(names)
        arrays = [
            jax.ShapeDtypeStruct(shapes[n], np.float32 if n == "lse" else np.float16) for n in names
        ]
        prepared = on_device.prepare_device(call, arrays)
        results = call.results_of(arrays)
        if prepared.scratch_bytes:
            results.append(((prepared.scratch_bytes,), "uint8"))
        every = [*results, *((a.shape, a.dtype) for a in arrays)]
        buffers = [_buffer(*one, (i + 1) << 20) for i, one in enumerate(every)]
        fake_device.launched.clear()
        prepared(SimpleNamespace(stream=7), buffers[: len(results)], *buffers[len(results) :])
        place = (len(results) + names.index("bias") + 1) << 20
        blocks = [w["bias"] for w in fake_device.launched if "own_entries" in _fields(w, "bias")]
        assert blocks
        assert {int(block["bias"]) for block in blocks} == {place}
        assert {(int(b["entries"]), int(b["own_entries"])) for b in blocks} == {numbers}
    assert results[0][0] == (*mapped, own[-1], *kind)
    assert prepared.prepared[0].tensors["dbias"].shape == (of_gradient, *kind)
    assert {int(w["bias_batch"]) for w in fake_device.launched if "bias_batch" in _fields(w)} == {
        of_gradient
    }


def _fields(words: Any, name: str = "") -> tuple[str, ...]:
    """The names of the parameters of a kernel, or of the fields of one parameter."""
    names = words.dtype.names or ()
    if not name:
        return tuple(names)
    return tuple(words.dtype[name].names or ()) if name in names else ()


def test_a_bias_is_lowered_as_it_is() -> None:
    """The lowered bias is not repeated: an axis that vmap does not map has size 1."""
    q, k, v, bias = draw((3, *Q), (3, *KV), (3, *KV), (5, 9), dtype="float16")

    def loss(*arrays: Any) -> Any:
        return jax.vmap(attention, (0, 0, 0, None))(*arrays).sum()

    traced = jax.jit(jax.grad(loss, 3)).trace(q, k, v, bias)
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    calls = [line for line in text.splitlines() if "_gpu_callback_cmd_buffer(" in line]
    assert len(calls) == 2
    assert all("tensor<1x1x1x5x9xf16>" in line for line in calls)
    assert "-> (tensor<3x1x1x5x9xf16>" in calls[1] or "-> tensor<3x1x1x5x9xf16>" in calls[1]


def test_a_mask_is_lowered_as_it_is() -> None:
    """Both passes take the booleans, with an axis of size 1 if vmap does not map the mask."""
    q, k, v = draw((3, *Q), (3, *KV), (3, *KV), dtype="float16")
    mask = jnp.ones((5, 9), bool)

    def loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
        each = jax.vmap(lambda *a: attention(*a[:3], mask=a[3]), (0, 0, 0, None))
        return each(q, k, v, mask).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v, mask)
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    calls = [line for line in text.splitlines() if "_gpu_callback_cmd_buffer(" in line]
    assert len(calls) == 2
    assert all("tensor<1x1x1x5x9xi1>" in line for line in calls)


@pytest.mark.parametrize(("own", "numbers"), [case[:2] for case in PATTERNS], ids=str)
def test_entries_of_a_mask_reach_the_kernels(
    fake_device: FakeDevice, own: tuple[int, ...], numbers: tuple[int, int]
) -> None:
    shapes = [(3, 2, *Q), (3, 2, *KV), (3, 2, *KV), (*own, 4, 1, 9)]
    kinds = [np.float16] * 3 + [np.bool_]
    call = Call("forward", Options(layout="bshd", q_offset=0, algorithm="fa2"))
    call = call.taking(("q", "k", "v", "mask"))
    arrays = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, kinds, strict=True)]
    prepared = on_device.prepare_device(call, arrays)
    every = [*call.results_of(arrays), *((a.shape, a.dtype) for a in arrays)]
    buffers = [_buffer(*one, (i + 1) << 20) for i, one in enumerate(every)]
    prepared(SimpleNamespace(stream=7), buffers[:2], *buffers[2:])
    (block,) = [words["mask"] for words in fake_device.launched]
    assert int(block["mask"]) == len(every) << 20
    assert (int(block["entries"]), int(block["own_entries"])) == numbers


def test_nothing_is_called_for_a_bias_of_no_entries() -> None:
    q, kv = (3, 0, 5, 4, 8), (3, 0, 9, 2, 8)
    arrays = draw(q, kv, kv, (5, 9), dtype="float16")
    each = jax.vmap(jax.grad(lambda *a: attention(*a).sum(), 3), (0, 0, 0, None))
    traced = jax.jit(each).trace(*arrays)
    assert "custom_call" not in str(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert jnp.shape(each(*arrays)) == (3, 5, 9)
