"""``cuflash.jax.attention`` in an Equinox module; Equinox's own takes no attention function."""

from __future__ import annotations

from typing import Any

import pytest

from .jax_case import draw, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention
eqx = pytest.importorskip("equinox", reason="Equinox is not installed")


class SelfAttention(eqx.Module):  # type: ignore[misc, name-defined]
    """Multi-head self-attention over (seqlen, features)."""

    into: Any
    out: Any
    heads: int = eqx.field(static=True)

    def __init__(self, features: int, heads: int, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.into = eqx.nn.Linear(features, 3 * features, use_bias=False, key=first)
        self.out = eqx.nn.Linear(features, features, use_bias=False, key=second)
        self.heads = heads

    def __call__(self, x: Any) -> Any:
        qkv = jax.vmap(self.into)(x).reshape(len(x), 3, self.heads, -1)
        heads = attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], is_causal=True)
        return jax.vmap(self.out)(heads.reshape(len(x), -1))


def _own(layer: SelfAttention, features: int) -> Any:
    """Equinox's own module with the same weights."""
    own = eqx.nn.MultiheadAttention(layer.heads, features, key=jax.random.key(1))
    parts = jnp.split(layer.into.weight, 3)
    weights = (*parts, layer.out.weight)
    projections = [f"{name}_proj" for name in ("query", "key", "value", "output")]
    return eqx.tree_at(lambda m: [getattr(m, name).weight for name in projections], own, weights)


def test_a_module_of_equinox(wide: None) -> None:
    layer = SelfAttention(16, 4, key=jax.random.key(0))
    own = _own(layer, 16)
    (x,) = draw((3, 6, 16))
    mask = jnp.tril(jnp.ones((6, 6), bool))

    def loss(function: Any) -> Any:
        return lambda x: jnp.sin(jax.vmap(function)(x)).sum()

    got = eqx.filter_jit(jax.value_and_grad(loss(layer)))(x)
    near(got, jax.value_and_grad(loss(lambda y: own(y, y, y, mask)))(x))
    grads = eqx.filter_grad(lambda layer, x: loss(layer)(x))(layer, x)
    assert grads.into.weight.shape == (48, 16)
    assert grads.into.weight.any()
