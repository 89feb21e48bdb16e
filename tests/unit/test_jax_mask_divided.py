"""A mask in calls with arrays on four devices: its axes of size 1 are not divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import cuflash

from .divided_case import FREE, GROUPED, SINGLE, WHOLE, P, entries, place, run_divided
from .jax_case import alike, cpu_mesh, draw, formula, jax, jnp, near, wide
from .jax_mask_case import QKV, draw_mask, pulled

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

#: Shapes of a mask that is divided by batch and heads, by heads, by batch, and not at all.
KINDS = [(4, 8, 6, 6), (1, 8, 6, 1), (4, 1, 1, 6), (1, 1, 6, 6)]

gradients = pulled(attention, local_window_size=(3, 1))


def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return attention(q, k, v, mask=mask, local_window_size=(3, 1), return_lse=True)


def _arrays(keys: tuple[int, ...], kind: tuple[int, ...]) -> list[Any]:
    return [*draw(WHOLE, keys, keys, dtype="float32"), draw_mask(kind)]


def _of_mask(spec: Any, kind: tuple[int, ...]) -> Any:
    """The division of a mask for queries with ``spec``: its axes of size 1 are whole."""
    batch, _, heads, _ = entries(spec, 4)
    return P(batch if kind[0] > 1 else None, heads if kind[1] > 1 else None)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spec", FREE, ids=str)
def test_nothing_is_gathered_or_summed(spec: Any, kind: tuple[int, ...]) -> None:
    """A mask has no gradient, so devices that share it exchange nothing."""
    keys = GROUPED if kind[0] > 1 else WHOLE
    specs = [spec] * 3 + [_of_mask(spec, kind)]
    results, collectives = run_divided(gradients, cpu_mesh(2, 2), _arrays(keys, kind), specs)
    assert not collectives
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
    spec = P("x", None, "y")
    specs = [spec] * 3 + [_of_mask(spec, kind)]
    _, collectives = run_divided(gradients, cpu_mesh(2, 2), _arrays(GROUPED, kind), specs)
    assert not collectives


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mask_that_every_device_has(kind: tuple[int, ...]) -> None:
    """Each device reads the section of the mask that it needs."""
    for spec in (P("x", None, "y"), P(None, None, ("x", "y"))):
        specs = [spec] * 3 + [P()]
        _, collectives = run_divided(gradients, cpu_mesh(2, 2), _arrays(GROUPED, kind), specs)
        assert not collectives


def test_a_mask_that_is_divided_as_no_pass_can_take_it() -> None:
    """A mask divided by queries or keys is gathered; a mask divided by heads stays divided."""
    arrays = _arrays(GROUPED, KINDS[0])
    for of_mask in (P(None, None, "x", "y"), P(None, "x")):
        run_divided(gradients, cpu_mesh(2, 2), arrays, [P()] * 3 + [of_mask])


@pytest.mark.parametrize("keys", [SINGLE, (4, 6, 2, 8)], ids=["one", "two"])
def test_fewer_key_heads_than_devices(keys: tuple[int, ...]) -> None:
    specs = [P(None, None, ("x", "y")), P(), P(), P(None, ("x", "y"))]
    run_divided(gradients, cpu_mesh(2, 2), _arrays(keys, (1, 8, 1, 6)), specs)


@pytest.mark.parametrize("kind", [(4, 1, 6, 6), (1, 8, 1, 6)], ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, 0, 0, None), (None, 0, None, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...], kind: tuple[int, ...]) -> None:
    """The mapped axis is divided too, and every device counts only the entries that it has."""
    shapes = (WHOLE, GROUPED, GROUPED, kind)
    whole = [s if axis is None else (2, *s) for s, axis in zip(shapes, axes, strict=True)]
    arrays = [*draw(*whole[:3], dtype="float32"), draw_mask(whole[3])]
    specs = [P("y") if axis is None else P("x", "y") for axis in axes]
    if kind[0] == 1:
        specs[3] = P() if axes[3] is None else P("x")
    for function in (forward, gradients):
        run_divided(jax.vmap(function, in_axes=axes), cpu_mesh(2, 2), arrays, specs)


@pytest.mark.parametrize("pattern", [(2, 1, 2), (2, 1, 1), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_two_vmaps(pattern: tuple[int, ...], explicit: bool) -> None:
    """A mask is repeated along an axis that it lacks, and divided there as the queries are."""
    outer, inner, batch = pattern
    own = tuple(size for size in (outer, inner) if size > 1)
    arrays = [*draw(*[(2, 4, 2, 3, 4, 4)] * 3, dtype="float32"), draw_mask((*own, batch, 1, 3, 3))]
    axes = [(0, 0, 0, 0 if size > 1 else None) for size in (inner, outer)]
    twice = jax.jit(jax.vmap(jax.vmap(gradients, in_axes=axes[0]), in_axes=axes[1]))
    expected = jax.tree.leaves(twice(*arrays))
    mesh = cpu_mesh(2, 2, explicit=explicit)
    specs = [P("x", "y")] * 3 + [P("x" if outer > 1 else "y")]
    with _using(mesh):
        got = jax.tree.leaves(twice(*place(mesh, arrays, specs)))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)


def _using(mesh: Any) -> Any:
    return getattr(jax, "set_mesh", getattr(jax.sharding, "use_mesh", None))(mesh)


@pytest.mark.parametrize("kind", [*KINDS, (8, 1, 6)], ids=str)
def test_a_mesh_of_explicit_axes(kind: tuple[int, ...]) -> None:
    mesh, spec = cpu_mesh(2, 2, explicit=True), P("x", None, "y")
    arrays = _arrays(GROUPED, kind)
    expected = jax.tree.leaves(jax.jit(gradients)(*arrays))
    own = P("y") if len(kind) == 3 else _of_mask(spec, kind)
    with _using(mesh):
        divided = place(mesh, arrays, [spec] * 3 + [own])
        got = jax.tree.leaves(jax.jit(gradients)(*divided))
        if own not in (P(), P(None, None)):
            whole = place(mesh, arrays[3:], [P()])
            with pytest.raises(cuflash.ArgumentValueError, match="mask: got an array divided as"):
                jax.eval_shape(forward, *map(jax.typeof, (*divided[:3], *whole)))
    for one, other in zip(got, expected, strict=True):
        alike(one, other)
    assert jax.typeof(got[0]).sharding.spec == P("x", None, "y", None)


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shard_map(wide: None, kind: tuple[int, ...], check: dict[str, Any]) -> None:
    spec = P("x", None, "y")
    arrays = [*draw(WHOLE, GROUPED, GROUPED), draw_mask(kind)]
    each = jax.shard_map(
        lambda q, k, v, mask: attention(q, k, v, mask=mask),
        mesh=cpu_mesh(2, 2),
        in_specs=(spec,) * 3 + (_of_mask(spec, kind),),
        out_specs=spec,
        **check,
    )

    def of(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sin(function(*a)).sum(), QKV))(*arrays)

    near(of(each), of(lambda q, k, v, mask: formula(q, k, v, mask=mask)))


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
def test_vmap_and_gradient_inside_of_shard_map(wide: None, check: dict[str, Any]) -> None:
    """All devices have the same mask, which varies over no axis of the mesh."""
    arrays = [*draw((2, *WHOLE), (2, *GROUPED), (2, *GROUPED)), draw_mask((8, 1, 6))]

    def gradient(function: Any) -> Any:
        def of(q: Any, k: Any, v: Any, mask: Any) -> Any:
            each = jax.vmap(lambda *a: function(*a[:3], mask=a[3]), in_axes=(0, 0, 0, None))
            return jax.grad(lambda q: jnp.sin(each(q, k, v, mask)).sum())(q)

        return of

    divided = jax.shard_map(
        gradient(attention),
        mesh=cpu_mesh(4),
        in_specs=(P(None, "x"),) * 3 + (P(),),
        out_specs=P(None, "x"),
        **check,
    )
    near(jax.jit(divided)(*arrays), gradient(formula)(*arrays))


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
def test_gradients_of_what_every_device_has(wide: None, check: dict[str, Any]) -> None:
    """Devices have the same arrays but different masks; gradients are summed over the devices."""
    arrays = [*draw(*[(2, 6, 4, 8)] * 3), draw_mask((8, 1, 6, 6))]
    each = jax.shard_map(
        lambda q, k, v, mask: attention(q, k, v, mask=mask),
        mesh=cpu_mesh(4),
        in_specs=(P(),) * 3 + (P("x"),),
        out_specs=P("x"),
        **check,
    )

    def whole(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return formula(*(jnp.tile(array, (4, 1, 1, 1)) for array in (q, k, v)), mask=mask)

    def of(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sin(function(*a)).sum(), QKV))(*arrays)

    near(of(each), of(whole))
