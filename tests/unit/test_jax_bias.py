"""``bias`` of ``cuflash.jax`` and its gradient."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.jax.entries import holes, sharing

from .jax_bias_case import ALL, KV, WHOLE, Q, expected, four, observed, pulled, total
from .jax_case import alike, draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "q_offset": None, "softcap": 0.8},
    {"local_window_size": (3, 1), "q_offset": 4, "scale": 0.5},
]
#: Shapes of a bias: every axis is whole or 1, or the first axes are left out.
KINDS = [
    *itertools.product(*[(size, 1) for size in WHOLE]),
    *[WHOLE[lacking:] for lacking in range(1, 5)],
    (1, 11),
    (4, 1, 1),
]
ONE = [(1, 4, 7, 11), (1, 1, 1, 11), (4, 7, 1), (7, 11)]


@pytest.mark.parametrize(
    ("batch", "shape"), [*((3, kind) for kind in KINDS), *((1, kind) for kind in ONE)], ids=str
)
def test_values_and_gradients(wide: None, shape: tuple[int, ...], batch: int) -> None:
    """The gradient is summed over the axes along which the bias is broadcast."""
    arrays = draw((batch, *Q[1:]), (batch, *KV[1:]), (batch, *KV[1:]), shape)
    options = OPTIONS[sum(shape) % len(OPTIONS)]
    got = jax.jit(pulled(attention, **options))(*arrays)
    full = (batch, *WHOLE[1:])
    (*others, dbias), results = expected(*arrays, axes=four(shape), full=full, **options)
    near(got, ([*others, dbias.reshape(shape)], results))


def test_outside_of_jit(wide: None) -> None:
    arrays = draw(Q, KV, KV, (4, 1, 11))
    near(attention(*arrays), jax.jit(formula)(*arrays))
    gradients = jax.grad(total(attention), ALL)(*arrays)
    near(gradients, jax.jit(jax.grad(total(formula), ALL))(*arrays))


@pytest.mark.parametrize("kind", [(1, 4, 7, 11), (3, 1, 1, 11)], ids=str)
def test_as_jax_computes_it(kind: tuple[int, ...]) -> None:
    arrays = draw(Q, KV, KV, kind, dtype="float32")
    jaxs = jax.nn.dot_product_attention
    expected = jaxs(*arrays, is_causal=True)
    np.testing.assert_allclose(attention(*arrays, is_causal=True), expected, atol=2e-6)
    one, other = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a, is_causal=True)).sum(), ALL))(*arrays)
        for f in (attention, jaxs)
    )
    for got, wanted in zip(one, other, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize(
    "kind", [(1, *WHOLE[1:]), WHOLE[1:], (1, 7, 1), (7, 11), (11,), ()], ids=str
)
def test_without_a_batch(wide: None, kind: tuple[int, ...]) -> None:
    arrays = draw(Q[1:], KV[1:], KV[1:], kind)
    one, other = (jax.jit(pulled(function))(*arrays) for function in (attention, formula))
    near(one, other)


@pytest.mark.parametrize("kind", [WHOLE, (4, 1, 11)], ids=str)
def test_beside_slopes_and_sinks(wide: None, kind: tuple[int, ...]) -> None:
    *qkv, bias, slopes, sinks = draw(Q, KV, KV, kind, (3, 4), (4,))

    def of(function: Any) -> Any:
        def loss(bias: Any, slopes: Any, sinks: Any) -> Any:
            features = {"alibi_slopes": slopes, "sinks": sinks, "softcap": 1.5}
            return jnp.sin(function(*qkv, bias, is_causal=True, **features)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(bias, slopes, sinks)

    near(of(attention), of(formula))


def test_minus_infinity_hides_a_pair(wide: None) -> None:
    """A row with all pairs hidden is 0, and adds nothing to any gradient."""
    *qkv, bias = draw(Q, KV, KV, (1, 7, 11))
    seen = np.arange(11) <= np.arange(7)[:, None]
    near(attention(*qkv, jnp.where(seen, 0.0, -jnp.inf)), attention(*qkv, is_causal=True))
    hidden = jnp.where(seen & (np.arange(7) != 2)[:, None], bias, -jnp.inf)
    out, lse = attention(*qkv, hidden, return_lse=True)
    assert not out[:, 2].any()
    assert np.isneginf(lse[..., 2]).all()
    gradients = jax.grad(total(attention), ALL)(*qkv, hidden)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[0][:, 2].any()
    assert not gradients[3][..., 2, :].any()
    assert not np.where(seen, 0, gradients[3]).any()


@pytest.mark.parametrize("kind", [WHOLE, (1, 7, 1)], ids=str)
def test_only_what_is_wanted_is_computed(wide: None, kind: tuple[int, ...]) -> None:
    arrays = draw(Q, KV, KV, kind)
    expected = jax.jit(jax.grad(total(formula), ALL))(*arrays)
    for wanted in ((3,), (0,), (0, 1, 2), (1, 3), ALL):
        got, ran = observed(jax.grad(total(attention), wanted), *arrays)
        near(got, tuple(expected[i] for i in wanted))
        names = tuple(("q", "k", "v", "bias")[i] for i in wanted)
        assert [problem.wrt for problem in ran if problem.operation == "backward"] == [names]
        assert all(problem.operands["bias"].entries is None for problem in ran)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("of_bias", ["q", "float32"])
def test_dtypes(dtype: str, of_bias: str) -> None:
    """A bias has the query's dtype or float32, and its gradient has the dtype of the bias."""
    qkv = draw(Q, KV, KV, dtype=dtype)
    (bias,) = draw((4, 1, 11), dtype=dtype if of_bias == "q" else of_bias, seed=4)
    out, lse = attention(*qkv, bias, return_lse=True)
    expected = formula(*(array.astype("float32") for array in (*qkv, bias)))
    assert (out.dtype, lse.dtype) == (qkv[0].dtype, np.float32)
    np.testing.assert_allclose(out.astype("float32"), expected, atol=3e-2)
    gradient = jax.grad(lambda bias: attention(*qkv, bias).astype("float32").sum())(bias)
    assert (gradient.shape, gradient.dtype) == (bias.shape, bias.dtype)


