"""``block_mask`` inside JAX: traced, mapped and differentiated, against a mask of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash import BlockMask

from .jax_case import jax, jnp

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

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
    """Of queries, of the mask, and of both."""
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
