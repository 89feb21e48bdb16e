"""A bias in calls with arrays that are divided over four devices.

Its axes of size 1 are not divided; its gradient is summed over the devices that share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash

from .divided_case import FREE, GROUPED, SINGLE, WHOLE, P, entries, place, run_divided
from .jax_case import alike, cpu_mesh, draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

ALL = (0, 1, 2, 3)
#: Shapes of a bias that is divided by batch and heads, by heads, by batch, and not at all.
KINDS = [(4, 8, 6, 6), (1, 8, 6, 1), (4, 1, 1, 6), (1, 1, 6, 6)]
OPTIONS: dict[str, Any] = {"local_window_size": (3, 1), "return_lse": True}


def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return attention(q, k, v, bias, **OPTIONS)


def total(function: Any) -> Any:
    def of(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, lse = function(q, k, v, bias, **OPTIONS)
        return (out * out).sum() + jnp.sin(lse).sum()

    return of


gradients = jax.grad(total(attention), ALL)


def _of_bias(spec: Any, kind: tuple[int, ...]) -> Any:
    """The division of a bias for queries with ``spec``: its axes of size 1 are whole."""
    batch, _, heads, _ = entries(spec, 4)
    return P(batch if kind[0] > 1 else None, heads if kind[1] > 1 else None)


def _is_shared(spec: Any, kind: tuple[int, ...]) -> bool:
    """Whether several devices contribute to one number of the gradient."""
    return _of_bias(spec, kind) != _of_bias(spec, KINDS[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spec", FREE, ids=str)
def test_nothing_is_gathered(spec: Any, kind: tuple[int, ...]) -> None:
    """Devices exchange only sums of the gradients of a bias that they share."""
    keys = GROUPED if kind[0] > 1 else WHOLE
    arrays = draw(WHOLE, keys, keys, kind, dtype="float32")
    specs = [spec] * 3 + [_of_bias(spec, kind)]
    results, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, specs)
    assert set(collectives) <= {"all-reduce"}
    assert bool(collectives) == _is_shared(spec, kind)
    assert entries(results[3].sharding.spec, 4) == entries(specs[3], 4)
    for got in results[:3]:
        assert entries(got.sharding.spec, 4) == entries(spec, 4)


@pytest.fixture
def older_partitioner() -> Iterator[None]:
    """JAX uses the partitioner that it had before Shardy."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_use_shardy_partitioner", before)
    jax.clear_caches()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_older_partitioner(older_partitioner: None, kind: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, kind, dtype="float32")
    spec = P("x", None, "y")
    specs = [spec] * 3 + [_of_bias(spec, kind)]
    _, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, specs)
    assert set(collectives) <= {"all-reduce"}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_forward_pass_sums_nothing(kind: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, kind, dtype="float32")
    for spec in (P("x", None, "y"), P(("y", "x"))):
        specs = [spec] * 3 + [_of_bias(spec, kind)]
        _, collectives = run_divided(forward, cpu_mesh(2, 2), arrays, specs)
        assert not collectives


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_bias_that_every_device_has(kind: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, kind, dtype="float32")
    for spec in (P("x", None, "y"), P(None, None, ("x", "y"))):
        _, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, [spec] * 3 + [P()])
        assert "all-to-all" not in collectives


def test_a_bias_that_is_divided_as_no_pass_can_take_it() -> None:
    """A bias divided by queries or keys is gathered; a bias divided by heads stays divided."""
    arrays = draw(WHOLE, GROUPED, GROUPED, KINDS[0], dtype="float32")
    for of_bias in (P(None, None, "x", "y"), P(None, "x")):
        run_divided(gradients, cpu_mesh(2, 2), arrays, [P()] * 3 + [of_bias])


@pytest.mark.parametrize("keys", [SINGLE, (4, 6, 2, 8)], ids=["one", "two"])
def test_fewer_key_heads_than_devices(keys: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, keys, keys, (1, 8, 1, 6), dtype="float32")
    specs = [P(None, None, ("x", "y")), P(), P(), P(None, ("x", "y"))]
    run_divided(gradients, cpu_mesh(2, 2), arrays, specs)


@pytest.mark.parametrize("kind", [(4, 1, 6, 6), (1, 8, 1, 6)], ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, 0, 0, None), (None, 0, None, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...], kind: tuple[int, ...]) -> None:
    """The mapped axis is divided too, and every device counts only the entries that it has."""
    shapes = (WHOLE, GROUPED, GROUPED, kind)
    whole = [s if axis is None else (2, *s) for s, axis in zip(shapes, axes, strict=True)]
    arrays = draw(*whole, dtype="float32")
    specs = [P("y") if axis is None else P("x", "y") for axis in axes]
    if kind[0] == 1:
        specs[3] = P() if axes[3] is None else P("x")
    for function in (forward, gradients):
        run_divided(jax.vmap(function, in_axes=axes), cpu_mesh(2, 2), arrays, specs)


