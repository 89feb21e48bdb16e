"""Arrays divided over four devices: nothing is gathered, and every bit is as of whole arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash

from .jax_case import cpu_mesh, draw, jax

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

P = jax.sharding.PartitionSpec
COLLECTIVE = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter")
#: batch, seqlen and heads of queries, then of keys.
WHOLE, GROUPED, SINGLE = (4, 6, 8, 8), (4, 6, 4, 8), (4, 6, 1, 8)
#: How query, key and value are divided, and the output.
FREE = [
    P("x"),
    P(("x", "y")),
    P(("y", "x")),
    P(None, None, "x"),
    P(None, None, ("x", "y")),
    P("x", None, "y"),
    P("y", None, "x"),
]


def _pass(name: str) -> Any:
    """A pass whose results are all used: out and lse, or gradients through either or both."""
    if name == "forward":
        return lambda *qkv: attention(*qkv, is_causal=True, return_lse=True)

    def product(q: Any, k: Any, v: Any) -> Any:
        out, lse = attention(q, k, v, is_causal=True, return_lse=True)
        used = {"dout": (out,), "dlse": (lse,), "both": (out, lse)}[name]
        return sum((result * result).sum() for result in used)

    return jax.grad(product, (0, 1, 2))


def _place(mesh: Any, arrays: Any, specs: Any) -> list[Any]:
    return [
        jax.device_put(np.asarray(array), jax.sharding.NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]


def _run(function: Any, mesh: Any, arrays: Any, specs: Any) -> tuple[list[Any], list[str]]:
    """Results, held to those of whole arrays, and the collectives in the compiled text."""
    divided = _place(mesh, arrays, specs)
    compiled = jax.jit(function).lower(*divided).compile()
    results = jax.tree.leaves(compiled(*divided))
    for got, expected in zip(results, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    return results, COLLECTIVE.findall(compiled.as_text())


def _entries(spec: Any, ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


@pytest.mark.parametrize("name", ["forward", "dout", "dlse", "both"])
@pytest.mark.parametrize("keys", [WHOLE, GROUPED], ids=["heads", "groups"])
@pytest.mark.parametrize("spec", FREE, ids=str)
def test_batch_and_heads_stay_divided(name: str, keys: tuple[int, ...], spec: Any) -> None:
    arrays = draw(WHOLE, keys, keys, dtype="float32")
    results, collectives = _run(_pass(name), cpu_mesh(2, 2), arrays, [spec] * 3)
    assert not collectives
    batch, _, heads, _ = _entries(spec, 4)
    for result in results:
        rows = result.ndim == 3
        assert _entries(result.sharding.spec, result.ndim)[0] == batch
        assert _entries(result.sharding.spec, result.ndim)[1 if rows else 2] == heads


@pytest.fixture
def older_partitioner() -> Iterator[None]:
    """The one that JAX had before Shardy; it asks for the division of results by itself."""
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
        results, collectives = _run(_pass(name), cpu_mesh(2, 2), arrays, [spec] * 3)
        assert not collectives
        assert _entries(results[0].sharding.spec, 4) == _entries(spec, 4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_float32_residual_is_divided_too(dtype: str) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype=dtype)
    gradients = jax.grad(
        lambda *qkv: attention(*qkv, residual_dtype="float32").astype("float32").sum(), (0, 1, 2)
    )
    _, collectives = _run(gradients, cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
    assert not collectives


def test_keys_that_are_whole_are_cut_where_they_are() -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    for spec in (P("x"), P(None, None, "x"), P("x", None, "y")):
        _, collectives = _run(_pass("forward"), cpu_mesh(2, 2), arrays, [spec, P(), P()])
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
    """By sequence, by width, or into parts of one key head: right, at the price of moving it."""
    arrays = draw(WHOLE, keys, keys, dtype="float32")
    _, collectives = _run(_pass(name), cpu_mesh(2, 2), arrays, specs)
    assert collectives


@pytest.mark.parametrize("name", ["forward", "both"])
def test_more_devices_than_key_heads(name: str) -> None:
    """Shardy would divide two key heads over a half of the axis."""
    arrays = draw(WHOLE, (4, 6, 2, 8), (4, 6, 2, 8), dtype="float32")
    for specs in ([P(None, None, "x"), P(), P()], [P(None, None, "x"), P("x"), P("x")]):
        _, collectives = _run(_pass(name), cpu_mesh(4), arrays, specs)
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
    """After a reshape two parts of an axis of four divide two axes: JAX has no name for that."""
    _run(function, cpu_mesh(4), draw(WHOLE, dtype="float32"), [spec])


def test_projections_into_fewer_key_heads_than_devices() -> None:
    """Tensor parallelism over four devices, two key heads: half a head a device."""
    arrays = draw((4, 6, 16), (16, 64), (16, 16), (16, 16), dtype="float32")
    specs = [P(), *[P(None, "x")] * 3]
    divided = _place(cpu_mesh(4), arrays, specs)
    for function in (_projected, jax.grad(lambda *a: _projected(*a).sum(), (0, 1, 2, 3))):
        got = jax.tree.leaves(jax.jit(function)(*divided))
        for one, other in zip(got, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
            # The products around it are summed in another order.
            assert np.abs(one - other).max() <= 2.0**-20 * np.abs(other).max()


def test_the_order_of_the_axes_of_a_mesh() -> None:
    """Names are read off the parts: the outer axis is the one of the greater step."""
    from cuflash.jax.partition import _names

    mesh = cpu_mesh(2, 2)
    for spec in (P("x"), P("y"), P(("x", "y")), P(("y", "x")), P(None, "x"), P()):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        array = jax.ShapeDtypeStruct((4, 8), "float32", sharding=sharding)
        for axis, names in enumerate(_entries(spec, 2)):
            expected = () if names is None else names if isinstance(names, tuple) else (names,)
            assert _names(mesh, array, axis) == expected
    row = cpu_mesh(4)
    split = jax.sharding.NamedSharding(mesh, P("x", "y"))
    array = jax.ShapeDtypeStruct((4, 8), "float32", sharding=split)
    assert [_names(row, array, axis) for axis in (0, 1)] == [(), ()]  # parts of "x"
    assert _names(mesh, jax.ShapeDtypeStruct((4, 8), "float32"), 0) == ()


def test_eager_calls_stay_divided_too() -> None:
    mesh, spec = cpu_mesh(2, 2), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    divided = _place(mesh, arrays, [spec] * 3)
    out, lse = attention(*divided, return_lse=True)
    assert _entries(out.sharding.spec, 4) == _entries(spec, 4)
    assert _entries(lse.sharding.spec, 3) == ("x", "y", None)
    for got, expected in zip((out, lse), attention(*arrays, return_lse=True), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    grads = jax.grad(lambda *qkv: attention(*qkv).sum(), (0, 1, 2))(*divided)
    assert all(_entries(grad.sharding.spec, 4) == _entries(spec, 4) for grad in grads)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y"), P("x", None, None, "y")])
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (1, None, 1)], ids=str)
def test_vmap_keeps_both_axes_divided(spec: Any, axes: tuple[int | None, ...]) -> None:
    """The mapped axis and the batch are not merged before an array is cut."""
    shapes = [(4, *WHOLE) if axis is not None else WHOLE for axis in axes]
    arrays = draw(*shapes, dtype="float32")
    inner = P(*[name for place, name in enumerate(spec) if place != axes[0]])
    specs = [inner if axis is None else spec for axis in axes]
    mapped = jax.vmap(lambda *qkv: attention(*qkv, return_lse=True), in_axes=axes)
    _, collectives = _run(mapped, cpu_mesh(2, 2), arrays, specs)
    assert not collectives


def test_a_loop_over_layers() -> None:
    arrays = draw(WHOLE, dtype="float32")

    def layers(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (attention(x, x, x), None), x, None, length=3)[0]

    _, collectives = _run(layers, cpu_mesh(2, 2), arrays, [P("x", None, "y")])
    assert not collectives


def test_two_passes_in_one_computation() -> None:
    """Each finds its own callback."""
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")

    def both(q: Any, k: Any, v: Any) -> Any:
        first = attention(q, k, v, is_causal=True)
        return first, attention(first, k[:, :3], v[:, :3], scale=0.3)

    _, collectives = _run(both, cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
    assert not collectives


@pytest.mark.parametrize("shapes", [((4, 0, 8, 8), GROUPED), (WHOLE, (4, 0, 4, 8))], ids=str)
def test_empty_sequences(shapes: Any) -> None:
    arrays = draw(shapes[0], shapes[1], shapes[1], dtype="float32")
    _run(_pass("forward"), cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)
    _run(_pass("both"), cpu_mesh(2, 2), arrays, [P("x", None, "y")] * 3)


@pytest.mark.parametrize("spec", FREE, ids=str)
def test_a_mesh_of_explicit_axes(spec: Any) -> None:
    """The types of the results say how they are divided."""
    mesh = cpu_mesh(2, 2, explicit=True)
    arrays = draw(WHOLE, WHOLE, WHOLE, dtype="float32")
    with _using(mesh):
        _, collectives = _run(_pass("forward"), mesh, arrays, [spec] * 3)
        assert not collectives
        divided = _place(mesh, arrays, [spec] * 3)
        out, lse = jax.eval_shape(_pass("forward"), *map(jax.typeof, divided))
        mapped = jax.vmap(attention)(*(a.reshape(1, *a.shape) for a in divided))
    batch, _, heads, _ = _entries(spec, 4)
    assert out.sharding.spec == P(batch, None, heads, None)
    assert lse.sharding.spec == P(batch, heads, None)
    assert jax.typeof(mapped).sharding.spec == P(None, batch, None, heads, None)


@pytest.mark.parametrize("name", ["dout", "dlse", "both"])
def test_gradients_on_explicit_axes(name: str) -> None:
    mesh, spec = cpu_mesh(2, 2, explicit=True), P("x", None, "y")
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    expected = jax.jit(_pass(name))(*arrays)
    with _using(mesh):
        grads = jax.jit(_pass(name))(*_place(mesh, arrays, [spec] * 3))
    for got, other in zip(grads, expected, strict=True):
        assert np.asarray(got).tobytes() == np.asarray(other).tobytes()
        assert jax.typeof(got).sharding.spec == P("x", None, "y", None)


def test_vmap_over_an_explicit_axis() -> None:
    """What is not mapped is repeated on the devices that have the mapped entries."""
    mesh = cpu_mesh(2, 2, explicit=True)
    arrays = draw((2, *WHOLE), WHOLE, (2, *WHOLE), dtype="float32")
    specs = [P("x", "y"), P("y"), P("x", "y")]
    mapped = jax.vmap(attention, in_axes=(0, None, 0))
    expected = mapped(*arrays)
    with _using(mesh):
        out = jax.jit(mapped)(*_place(mesh, arrays, specs))
    assert np.asarray(out).tobytes() == np.asarray(expected).tobytes()
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
    divided = _place(mesh, draw(WHOLE, WHOLE, WHOLE, dtype="float32"), specs)
    with _using(mesh), pytest.raises(cuflash.ArgumentValueError, match=says):
        jax.jit(attention)(*divided)


def _using(mesh: Any) -> Any:
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
