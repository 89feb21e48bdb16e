"""``sinks`` of ``cuflash.jax`` and their gradient, under JAX's transformations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from .jax_case import alike, draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV, H = (2, 9, 4, 8), (2, 13, 2, 8), (4,)
ALL = (0, 1, 2, 3)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "q_offset": -3},
    {"local_window_size": (3, 1), "q_offset": 9},
]


def total(function: Any, **options: Any) -> Any:
    """A number made of the output and of the log-sum-exp."""

    def of(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = function(q, k, v, sinks=sinks, return_lse=True, **options)
        return jnp.sin(2 * out).sum() + jnp.sin(3 * lse).sum()

    return of


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_values_and_gradients(wide: None, compiled: bool, options: dict[str, Any]) -> None:
    """A row that sees no key has the output 0 and its sink as lse; the sink gets a gradient."""
    arrays = draw(Q, KV, KV, H)
    *qkv, sinks = arrays
    got = attention(*qkv, sinks=sinks, return_lse=True, **options)
    near(got, formula(*qkv, sinks=sinks, return_lse=True, **options))
    gradients = jax.grad(total(attention, **options), ALL)
    gradients = jax.jit(gradients) if compiled else gradients
    near(gradients(*arrays), jax.grad(total(formula, **options), ALL)(*arrays))


def test_without_a_batch(wide: None) -> None:
    *qkv, sinks = draw(Q[1:], KV[1:], KV[1:], H)
    near(attention(*qkv, sinks=sinks), formula(*qkv, sinks=sinks))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_what_is_wanted_is_computed(wide: None, count: int) -> None:
    arrays = draw(Q, KV, KV, H)
    expected = jax.grad(total(formula), ALL)(*arrays)
    subsets = [*itertools.combinations(ALL, count)]
    for wanted in [ALL, *subsets, *subsets]:  # JAX must not reuse one gradient for another
        ran: list[Any] = []
        with dispatch.observe(ran.append):
            got = jax.block_until_ready(jax.grad(total(attention), wanted)(*arrays))
        near(got, tuple(expected[i] for i in wanted))
        names = tuple(("q", "k", "v", "sinks")[i] for i in wanted)
        assert [plan.problem.wrt for plan in ran if plan.problem.operation == "backward"] == [names]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("of_sinks", ["q", "float32"])
def test_dtypes(dtype: str, of_sinks: str) -> None:
    *qkv, sinks = draw(Q, KV, KV, H, dtype=dtype)
    sinks = sinks.astype(dtype if of_sinks == "q" else of_sinks)
    out, lse = attention(*qkv, sinks=sinks, return_lse=True)
    expected = formula(*(a.astype("float32") for a in (*qkv,)), sinks=sinks.astype("float32"))
    assert (out.dtype, lse.dtype) == (qkv[0].dtype, np.float32)
    np.testing.assert_allclose(out.astype("float32"), expected, atol=2e-2)
    dsinks = jax.grad(lambda sinks: attention(*qkv, sinks=sinks).astype("float32").sum())(sinks)
    assert dsinks.dtype == sinks.dtype


@pytest.mark.parametrize("axes", [*itertools.product((0, None), repeat=2), (1, 0), (2, 1)])
def test_under_vmap(wide: None, axes: tuple[int | None, int | None]) -> None:
    """Queries and sinks are mapped or not; every mapped entry has a gradient of its own."""
    of_q, of_sinks = axes
    if axes == (None, None):
        axes = (0, None)
    in_axes = (of_q, None, 0 if axes == (0, None) and of_q is None else of_q, of_sinks)
    shapes = [Q, KV, KV, H]
    arrays = []
    for shape, axis, seed in zip(shapes, in_axes, range(4), strict=True):
        whole = shape if axis is None else (*shape[:axis], 3, *shape[axis:])
        arrays += draw(whole, seed=seed)
    for of in (
        lambda f: lambda *a: f(*a[:3], sinks=a[3], is_causal=True, return_lse=True),
        lambda f: jax.grad(total(f, is_causal=True), ALL),
    ):
        mapped = jax.vmap(of(attention), in_axes=in_axes)(*arrays)
        near(mapped, jax.vmap(of(formula), in_axes=in_axes)(*arrays))

    def summed(function: Any) -> Any:
        each = jax.vmap(total(function), in_axes=in_axes)
        return jax.grad(lambda *a: each(*a).sum(), ALL)(*arrays)

    near(summed(attention), summed(formula))


@pytest.mark.parametrize("axes", [*itertools.product((0, None), repeat=2)])
def test_under_two_vmaps(wide: None, axes: tuple[int | None, int | None]) -> None:
    """The sinks have the outer mapped axis, the inner one, both or neither."""
    outer, inner = axes
    sinks_shape = tuple(n for n, axis in ((2, outer), (3, inner)) if axis is not None) + H
    arrays = draw((2, 3, *Q), (2, 3, *KV), (3, *KV), sinks_shape)

    def twice(function: Any) -> Any:
        return jax.vmap(jax.vmap(function, in_axes=(0, 0, 0, inner)), in_axes=(0, 0, None, outer))(
            *arrays
        )

    near(twice(total(attention)), twice(total(formula)))
    near(twice(jax.grad(total(attention), ALL)), twice(jax.grad(total(formula), ALL)))


def test_minus_infinity_is_no_sink() -> None:
    *qkv, sinks = draw(Q, KV, KV, H, dtype="float32")
    without = attention(*qkv, return_lse=True)
    none = attention(*qkv, sinks=jnp.full_like(sinks, -jnp.inf), return_lse=True)
    for got, expected in zip(none, without, strict=True):
        alike(got, expected)


@pytest.mark.parametrize(
    ("sinks", "error", "says"),
    [
        (np.zeros(3, np.float32), cuflash.ArgumentValueError, r"sinks: got shape \(3,\); expected"),
        (np.zeros((1, 4), np.float32), cuflash.ArgumentValueError, "sinks: got shape"),
        (np.zeros(4, np.int32), cuflash.ArgumentTypeError, "sinks: got dtype int32"),
        (np.zeros(4, np.float16), cuflash.ArgumentTypeError, "sinks: got dtype float16"),
        (..., cuflash.ArgumentTypeError, "sinks: got builtins.ellipsis; expected an array"),
    ],
    ids=str,
)
def test_other_sinks_are_refused(sinks: Any, error: Any, says: str) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(error, match=says):
        attention(*arrays, sinks=sinks)


def test_the_same_bits_in_every_run() -> None:
    arrays = draw(Q, KV, KV, H, dtype="float32")
    gradients = jax.jit(jax.grad(total(attention), ALL))
    first = [np.asarray(g).tobytes() for g in gradients(*arrays)]
    for _ in range(3):
        assert [np.asarray(g).tobytes() for g in gradients(*arrays)] == first


@pytest.mark.parametrize("of_sinks", ["float16", "float32"])
def test_a_cast_of_the_query_is_one_of_its_sinks(of_sinks: str) -> None:
    *qkv, sinks = (jnp.asarray(x, "float16") for x in draw(Q, KV, KV, H))
    given = attention(*qkv, sinks=sinks.astype(of_sinks), dtype="float32")
    whole = [x.astype("float32") for x in (*qkv, sinks)]
    assert given.dtype == jnp.float32
    assert (given == attention(*whole[:3], sinks=whole[3])).all()