@pytest.mark.parametrize("mapped", [(2, 1), (1, 4)], ids=["outer", "inner"])
def test_two_vmaps(mapped: tuple[int, int]) -> None:
    """The gradient is summed over all devices whose entries share the bias."""
    outer, inner = mapped
    arrays = draw(
        *[(2, 4, 2, 3, 4, 4)] * 3,
        (*(n for n in mapped if n > 1), 2, 1, 3, 3),
        dtype="float32",
    )
    one = jax.vmap(total(attention), in_axes=(0, 0, 0, 0 if inner > 1 else None))
    twice = jax.vmap(one, in_axes=(0, 0, 0, 0 if outer > 1 else None))
    summed = jax.grad(lambda *a: twice(*a).sum(), ALL)
    specs = [P("y", "x")] * 3 + [P("x" if inner > 1 else "y")]
    _, collectives = run_divided(summed, cpu_mesh(2, 2), arrays, specs)
    assert set(collectives) == {"all-reduce"}


def _using(mesh: Any) -> Any:
    return getattr(jax, "set_mesh", getattr(jax.sharding, "use_mesh", None))(mesh)


@pytest.mark.parametrize("kind", [*KINDS, (8, 1, 6)], ids=str)
def test_a_mesh_of_explicit_axes(kind: tuple[int, ...]) -> None:
    mesh, spec = cpu_mesh(2, 2, explicit=True), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, kind, dtype="float32")
    expected = jax.jit(gradients)(*arrays)
    own = P("y") if len(kind) == 3 else _of_bias(spec, kind)
    with _using(mesh):
        divided = place(mesh, arrays, [spec] * 3 + [own])
        got = jax.jit(gradients)(*divided)
        if own not in (P(), P(None, None)):
            whole = place(mesh, arrays[3:], [P()])
            with pytest.raises(cuflash.ArgumentValueError, match="bias: got an array divided as"):
                jax.eval_shape(forward, *map(jax.typeof, (*divided[:3], *whole)))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)
    assert entries(jax.typeof(got[3]).sharding.spec, 4)[: len(own)] == tuple(own)


@pytest.mark.parametrize("kind", [(4, 1, 6, 6), (1, 8, 6, 1)], ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, 0, 0, None), (None, None, None, 0)], ids=str)
def test_vmap_on_explicit_axes(axes: tuple[int | None, ...], kind: tuple[int, ...]) -> None:
    mesh = cpu_mesh(2, 2, explicit=True)
    shapes = (WHOLE, GROUPED, GROUPED, kind)
    whole = [s if axis is None else (2, *s) for s, axis in zip(shapes, axes, strict=True)]
    arrays = draw(*whole, dtype="float32")
    batch = [["y"]] * 3 + [["y"] if kind[0] > 1 else []]
    specs = [P(*b) if axis is None else P("x", *b) for axis, b in zip(axes, batch, strict=True)]
    call = jax.jit(jax.vmap(gradients, in_axes=axes))
    expected = call(*arrays)
    with _using(mesh):
        got = call(*place(mesh, arrays, specs))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)
    assert entries(jax.typeof(got[3]).sharding.spec, 5)[:2] == entries(P("x", *batch[3]), 2)


@pytest.mark.parametrize("pattern", [(2, 1, 2), (2, 1, 1)], ids=["hole", "outer"])
def test_two_vmaps_on_explicit_axes(pattern: tuple[int, ...]) -> None:
    """A bias is repeated along an axis that it lacks, and divided there as the queries are."""
    outer, inner, batch = pattern
    arrays = draw(*[(2, 4, 2, 3, 4, 4)] * 3, (outer, batch, 1, 3, 3), dtype="float32")
    twice = jax.jit(jax.vmap(jax.vmap(gradients, in_axes=(0, 0, 0, None))))
    expected = twice(*arrays)
    mesh = cpu_mesh(2, 2, explicit=True)
    with _using(mesh):
        got = twice(*place(mesh, arrays, [P("x", "y")] * 3 + [P("x")]))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)
    assert inner == 1
    assert got[3].shape == (2, 4, batch, 1, 3, 3)


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shard_map(wide: None, kind: tuple[int, ...], check: dict[str, Any]) -> None:
    """A bias that devices share gets the sum of their gradients."""
    spec = P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, kind)
    window: dict[str, Any] = {"local_window_size": (2, 1)}
    each = jax.shard_map(
        lambda q, k, v, bias: attention(q, k, v, bias, **window),
        mesh=cpu_mesh(2, 2),
        in_specs=(spec,) * 3 + (_of_bias(spec, kind),),
        out_specs=spec,
        **check,
    )

    def of(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sin(function(*a)).sum(), ALL))(*arrays)

    near(of(each), of(lambda q, k, v, bias: formula(q, k, v, bias, **window)))


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
def test_vmap_inside_of_shard_map(wide: None, check: dict[str, Any]) -> None:
    arrays = draw((2, *WHOLE), (2, *GROUPED), (2, *GROUPED), (4, 1, 6, 6))

    def gradient(q: Any, k: Any, v: Any, bias: Any) -> Any:
        each = jax.vmap(attention, in_axes=(0, 0, 0, None))
        return jax.grad(lambda b: jnp.sin(each(q, k, v, b)).sum())(bias)

    divided = jax.shard_map(
        gradient,
        mesh=cpu_mesh(4),
        in_specs=(P(None, "x"),) * 3 + (P("x"),),
        out_specs=P("x"),
        **check,
    )
    each = jax.vmap(formula, in_axes=(0, 0, 0, None))
    expected = jax.grad(lambda b: jnp.sin(each(*arrays[:3], b)).sum())(arrays[3])
    near(jax.jit(divided)(*arrays), expected)
    assert np.isfinite(np.asarray(expected)).all()
