"""Sinks with arrays that are divided over four devices, by batch or by heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from .divided_case import FREE, GROUPED, SINGLE, WHOLE, P, entries, place, run_divided
from .jax_case import alike, cpu_mesh, draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

ALL = (0, 1, 2, 3)
HEADS = (8,)
OPTIONS: dict[str, Any] = {"local_window_size": (2, 1), "return_lse": True}


def forward(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    return attention(q, k, v, sinks=sinks, **OPTIONS)


def total(function: Any) -> Any:
    def of(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = function(q, k, v, sinks=sinks, **OPTIONS)
        return (out * out).sum() + jnp.sin(lse).sum()

    return of


gradients = jax.grad(total(attention), ALL)


def _of_heads(spec: Any) -> Any:
    return P(entries(spec, 4)[2])


@pytest.mark.parametrize("keys", [WHOLE, GROUPED], ids=["heads", "groups"])
@pytest.mark.parametrize("spec", FREE, ids=str)
def test_nothing_is_gathered(spec: Any, keys: tuple[int, ...]) -> None:
    """If the batch is divided, only the sinks' gradient is summed over devices: a number a head."""
    arrays = draw(WHOLE, keys, keys, HEADS, dtype="float32")
    specs = [spec] * 3 + [_of_heads(spec)]
    _, collectives = run_divided(forward, cpu_mesh(2, 2), arrays, specs)
    assert not collectives
    results, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, specs)
    assert set(collectives) <= {"all-reduce"}
    assert bool(collectives) == (entries(spec, 4)[0] is not None)
    assert entries(results[3].sharding.spec, 1) == entries(specs[3], 1)


@pytest.mark.parametrize("spec", FREE[::2], ids=str)
def test_sinks_that_every_device_has(spec: Any) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, HEADS, dtype="float32")
    for function in (forward, gradients):
        _, collectives = run_divided(function, cpu_mesh(2, 2), arrays, [spec] * 3 + [P()])
        assert "all-to-all" not in collectives


@pytest.mark.parametrize("keys", [SINGLE, (4, 6, 2, 8)], ids=["one", "two"])
def test_fewer_key_heads_than_devices(keys: tuple[int, ...]) -> None:
    arrays = draw(WHOLE, keys, keys, HEADS, dtype="float32")
    for heads in ("x", ("x", "y")):
        specs = [P(None, None, heads), P(), P(), P(heads)]
        run_divided(gradients, cpu_mesh(2, 2), arrays, specs)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, 0, 0, None), (0, None, 0, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...]) -> None:
    shapes = (WHOLE, GROUPED, GROUPED, HEADS)
    whole = [s if axis is None else (2, *s) for s, axis in zip(shapes, axes, strict=True)]
    arrays = draw(*whole, dtype="float32")
    specs = [P() if axis is None else P("x") for axis in axes]
    for function in (forward, gradients):
        run_divided(jax.vmap(function, in_axes=axes), cpu_mesh(2, 2), arrays, specs)


def _using(mesh: Any) -> Any:
    return getattr(jax, "set_mesh", getattr(jax.sharding, "use_mesh", None))(mesh)


def test_a_mesh_of_explicit_axes() -> None:
    mesh, spec = cpu_mesh(2, 2, explicit=True), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, HEADS, dtype="float32")
    expected = jax.jit(gradients)(*arrays)
    with _using(mesh):
        divided = place(mesh, arrays, [spec] * 3 + [P("y")])
        got = jax.jit(gradients)(*divided)
        whole = place(mesh, arrays[3:], [P()])
        with pytest.raises(cuflash.ArgumentValueError, match="sinks: got an array divided as"):
            jax.eval_shape(forward, *map(jax.typeof, (*divided[:3], *whole)))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)
    assert jax.typeof(got[3]).sharding.spec == P("y")


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_shard_map(wide: None, spec: Any, check: dict[str, Any]) -> None:
    """Sinks that every device has get the sum of the gradients of all devices."""
    arrays = draw(WHOLE, GROUPED, GROUPED, HEADS)
    specs = (spec,) * 3 + (_of_heads(spec),)
    each = jax.shard_map(
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, local_window_size=(2, 1)),
        mesh=cpu_mesh(4),
        in_specs=specs,
        out_specs=spec,
        **check,
    )

    def of(function: Any) -> Any:
        return jax.grad(lambda *a: jnp.sin(function(*a)).sum(), ALL)(*arrays)

    def whole(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return formula(q, k, v, sinks=sinks, local_window_size=(2, 1))

    near(of(each), of(whole))
    assert np.isfinite(np.asarray(each(*arrays))).all()


@pytest.mark.parametrize("mapped", [0, 3], ids=["query", "sinks"])
def test_entries_with_sinks_of_their_own_want_whole_heads_on_explicit_axes(mapped: int) -> None:
    """No type describes how the merged heads of several entries are divided."""
    mesh = cpu_mesh(2, 2, explicit=True)
    arrays = draw(*[(4, 6, 4, 8)] * 3, (4,), dtype="float32")
    arrays[mapped] = jnp.stack([arrays[mapped]] * 2)
    axes = tuple(0 if i == mapped else None for i in ALL)
    for heads in (None, "y"):
        specs = [P("x", None, heads)] * 3 + [P(heads)]
        specs[mapped] = P(None, *specs[mapped])
        with jax.set_mesh(mesh):
            given = place(mesh, arrays, specs)
            call = jax.jit(jax.vmap(gradients, axes))
            if heads is None:
                assert call(*given)[3].shape == (2, 4)
                continue
            with pytest.raises(cuflash.UnsupportedError, match="explicit axes divides the heads"):
                call(*given)
