"""Arrays divided over four devices give the results of whole arrays, mostly without collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .divided_case import (
    FREE,
    GROUPED,
    SINGLE,
    WHOLE,
    P,
    attention_pass,
    entries,
    place,
    run_divided,
)
from .jax_case import alike, cpu_mesh, draw, jax

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention


@pytest.mark.parametrize("name", ["forward", "dout", "dlse", "both"])
@pytest.mark.parametrize("keys", [WHOLE, GROUPED], ids=["heads", "groups"])
@pytest.mark.parametrize("spec", FREE, ids=str)
def test_batch_and_heads_stay_divided(name: str, keys: tuple[int, ...], spec: Any) -> None:
    arrays = draw(WHOLE, keys, keys, dtype="float32")
    results, collectives = run_divided(attention_pass(name), cpu_mesh(2, 2), arrays, [spec] * 3)
    assert not collectives
    batch, _, heads, _ = entries(spec, 4)
    for result in results:
        rows = result.ndim == 3
        assert entries(result.sharding.spec, result.ndim)[0] == batch
        assert entries(result.sharding.spec, result.ndim)[1 if rows else 2] == heads


@pytest.fixture
def older_partitioner() -> Iterator[None]:
    """JAX uses the partitioner before Shardy, which asks for the division of the results itself."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_use_shardy_partitioner", before)
    jax.clear_caches()


@pytest.mark.parametrize("spec", FREE[::2], ids=str)
def test_the_older_partitioner(older_partitioner: None, spec: Any) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    for name in ("forward", "both"):
        results, collectives = run_divided(attention_pass(name), cpu_mesh(2, 2), arrays, [spec] * 3)
        assert not collectives
        assert entries(results[0].sharding.spec, 4) == entries(spec, 4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_float32_residual_is_divided_too(dtype: str) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype=dtype)
    gradients = jax.grad(
        lambda *qkv: attention(*qkv, residual_dtype="float32").astype("float32").sum(), (0, 1, 2)
    )
    _, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
    assert not collectives


def test_keys_that_are_whole_are_cut_where_they_are() -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    for spec in (P("x"), P(None, None, "x"), P("x", None, "y")):
        _, collectives = run_divided(
            attention_pass("forward"), cpu_mesh(2, 2), arrays, [spec, P(), P()]
        )
        assert not collectives


@pytest.mark.parametrize("name", ["forward", "both"])
@pytest.mark.parametrize(
    ("specs", "keys"),
    [
        ((P(None, "x"), P(), P()), WHOLE),
        ((P(), P(None, "x"), P(None, "x")), WHOLE),
        ((P(None, None, None, "x"),) * 3, WHOLE),
        ((P("x"), P(None, None, "x"), P(None, None, "x")), WHOLE),
        ((P(None, None, "x"), P(), P()), SINGLE),
        ((P(None, None, ("x", "y")), P(), P()), (4, 6, 2, 8)),
        ((P(None, None, ("x", "y")), P(None, None, "x"), P(None, None, "x")), (4, 6, 2, 8)),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_gathered(
    name: str, specs: tuple[Any, ...], keys: tuple[int, ...]
) -> None:
    """Arrays divided by sequence, by width or within a kv head are moved; the results are right."""
    arrays = draw(WHOLE, keys, keys, dtype="float32")
    _, collectives = run_divided(attention_pass(name), cpu_mesh(2, 2), arrays, specs)
    assert collectives


@pytest.mark.parametrize("name", ["forward", "both"])
def test_more_devices_than_key_heads(name: str) -> None:
    """Shardy would divide two key heads over half of a mesh axis; the arrays are moved instead."""
    arrays = draw(WHOLE, (4, 6, 2, 8), (4, 6, 2, 8), dtype="float32")
    for specs in ([P(None, None, "x"), P(), P()], [P(None, None, "x"), P("x"), P("x")]):
        _, collectives = run_divided(attention_pass(name), cpu_mesh(4), arrays, specs)
        assert collectives


def _projected(x: Any, *weights: Any) -> Any:
    heads = [(x @ weight).reshape(4, 6, -1, 8) for weight in weights]
    return attention(*heads)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: attention(*[x.reshape(2, 12, 8, 8)] * 3),
        lambda x: jax.vmap(lambda x: attention(x, x, x))(x.reshape(2, 2, *WHOLE[1:])),
        lambda x: attention(*[x.reshape(4, 6, 2, 32)] * 3),
    ],
)
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=str)
def test_a_part_of_a_mesh_axis(function: Any, spec: Any) -> None:
    """After a reshape, factors of one mesh axis divide two array axes; JAX cannot name these."""
    run_divided(function, cpu_mesh(4), draw(WHOLE, dtype="float32"), [spec])