@pytest.mark.parametrize("of_bias", ["float16", "float32"])
def test_a_cast_of_the_query_is_one_of_its_bias(of_bias: str) -> None:
    *qkv, bias = draw(Q, KV, KV, (4, 7, 11), dtype="float16")
    given = attention(*qkv, bias.astype(of_bias), dtype="float32")
    whole = [x.astype("float32") for x in (*qkv, bias)]
    assert given.dtype == jnp.float32
    alike(given, attention(*whole))
    to_half = attention(*whole[:3], whole[3], dtype="float16")
    assert to_half.dtype == jnp.float16


def test_in_a_loop_of_layers_computed_anew(wide: None) -> None:
    q, k, v, bias = draw(Q, KV, KV, (5, 1, 4, 7, 11))

    def layers(function: Any) -> Any:
        @jax.checkpoint
        def layer(q: Any, bias: Any) -> Any:
            return q + function(q, k, v, bias), None

        return jax.jit(jax.grad(lambda b: jnp.sin(jax.lax.scan(layer, q, b)[0]).sum()))(bias)

    near(layers(attention), layers(formula))


def test_without_entries_queries_or_keys() -> None:
    """The gradient is zero where nothing contributes to it."""
    for q, keys, shape, mapped in (
        ((0, 7, 4, 8), 11, (1, 4, 7, 11), (2, 2)),
        ((0, 7, 4, 8), 11, (0, 1, 7, 11), (2, 2)),
        ((3, 0, 4, 8), 11, (4, 1, 11), (2, 1)),
        ((3, 7, 4, 8), 0, (4, 7, 1), (0, 2)),
    ):
        kv = (q[0], keys, 2, 8)
        arrays = draw(q, kv, kv, shape, dtype="float32")
        gradient = jax.grad(total(attention), 3)(*arrays)
        assert gradient.shape == shape
        assert not gradient.any()
        sizes = [(*mapped, *size) for size in (q, kv, kv)]
        arrays = draw(*sizes, (mapped[0], *shape), dtype="float32")
        inner = jax.vmap(jax.grad(total(attention), 3), in_axes=(0, 0, 0, None))
        gradients = jax.jit(jax.vmap(inner))(*arrays)
        assert gradients.shape == (*mapped, *shape)
        assert not gradients.any()


