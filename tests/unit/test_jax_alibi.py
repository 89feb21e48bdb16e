"""``alibi_slopes`` of ``cuflash.jax`` and their gradient, under JAX's transformations."""

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

Q, KV, HEADS, BATCH = (2, 9, 4, 8), (2, 13, 2, 8), (4,), (2, 4)
ALL = (0, 1, 2, 3)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "q_offset": None, "softcap": 0.8},
    {"local_window_size": (3, 1), "q_offset": 4, "scale": 0.5},
]
SHAPES = pytest.mark.parametrize("shape", [HEADS, BATCH], ids=["heads", "batch"])


def total(function: Any, **options: Any) -> Any:
    """A function that returns a loss of the output and the log-sum-exp."""

    def of(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        out, lse = function(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
        return jnp.sin(2 * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()

    return of


@SHAPES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_values_and_gradients(
    wide: None, compiled: bool, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """The gradient of slopes of shape (heads,) is summed over the batch."""
    arrays = draw(Q, KV, KV, shape)
    *qkv, slopes = arrays
    got = attention(*qkv, alibi_slopes=slopes, return_lse=True, **options)
    near(got, formula(*qkv, alibi_slopes=slopes, return_lse=True, **options))
    gradients = jax.grad(total(attention, **options), ALL)
    gradients = jax.jit(gradients) if compiled else gradients
    near(gradients(*arrays), jax.grad(total(formula, **options), ALL)(*arrays))


def test_beside_sinks(wide: None) -> None:
    """With slopes and sinks in one call, the gradients of both agree with the formula."""
    *qkv, slopes, sinks = draw(Q, KV, KV, BATCH, HEADS)

    def of(function: Any) -> Any:
        def loss(slopes: Any, sinks: Any) -> Any:
            return jnp.sin(function(*qkv, alibi_slopes=slopes, sinks=sinks)).sum()

        return jax.grad(loss, (0, 1))(slopes, sinks)

    near(of(attention), of(formula))


def test_without_a_batch(wide: None) -> None:
    arrays = draw(Q[1:], KV[1:], KV[1:], HEADS)
    *qkv, slopes = arrays
    near(attention(*qkv, alibi_slopes=slopes), formula(*qkv, alibi_slopes=slopes))
    near(jax.grad(total(attention), ALL)(*arrays), jax.grad(total(formula), ALL)(*arrays))


def test_the_position_is_that_of_jax(wide: None) -> None:
    """Positions follow ``q_offset`` as in the library; here its default is 0."""
    *qkv, slopes = draw(Q, KV, KV, HEADS)
    arrays = [np.asarray(array) for array in qkv]
    for q_offset in (0, None, -3):
        got = attention(*qkv, alibi_slopes=slopes, q_offset=q_offset)
        other = cuflash.attention(
            *arrays, alibi_slopes=np.asarray(slopes), q_offset=q_offset, backend="numpy"
        )
        near(got, other)
    assert (attention(*qkv, alibi_slopes=slopes) != got).any()


def test_a_window_that_shows_nothing(wide: None) -> None:
    *qkv, slopes = draw(Q, KV, KV, HEADS)
    options: dict[str, Any] = {"local_window_size": (-3, 1), "return_lse": True}
    out, lse = attention(*qkv, alibi_slopes=slopes, **options)
    assert not out.any()
    assert np.isneginf(lse).all()
    gradients = jax.grad(lambda *a: attention(*a[:3], alibi_slopes=a[3], **options)[0].sum(), ALL)
    assert not any(gradient.any() for gradient in gradients(*qkv, slopes))


@SHAPES
@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_what_is_wanted_is_computed(wide: None, count: int, shape: tuple[int, ...]) -> None:
    arrays = draw(Q, KV, KV, shape)
    expected = jax.grad(total(formula), ALL)(*arrays)
    for wanted in [ALL, *itertools.combinations(ALL, count)]:
        ran: list[Any] = []
        with dispatch.observe(ran.append):
            got = jax.block_until_ready(jax.grad(total(attention), wanted)(*arrays))
        near(got, tuple(expected[i] for i in wanted))
        names = tuple(("q", "k", "v", "alibi_slopes")[i] for i in wanted)
        assert [plan.problem.wrt for plan in ran if plan.problem.operation == "backward"] == [names]


@SHAPES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_slopes_of_halves_are_float32(dtype: str, shape: tuple[int, ...]) -> None:
    qkv = draw(Q, KV, KV, dtype=dtype)
    (slopes,) = draw(shape, dtype="float32", seed=4)
    out = attention(*qkv, alibi_slopes=slopes)
    expected = formula(*(array.astype("float32") for array in qkv), alibi_slopes=slopes)
    assert out.dtype == qkv[0].dtype
    np.testing.assert_allclose(out.astype("float32"), expected, atol=3e-2)

    def summed(slopes: Any) -> Any:
        return attention(*qkv, alibi_slopes=slopes).astype("float32").sum()

    gradient = jax.grad(summed)(slopes)
    assert (gradient.shape, gradient.dtype) == (slopes.shape, np.float32)


@SHAPES
@pytest.mark.parametrize("axes", [*itertools.product((0, None), repeat=2), (1, 0), (2, 1)])
def test_under_vmap(
    wide: None, axes: tuple[int | None, int | None], shape: tuple[int, ...]
) -> None:
    """Queries and slopes are mapped or not, and every mapped entry has its own gradient."""
    of_q, of_slopes = axes
    in_axes = (of_q, None, 0 if of_q is None else of_q, of_slopes)
    arrays = []
    for seed, (size, axis) in enumerate(zip([Q, KV, KV, shape], in_axes, strict=True)):
        whole = size if axis is None else (*size[:axis], 3, *size[axis:])
        arrays += draw(whole, seed=seed)
    for of in (
        lambda f: lambda *a: f(*a[:3], alibi_slopes=a[3], is_causal=True, return_lse=True),
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
    """The outer vmap, the inner one, both or none map the slopes. Both map the sinks."""
    outer, inner = axes
    shape = tuple(n for n, axis in ((2, outer), (3, inner)) if axis is not None) + HEADS
    arrays = draw((2, 3, *Q), (2, 3, *KV), (3, *KV), shape)

    def twice(function: Any) -> Any:
        one = jax.vmap(function, in_axes=(0, 0, 0, inner))
        return jax.vmap(one, in_axes=(0, 0, None, outer))(*arrays)

    def beside_sinks(function: Any) -> Any:
        return lambda q, k, v, slopes: function(q, k, v, alibi_slopes=slopes, sinks=q[0, 0, :, 0])

    near(twice(beside_sinks(attention)), twice(beside_sinks(formula)))
    near(twice(jax.grad(total(attention), ALL)), twice(jax.grad(total(formula), ALL)))


@SHAPES
def test_slopes_of_zero_change_no_score(shape: tuple[int, ...]) -> None:
    qkv = draw(Q, KV, KV, dtype="float32")
    alike(attention(*qkv, alibi_slopes=jnp.zeros(shape)), attention(*qkv))


REFUSED: list[tuple[Any, Any, str]] = [
    (np.zeros(3, np.float32), cuflash.ArgumentValueError, r"got shape \(3,\); expected \(4,\)"),
    (np.zeros((1, 4), np.float32), cuflash.ArgumentValueError, r"got shape \(1, 4\); expected"),
    (np.zeros((1, 2, 4), np.float32), cuflash.ArgumentValueError, r"got shape \(1, 2, 4\)"),
    (np.zeros((), np.float32), cuflash.ArgumentValueError, r"got shape \(\)"),
    (np.zeros(4, np.int32), cuflash.ArgumentTypeError, "got dtype int32; expected one of"),
    (np.zeros(4, np.float16), cuflash.ArgumentTypeError, "got dtype float16; expected float32"),
    (..., cuflash.ArgumentTypeError, "got builtins.ellipsis; expected an array"),
]


@pytest.mark.parametrize(("slopes", "error", "says"), REFUSED, ids=str)
def test_other_slopes_are_refused(slopes: Any, error: Any, says: str) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(error, match=f"alibi_slopes: {says}"):
        attention(*arrays, alibi_slopes=slopes)


@pytest.mark.parametrize("shape", [(), (1, 4), (2, 4), (3,)], ids=str)
def test_without_a_batch_there_are_slopes_of_heads_alone(shape: tuple[int, ...]) -> None:
    arrays = draw(Q[1:], KV[1:], KV[1:], dtype="float32")
    with pytest.raises(cuflash.ArgumentValueError, match=r"alibi_slopes: .* expected \(4,\)"):
        attention(*arrays, alibi_slopes=np.zeros(shape, np.float32))


def test_a_position_far_away_is_refused() -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(cuflash.ArgumentValueError, match="q_offset: got 1073741824 with alibi"):
        attention(*arrays, alibi_slopes=np.zeros(4, np.float32), q_offset=2**30)


@SHAPES
def test_the_same_bits_in_every_run(shape: tuple[int, ...]) -> None:
    arrays = draw(Q, KV, KV, shape, dtype="float32")
    gradients = jax.jit(jax.grad(total(attention), ALL))
    first = [np.asarray(g).tobytes() for g in gradients(*arrays)]
    for _ in range(3):
        assert [np.asarray(g).tobytes() for g in gradients(*arrays)] == first


def test_a_cast_of_the_query_is_one_of_its_slopes_where_they_need_it(wide: None) -> None:
    *qkv, slopes = draw(Q, KV, KV, HEADS)
    expected = attention(*(a.astype("float32") for a in qkv), alibi_slopes=slopes.astype("float32"))
    for given in (slopes, slopes.astype("float32")):
        got = attention(*qkv, alibi_slopes=given, dtype="float32")
        assert got.dtype == jnp.float32
        assert (got == expected).all()
    halves = [array.astype("float16") for array in qkv]
    got = attention(*halves, alibi_slopes=slopes.astype("float32"), dtype="float32")
    assert got.dtype == jnp.float32
