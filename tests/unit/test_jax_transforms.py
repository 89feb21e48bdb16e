"""``cuflash.jax.attention`` under the transformations of JAX."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash

from .jax_case import draw, formula, jax, jnp, loss, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

pytestmark = pytest.mark.usefixtures("wide")

Q, KV = (2, 5, 4, 8), (2, 9, 2, 8)
QKV = (0, 1, 2)
OPTIONS = [{}, {"is_causal": True, "q_offset": None}, {"is_causal": True, "return_lse": True}]
#: Which axis of q, k and v is mapped.
AXES = [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (1, 0, None), (-1, 2, 1)]


def _mapped(axes: tuple[int | None, ...], size: int = 3) -> list[Any]:
    """Arrays with ``size`` entries along the mapped axes, each of the shapes Q, KV and KV."""
    shapes = []
    for shape, axis in zip((Q, KV, KV), axes, strict=True):
        place = axis if axis is None or axis >= 0 else len(shape) + 1 + axis
        shapes.append(shape if place is None else (*shape[:place], size, *shape[place:]))
    return draw(*shapes)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_jit_and_grad(options: dict[str, Any]) -> None:
    x = draw(Q, KV, KV)
    mine, plain = loss(attention, **options), loss(formula, **options)
    expected = jax.jit(jax.grad(plain, QKV))(*x)
    near(jax.jit(mine)(*x), jax.jit(plain)(*x))
    near(jax.grad(mine, QKV)(*x), expected)
    near(jax.jit(jax.grad(mine, QKV))(*x), expected)
    near(jax.grad(jax.jit(mine), QKV)(*x), expected)
    near(jax.grad(jax.checkpoint(mine), QKV)(*x), expected)
    with jax.disable_jit():
        near(jax.grad(mine, QKV)(*x), expected)


def test_gradients_of_one_argument() -> None:
    x = draw(Q, KV, KV)
    for index in QKV:
        mine, plain = (jax.grad(loss(f, is_causal=True), index) for f in (attention, formula))
        near(mine(*x), plain(*x))


@pytest.mark.parametrize("axes", AXES, ids=repr)
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_vmap(axes: tuple[int | None, ...], options: dict[str, Any]) -> None:
    x = _mapped(axes)
    mine, plain = (
        jax.vmap(lambda *qkv, f=f: f(*qkv, **options), in_axes=axes) for f in (attention, formula)
    )
    near(mine(*x), jax.jit(plain)(*x))


@pytest.mark.parametrize("axes", AXES, ids=repr)
@pytest.mark.parametrize("options", OPTIONS[1:], ids=repr)
def test_vmap_of_grad_and_grad_of_vmap(
    axes: tuple[int | None, ...], options: dict[str, Any]
) -> None:
    x = _mapped(axes)
    each, whole = [], []
    for function in (attention, formula):
        one = loss(function, **options)
        each.append(jax.jit(jax.vmap(jax.grad(one, QKV), in_axes=axes)))
        total = jax.grad(lambda *a, one=one: jax.vmap(one, in_axes=axes)(*a).sum(), QKV)
        whole.append(jax.jit(total))
    near(each[0](*x), each[1](*x))
    near(whole[0](*x), whole[1](*x))


def test_vmap_and_grad_without_jit() -> None:
    x = _mapped(AXES[1])
    mine, plain = loss(attention, is_causal=True), loss(formula, is_causal=True)
    each = [jax.vmap(jax.grad(f, QKV), in_axes=AXES[1]) for f in (mine, plain)]
    near(each[0](*x), jax.jit(each[1])(*x))
    whole = [
        jax.grad(lambda *a, f=f: jax.vmap(f, in_axes=AXES[1])(*a).sum(), QKV) for f in (mine, plain)
    ]
    near(whole[0](*x), jax.jit(whole[1])(*x))


def test_vmap_inside_vmap() -> None:
    q, k, v = draw((3, 2, *Q), (2, *KV), (3, *KV))

    def twice(function: Any) -> Any:
        inner = jax.vmap(lambda *qkv: function(*qkv, is_causal=True), in_axes=(0, 0, None))
        return jax.vmap(inner, in_axes=(0, None, 0))

    near(twice(attention)(q, k, v), jax.jit(twice(formula))(q, k, v))
    grads = [jax.jit(jax.grad(loss(twice(f)), QKV))(q, k, v) for f in (attention, formula)]
    near(*grads)


@pytest.mark.parametrize("size", [0, 1])
def test_few_mapped_entries(size: int) -> None:
    x = _mapped((0, 0, None), size)
    mine, plain = (jax.vmap(f, in_axes=(0, 0, None)) for f in (attention, formula))
    near(mine(*x), plain(*x))


def test_only_the_cotangent_is_mapped() -> None:
    x = draw((3, 2, 4), (4, 1, 4), (4, 1, 4))
    near(jax.jacrev(attention, QKV)(*x), jax.jit(jax.jacrev(formula, QKV))(*x))


def test_vmap_without_a_batch() -> None:
    x = draw((3, *Q[1:]), (3, *KV[1:]), KV[1:])
    mine, plain = (jax.vmap(f, in_axes=(0, 0, None)) for f in (attention, formula))
    near(mine(*x), plain(*x))


def test_a_loop() -> None:
    (x,) = draw(Q)

    def steps(function: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            return function(carry, carry, carry, is_causal=True), None

        return lambda x: jnp.sin(jax.lax.scan(step, x, None, length=3)[0]).sum()

    near(jax.grad(steps(attention))(x), jax.grad(steps(formula))(x))


def test_options_do_not_mix() -> None:
    x = draw((2, 7, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
    choices: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"is_causal": True, "q_offset": 1},
        {"is_causal": True, "q_offset": 1, "scale": 0.2},
        {"scale": 0.2},
    ]
    compiled = [jax.jit(jax.value_and_grad(loss(attention, **options))) for options in choices]
    for _ in range(2):
        for function, options in zip(compiled, choices, strict=True):
            near(function(*x), jax.value_and_grad(loss(formula, **options))(*x))
            near(attention(*x, **options), formula(*x, **options))

    def together(function: Any) -> Any:
        return lambda *qkv: tuple(function(*qkv, **options) for options in choices)

    near(jax.jit(together(attention))(*x), together(formula)(*x))


def test_second_derivatives_are_refused() -> None:
    q, k, v = draw(Q, KV, KV)
    slope = jax.grad(loss(attention))
    with pytest.raises(cuflash.UnsupportedError, match="first derivatives alone"):
        jax.grad(lambda *qkv: slope(*qkv).sum())(q, k, v)
    with pytest.raises(cuflash.UnsupportedError, match="first derivatives alone"):
        jax.jit(jax.hessian(loss(attention)))(q, k, v)


def test_the_forward_mode_is_refused() -> None:
    x = draw(Q, KV, KV)
    with pytest.raises(cuflash.UnsupportedError, match=r"jax\.grad"):
        jax.jvp(attention, x, x)
