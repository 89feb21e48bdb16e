"""``block_mask`` in traced, mapped and differentiated calls, compared with a mask of pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import BlockMask

from .fake_device import FakeDevice, fake_device
from .jax_case import jax, jnp

__all__ = ["fake_device"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention
from cuflash.jax import device as on_device  # noqa: E402
from cuflash.jax.call import Call  # noqa: E402
from cuflash.options import Options  # noqa: E402

_LENGTHS, _BLOCK = (150, 200), (64, 64)


def _arrays() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(6)
    shapes = ((2, 150, 4, 8), (2, 200, 2, 8), (2, 200, 2, 8))
    q, k, v = (jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes)
    return q, k, v


def _blocks(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(7).random((*shape, 3, 4)) < 0.5)


def _pairs(blocks: Any) -> Any:
    whole = jnp.repeat(jnp.repeat(blocks, 64, -2), 64, -1)
    return whole[..., : _LENGTHS[0], : _LENGTHS[1]]


def _total(q: Any, k: Any, v: Any, **hidden: Any) -> Any:
    return (attention(q, k, v, is_causal=True, q_offset=None, **hidden) ** 2).sum()


def _by_blocks(q: Any, k: Any, v: Any, mask: BlockMask) -> Any:
    return _total(q, k, v, block_mask=mask)


def test_it_is_a_pytree_of_its_blocks() -> None:
    mask = BlockMask(_blocks(), _BLOCK)
    (leaf,) = jax.tree.leaves(mask)
    assert leaf is mask.blocks
    assert jax.tree.map(lambda x: ~x, mask).block == _BLOCK


@pytest.mark.parametrize("shape", [(), (4,), (2, 1), (2, 4)], ids=str)
def test_values_and_gradients_are_those_of_the_same_pairs(shape: tuple[int, ...]) -> None:
    q, k, v = _arrays()
    mask = BlockMask(_blocks(*shape), _BLOCK)
    found = jax.jit(jax.value_and_grad(_by_blocks, (0, 1, 2)))(q, k, v, mask)
    expected = jax.value_and_grad(lambda *a: _total(*a, mask=_pairs(mask.blocks)), (0, 1, 2))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected(q, k, v)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
def test_under_vmap(mapped: tuple[Any, Any]) -> None:
    """The queries are mapped, or the mask, or both."""
    q, k, v = _arrays()
    qs = jnp.stack([q, -q, 2 * q]) if mapped[0] == 0 else q
    blocks = _blocks(*(3,) * (mapped[1] == 0), 2, 1)
    gradient = jax.grad(_by_blocks)
    found = jax.vmap(gradient, (mapped[0], None, None, mapped[1]))(
        qs, k, v, BlockMask(blocks, _BLOCK)
    )
    for i, one in enumerate(found):
        own = BlockMask(blocks[i] if mapped[1] == 0 else blocks, _BLOCK)
        expected = gradient(qs[i] if mapped[0] == 0 else qs, k, v, own)
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def one_device(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(on_device, "_devices", lambda: [0])
    monkeypatch.setattr(on_device, "_place_of", lambda buffer: (buffer.address, 0))
    monkeypatch.setenv("CUFLASH_JAX_NATIVE", "0")
    return fake_device


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_blocks_are_lowered_as_they_are_for_cuda(one_device: FakeDevice, dtype: Any) -> None:
    """Both passes take the blocks unconverted, with an axis of 1 if vmap does not map them."""
    q, k, v = (jnp.stack([x.astype(np.float16)] * 3) for x in _arrays())
    mask = BlockMask(_blocks().astype(dtype), _BLOCK)

    def loss(q: Any, k: Any, v: Any, mask: BlockMask) -> Any:
        each = jax.vmap(lambda *a: attention(*a[:3], block_mask=a[3]), (0, 0, 0, None))
        return each(q, k, v, mask).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v, mask)
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    calls = [line for line in text.splitlines() if "_gpu_callback_cmd_buffer(" in line]
    assert len(calls) == 2
    kind = "i1" if dtype is bool else "ui8"
    assert all(f"tensor<1x1x1x3x4x{kind}>" in line for line in calls)


def test_entries_of_the_blocks_reach_the_kernels(one_device: FakeDevice) -> None:
    """Each of three mapped calls has its own blocks, which the two entries of its batch share."""
    shapes = [(3, 2, 150, 4, 8), (3, 2, 200, 2, 8), (3, 2, 200, 2, 8), (3, 1, 4, 3, 4)]
    kinds = [np.float16] * 3 + [np.bool_]
    options = Options(layout="bshd", algorithm="fa2", more=(("block_mask", _BLOCK),))
    call = Call("forward", options).taking(("q", "k", "v", "block_mask"))
    arrays = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, kinds, strict=True)]
    prepared = on_device.prepare_device(call, arrays)
    every = [*call.results_of(arrays), *((a.shape, a.dtype) for a in arrays)]
    buffers = [SimpleNamespace(shape=s, address=i << 20) for i, (s, _) in enumerate(every, 1)]
    prepared(SimpleNamespace(stream=7), buffers[:2], *buffers[2:])
    (block,) = [words["block_mask"] for words in one_device.launched]
    assert int(block["block_mask"]) == len(every) << 20
    assert (int(block["entries"]), int(block["own_entries"])) == (2, 3)
    assert (int(block["q_blocks"]), int(block["kv_blocks"])) == (3, 4)
