"""ALiBi slopes in calls with arrays that are divided over four devices, by batch and by heads."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash

from .divided_case import FREE, GROUPED, SINGLE, WHOLE, P, entries, place, run_divided
from .jax_case import alike, cpu_mesh, draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

ALL = (0, 1, 2, 3)
HEADS, BATCH = (8,), (4, 8)
OPTIONS: dict[str, Any] = {"local_window_size": (3, 1), "return_lse": True}
SHAPES = pytest.mark.parametrize("shape", [HEADS, BATCH], ids=["heads", "batch"])


def forward(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    return attention(q, k, v, alibi_slopes=slopes, **OPTIONS)


def total(function: Any) -> Any:
    def of(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        out, lse = function(q, k, v, alibi_slopes=slopes, **OPTIONS)
        return (out * out).sum() + jnp.sin(lse).sum()

    return of


gradients = jax.grad(total(attention), ALL)


def _of_slopes(spec: Any, shape: tuple[int, ...]) -> Any:
    batch, _, heads, _ = entries(spec, 4)
    return P(heads) if shape == HEADS else P(batch, heads)


@SHAPES
@pytest.mark.parametrize("keys", [WHOLE, GROUPED], ids=["heads", "groups"])
@pytest.mark.parametrize("spec", FREE, ids=str)
def test_nothing_is_gathered(spec: Any, keys: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Devices sum only the gradients of slopes that the entries of a divided batch share."""
    arrays = draw(WHOLE, keys, keys, shape, dtype="float32")
    specs = [spec] * 3 + [_of_slopes(spec, shape)]
    _, collectives = run_divided(forward, cpu_mesh(2, 2), arrays, specs)
    assert not collectives
    results, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, specs)
    assert set(collectives) <= {"all-reduce"}
    shared = shape == HEADS and entries(spec, 4)[0] is not None
    assert bool(collectives) == shared
    assert entries(results[3].sharding.spec, 2) == entries(specs[3], 2)


@SHAPES
@pytest.mark.parametrize("spec", FREE[::2], ids=str)
def test_slopes_that_every_device_has(spec: Any, shape: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, shape, dtype="float32")
    for function in (forward, gradients):
        _, collectives = run_divided(function, cpu_mesh(2, 2), arrays, [spec] * 3 + [P()])
        assert "all-to-all" not in collectives


@pytest.mark.parametrize("keys", [SINGLE, (4, 6, 2, 8)], ids=["one", "two"])
def test_fewer_key_heads_than_devices(keys: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, keys, keys, BATCH, dtype="float32")
    for heads in ("x", ("x", "y")):
        specs = [P(None, None, heads), P(), P(), P(None, heads)]
        run_divided(gradients, cpu_mesh(2, 2), arrays, specs)


@SHAPES
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, 0, 0, None), (0, None, 0, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...], shape: tuple[int, ...]) -> None:
    shapes = (WHOLE, GROUPED, GROUPED, shape)
    whole = [s if axis is None else (2, *s) for s, axis in zip(shapes, axes, strict=True)]
    arrays = draw(*whole, dtype="float32")
    specs = [P() if axis is None else P("x") for axis in axes]
    for function in (forward, gradients):
        run_divided(jax.vmap(function, in_axes=axes), cpu_mesh(2, 2), arrays, specs)


def _using(mesh: Any) -> Any:
    return getattr(jax, "set_mesh", getattr(jax.sharding, "use_mesh", None))(mesh)


@SHAPES
def test_a_mesh_of_explicit_axes(shape: tuple[int, ...]) -> None:
    mesh, spec = cpu_mesh(2, 2, explicit=True), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, shape, dtype="float32")
    expected = jax.jit(gradients)(*arrays)
    own = _of_slopes(spec, shape)
    with _using(mesh):
        divided = place(mesh, arrays, [spec] * 3 + [own])
        got = jax.jit(gradients)(*divided)
        whole = place(mesh, arrays[3:], [P()])
        with pytest.raises(cuflash.ArgumentValueError, match="slopes: got an array divided as"):
            jax.eval_shape(forward, *map(jax.typeof, (*divided[:3], *whole)))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)
    assert jax.typeof(got[3]).sharding.spec == own


@SHAPES
@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_shard_map(wide: None, spec: Any, check: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Slopes that every device has get the sum of the gradients of all devices."""
    arrays = draw(WHOLE, GROUPED, GROUPED, shape)
    window: dict[str, Any] = {"local_window_size": (2, 1)}
    each = jax.shard_map(
        lambda q, k, v, slopes: attention(q, k, v, alibi_slopes=slopes, **window),
        mesh=cpu_mesh(4),
        in_specs=(spec,) * 3 + (_of_slopes(spec, shape),),
        out_specs=spec,
        **check,
    )

    def of(function: Any) -> Any:
        return jax.grad(lambda *a: jnp.sin(function(*a)).sum(), ALL)(*arrays)

    def whole(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return formula(q, k, v, alibi_slopes=slopes, **window)

    near(of(each), of(whole))