def test_the_same_bits_in_every_run() -> None:
    arrays = draw(Q, KV, KV, (1, 1, 7, 11), dtype="float32")
    gradients = jax.jit(jax.grad(total(attention), ALL))
    first = [np.asarray(g).tobytes() for g in gradients(*arrays)]
    for _ in range(3):
        assert [np.asarray(g).tobytes() for g in gradients(*arrays)] == first


@pytest.mark.parametrize("full", [(2, 3, 2), (3, 1, 2), (2, 3), (1, 4), (2, 2, 3, 2)], ids=str)
def test_entries_that_share(full: tuple[int, ...]) -> None:
    """The numbers of neighbours that share an entry of a bias agree with broadcasting."""
    places = np.arange(np.prod(full)).reshape(full)
    for own in itertools.product(*[{1, size} for size in full]):
        lacking = [axis for axis, size in enumerate(own) if size < full[axis]]
        filled = list(own)
        for axis in holes(own, full):
            assert axis in lacking
            filled[axis] = full[axis]
        bias = np.arange(np.prod(filled))
        read = np.broadcast_to(bias.reshape(filled), full).ravel()
        of_gradient = places[..., :1] if own[-1] == 1 else places
        for differentiated in (False, True):
            shared = sharing(filled, full, differentiated)
            n, m = shared or (1, places.size // bias.size)
            expected = places.ravel() // n % bias.size
            assert (read == (expected if shared or bias.size > 1 else 0)).all()
            if differentiated:
                assert places.size // m == of_gradient.size


REFUSED: list[tuple[Any, Any, str]] = [
    (np.zeros((7, 12), np.float32), "value", r"got shape \(7, 12\); expected \(3, 4, 7, 11\)"),
    (np.zeros((3, 2, 7, 11), np.float32), "value", r"got shape \(3, 2, 7, 11\); expected \(3, 4,"),
    (
        np.zeros((2, 1, 1, 1), np.float32),
        "value",
        r"got shape \(2, 1, 1, 1\); expected .*batch, he",
    ),
    (np.zeros((3, 1, 1), np.float32), "value", r"got shape \(3, 1, 1\); .* may be left out"),
    (np.zeros((1, *WHOLE), np.float32), "value", r"got shape \(1, 3, 4, 7, 11\); expected \(3, 4"),
    (np.zeros((0, 1, 1, 1), np.float32), "value", r"got shape \(0, 1, 1, 1\); expected \(3, 4"),
    (np.zeros((7, 11), np.int32), "type", "got dtype int32; expected one of 'float16'"),
    (np.zeros((7, 11), bool), "type", "got dtype bool; expected one of"),
    (0, "type", "got dtype int32; expected one of"),
    (np.zeros((7, 11), np.float16), "type", "got dtype float16; expected float32"),
    (..., "type", "got builtins.ellipsis; expected an array"),
]


@pytest.mark.parametrize(("bias", "error", "says"), REFUSED, ids=str)
def test_other_biases_are_refused(bias: Any, error: str, says: str) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    kind = {"value": cuflash.ArgumentValueError, "type": cuflash.ArgumentTypeError}[error]
    with pytest.raises(kind, match=f"bias: {says}"):
        attention(*arrays, bias)
    if bias is not ...:
        with pytest.raises(kind, match=f"bias: {says}"):  # while tracing
            jax.make_jaxpr(attention)(*arrays, bias)


@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (1, 1, 4, 7, 11), (2, 1, 11), (3, 4, 7, 11)])
def test_without_a_batch_there_is_one_of_one(shape: tuple[int, ...]) -> None:
    arrays = draw(Q[1:], KV[1:], KV[1:], dtype="float32")
    with pytest.raises(cuflash.ArgumentValueError, match=r"bias: .* expected \(1, 4, 7, 11\)"):
        attention(*arrays, np.zeros(shape, np.float32))


def test_a_mapped_bias_is_checked_without_its_mapped_axis() -> None:
    arrays = draw((2, *Q), (2, *KV), (2, *KV), (2, 7, 12), dtype="float32")
    with pytest.raises(cuflash.ArgumentValueError, match=r"bias: got shape \(7, 12\)"):
        jax.vmap(attention)(*arrays)
