"""Arrays on a mesh of explicit axes: their types say how they are divided."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash

from .divided_case import FREE, GROUPED, WHOLE, P, attention_pass, entries, place, run_divided
from .jax_case import alike, cpu_mesh, draw, jax

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention


@pytest.mark.parametrize("spec", FREE, ids=str)
def test_a_mesh_of_explicit_axes(spec: Any) -> None:
    """The types of the results say how they are divided."""
    mesh = cpu_mesh(2, 2, explicit=True)
    arrays = draw(WHOLE, WHOLE, WHOLE, dtype="float32")
    with _using(mesh):
        _, collectives = run_divided(attention_pass("forward"), mesh, arrays, [spec] * 3)
        assert not collectives
        divided = place(mesh, arrays, [spec] * 3)
        out, lse = jax.eval_shape(attention_pass("forward"), *map(jax.typeof, divided))
        mapped = jax.vmap(attention)(*(a.reshape(1, *a.shape) for a in divided))
    batch, _, heads, _ = entries(spec, 4)
    assert out.sharding.spec == P(batch, None, heads, None)
    assert lse.sharding.spec == P(batch, heads, None)
    assert jax.typeof(mapped).sharding.spec == P(None, batch, None, heads, None)


@pytest.mark.parametrize("name", ["dout", "dlse", "both"])
def test_gradients_on_explicit_axes(name: str) -> None:
    mesh, spec = cpu_mesh(2, 2, explicit=True), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    expected = jax.jit(attention_pass(name))(*arrays)
    with _using(mesh):
        grads = jax.jit(attention_pass(name))(*place(mesh, arrays, [spec] * 3))
    for got, other in zip(grads, expected, strict=True):
        alike(got, other)
        assert jax.typeof(got).sharding.spec == P("x", None, "y", None)


def test_vmap_over_an_explicit_axis() -> None:
    """Devices with different mapped entries all have the arrays that are not mapped."""
    mesh = cpu_mesh(2, 2, explicit=True)
    arrays = draw((2, *WHOLE), WHOLE, (2, *WHOLE), dtype="float32")
    specs = [P("x", "y"), P("y"), P("x", "y")]
    mapped = jax.vmap(attention, in_axes=(0, None, 0))
    expected = mapped(*arrays)
    with _using(mesh):
        out = jax.jit(mapped)(*place(mesh, arrays, specs))
    alike(out, expected)
    assert jax.typeof(out).sharding.spec == P("x", "y", None, None, None)


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ((P(None, "x"), P(), P()), r"query: got an array divided as .*'x'.*; expected batch and"),
        ((P(), P(None, None, None, "x"), P()), r"key: got an array divided as"),
        ((P("x"), P("x"), P("y")), r"value: got an array divided as .*jax\.sharding\.reshard"),
    ],
    ids=str,
)
def test_explicit_axes_that_no_pass_can_take(specs: tuple[Any, ...], says: str) -> None:
    mesh = cpu_mesh(2, 2, explicit=True)
    divided = place(mesh, draw(WHOLE, WHOLE, WHOLE, dtype="float32"), specs)
    with _using(mesh), pytest.raises(cuflash.ArgumentValueError, match=says):
        jax.jit(attention)(*divided)


def _using(mesh: Any) -> Any:
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
