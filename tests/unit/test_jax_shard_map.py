"""``cuflash.jax.attention`` inside ``jax.shard_map``: eager and compiled, checked and not."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash

from .jax_case import cpu_mesh, draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

if not hasattr(jax, "shard_map"):
    pytest.skip("this JAX has no jax.shard_map", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("wide")

P = jax.sharding.PartitionSpec
Q, KV = (4, 6, 4, 8), (4, 6, 4, 8)
CHECKS = [{}, {"check_vma": False}]
QKV = (0, 1, 2)


def _each(function: Any, specs: Any, check: dict[str, Any]) -> Any:
    """The function under ``jax.shard_map``: each device applies it to its part of the arrays."""
    return jax.shard_map(function, mesh=cpu_mesh(4), in_specs=specs, out_specs=specs[0], **check)


@pytest.fixture(params=["eager", "jit"])
def compiled(request: pytest.FixtureRequest) -> Any:
    return jax.jit if request.param == "jit" else lambda function: function


@pytest.mark.parametrize("check", CHECKS, ids=str)
@pytest.mark.parametrize("divided", [0, 2], ids=["batch", "heads"])
def test_values_and_gradients(compiled: Any, check: dict[str, Any], divided: int) -> None:
    spec = P(*[None] * divided, "x")
    x = draw(Q, KV, KV)
    each = _each(lambda *qkv: attention(*qkv, is_causal=True), (spec,) * 3, check)
    near(compiled(each)(*x), formula(*x, is_causal=True))

    def loss(function: Any, **options: Any) -> Any:
        return jax.grad(lambda *qkv: jnp.sin(function(*qkv, **options)).sum(), QKV)

    near(compiled(loss(each))(*x), loss(formula, is_causal=True)(*x))


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_gradients_of_keys_that_every_device_has(compiled: Any, check: dict[str, Any]) -> None:
    """These gradients are sums over the devices: queries are divided, and each sees all keys."""
    x = draw((4, 8, 4, 8), KV, KV)
    each = _each(attention, (P(None, "x"), P(), P()), check)

    def loss(function: Any) -> Any:
        return jax.grad(lambda *qkv: jnp.sin(function(*qkv)).sum(), QKV)

    near(compiled(loss(each))(*x), loss(formula)(*x))


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_gradients_inside(compiled: Any, check: dict[str, Any]) -> None:
    """``jax.grad`` is inside ``jax.shard_map``: each device differentiates its own loss."""
    x = draw(Q, KV, KV)

    def inner(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda q: jnp.sin(attention(q, k, v, is_causal=True)).sum())(q)

    each = _each(inner, (P("x"),) * 3, check)
    expected = jax.grad(lambda q: jnp.sin(formula(q, *x[1:], is_causal=True)).sum())(x[0])
    near(compiled(each)(*x), expected)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_the_lse_and_its_gradient(compiled: Any, check: dict[str, Any]) -> None:
    x = draw(Q, KV, KV)
    rows = jax.shard_map(
        lambda *qkv: attention(*qkv, return_lse=True)[1],
        mesh=cpu_mesh(4),
        in_specs=P("x"),
        out_specs=P("x"),
        **check,
    )
    grads = jax.grad(lambda *qkv: jnp.sin(rows(*qkv)).sum(), QKV)
    expected = jax.grad(lambda *qkv: jnp.sin(formula(*qkv, return_lse=True)[1]).sum(), QKV)
    near(compiled(grads)(*x), expected(*x))


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_vmap_inside(compiled: Any, check: dict[str, Any]) -> None:
    x = draw((4, *Q), (4, *KV), KV)
    each = jax.vmap(attention, in_axes=(0, 0, None))
    divided = jax.shard_map(
        each, mesh=cpu_mesh(4), in_specs=(P("x"), P("x"), P()), out_specs=P("x"), **check
    )
    near(compiled(divided)(*x), jax.vmap(formula, in_axes=(0, 0, None))(*x))


def test_over_some_axes_of_the_mesh() -> None:
    """XLA divides over the other axes. Where XLA would abort the process, the call is refused."""
    x = draw(Q, KV, KV)
    each = jax.jit(
        jax.shard_map(
            attention, mesh=cpu_mesh(2, 2), in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
        )
    )
    if jax.config.jax_use_shardy_partitioner:
        near(each(*x), formula(*x))
        return
    with pytest.raises(cuflash.UnsupportedError, match="some axes of the mesh only needs"):
        each(*x)