def test_projections_into_fewer_key_heads_than_devices() -> None:
    """Four devices divide the columns of projections; each device has half of a key head."""
    arrays = draw((4, 6, 16), (16, 64), (16, 16), (16, 16), dtype="float32")
    specs = [P(), *[P(None, "x")] * 3]
    divided = place(cpu_mesh(4), arrays, specs)
    summed = 16 + (64 + 16 + 16)  # the products of a projection and of the gradient of its input
    for function in (_projected, jax.grad(lambda *a: _projected(*a).sum(), (0, 1, 2, 3))):
        got = jax.tree.leaves(jax.jit(function)(*divided))
        for one, other in zip(got, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
            # XLA sums the products of the projections in another order, which depends on the
            # processor. Sums of n products then differ by n roundings (Higham, Accuracy and
            # Stability, 3.1).
            assert np.abs(one - other).max() <= summed * 2.0**-24 * np.abs(other).max()


def test_the_order_of_the_axes_of_a_mesh() -> None:
    """Mesh axes are found from the slices of the devices; the outer axis has the larger step."""
    from cuflash.jax.partition import _names

    mesh = cpu_mesh(2, 2)
    for spec in (P("x"), P("y"), P(("x", "y")), P(("y", "x")), P(None, "x"), P()):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        array = jax.ShapeDtypeStruct((4, 8), "float32", sharding=sharding)
        for axis, names in enumerate(entries(spec, 2)):
            expected = () if names is None else names if isinstance(names, tuple) else (names,)
            assert _names(mesh, array, axis) == expected
    row = cpu_mesh(4)
    split = jax.sharding.NamedSharding(mesh, P("x", "y"))
    array = jax.ShapeDtypeStruct((4, 8), "float32", sharding=split)
    assert [_names(row, array, axis) for axis in (0, 1)] == [(), ()]  # each is a factor of "x"
    assert _names(mesh, jax.ShapeDtypeStruct((4, 8), "float32"), 0) == ()


def test_a_division_without_a_mesh() -> None:
    """Without a mesh, a divided array tells the devices; if none is divided, one device counts."""
    from cuflash.jax.partition import _mesh_of

    row = cpu_mesh(4)
    sharding = jax.sharding.NamedSharding(row, P("x"))
    known = jax.ShapeDtypeStruct((4, 8), "float32", sharding=sharding)
    unknown = jax.ShapeDtypeStruct((4, 8), "float32")
    none = jax.sharding.Mesh(np.empty((), object), ())
    assert none.empty
    assert list(_mesh_of(none, [unknown, known]).devices.flat) == list(row.devices.flat)
    assert _mesh_of(none, [unknown, unknown]).size == 1
    assert _mesh_of(row, [unknown]) is row


def test_eager_calls_stay_divided_too() -> None:
    mesh, spec = cpu_mesh(2, 2), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    divided = place(mesh, arrays, [spec] * 3)
    out, lse = attention(*divided, return_lse=True)
    assert entries(out.sharding.spec, 4) == entries(spec, 4)
    assert entries(lse.sharding.spec, 3) == ("x", "y", None)
    for got, expected in zip((out, lse), attention(*arrays, return_lse=True), strict=True):
        alike(got, expected)
    grads = jax.grad(lambda *qkv: attention(*qkv).sum(), (0, 1, 2))(*divided)
    assert all(entries(grad.sharding.spec, 4) == entries(spec, 4) for grad in grads)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y"), P("x", None, None, "y")])
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (1, None, 1)], ids=str)
def test_vmap_keeps_both_axes_divided(spec: Any, axes: tuple[int | None, ...]) -> None:
    """The mapped axis and the batch are not merged before an array is divided."""
    shapes = [(4, *WHOLE) if axis is not None else WHOLE for axis in axes]
    arrays = draw(*shapes, dtype="float32")
    inner = P(*[name for place, name in enumerate(spec) if place != axes[0]])
    specs = [inner if axis is None else spec for axis in axes]
    mapped = jax.vmap(lambda *qkv: attention(*qkv, return_lse=True), in_axes=axes)
    _, collectives = run_divided(mapped, cpu_mesh(2, 2), arrays, specs)
    assert not collectives


def test_a_loop_over_layers() -> None:
    arrays = draw(WHOLE, dtype="float32")

    def layers(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (attention(x, x, x), None), x, None, length=3)[0]

    _, collectives = run_divided(layers, cpu_mesh(2, 2), arrays, [P("x", None, "y")])
    assert not collectives


def test_two_passes_in_one_computation() -> None:
    """Each pass finds its own callback."""
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")

    def both(q: Any, k: Any, v: Any) -> Any:
        first = attention(q, k, v, is_causal=True)
        return first, attention(first, k[:, :3], v[:, :3], scale=0.3)

    _, collectives = run_divided(both, cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
    assert not collectives


@pytest.mark.parametrize("shapes", [((4, 0, 8, 8), GROUPED), (WHOLE, (4, 0, 4, 8))], ids=str)
def test_empty_sequences(shapes: Any) -> None:
    arrays = draw(shapes[0], shapes[1], shapes[1], dtype="float32")
    run_divided(attention_pass("forward"), cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
    run_divided(attention_pass("both"), cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
