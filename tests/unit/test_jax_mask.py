"""``mask`` of ``cuflash.jax``: values, gradients and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash

from .jax_case import alike, draw, formula, jax, jnp, near, wide
from .jax_mask_case import KINDS, KV, QKV, WHOLE, Q, draw_mask, observed, pulled

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "q_offset": None, "softcap": 0.8},
    {"local_window_size": (3, 1), "q_offset": 4, "scale": 0.5},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_and_gradients(wide: None, kind: tuple[int, ...]) -> None:
    """A mask works with causal masks and windows. Rows without a visible key add no gradient."""
    options = OPTIONS[sum(kind) % len(OPTIONS)]
    arrays = [*draw(Q, KV, KV), draw_mask(kind, sum(kind))]
    one, other = (jax.jit(pulled(f, **options))(*arrays) for f in (attention, formula))
    near(one, other)


def test_outside_of_jit(wide: None) -> None:
    arrays = [*draw(Q, KV, KV), draw_mask((3, 1, 7, 11))]
    near(pulled(attention)(*arrays), jax.jit(pulled(formula))(*arrays))


@st.composite
def _calls(given: Any) -> tuple[Any, ...]:
    """Sizes, the shape of a mask, whether there is a bias, and keywords that JAX has too."""
    batch, group, heads_kv = (given(st.integers(1, 3)) for _ in range(3))
    rows, keys = (given(st.integers(1, 12)) for _ in range(2))
    full = (batch, group * heads_kv, rows, keys)
    shape = tuple(size if given(st.booleans()) else 1 for size in full)
    options = given(
        st.fixed_dictionaries(
            {"is_causal": st.booleans()},
            optional={
                "local_window_size": st.tuples(st.integers(0, 9), st.integers(0, 9)),
                "scale": st.sampled_from([0.2, 1.0]),
            },
        )
    )
    return full, heads_kv, shape, given(st.booleans()), options, given(st.integers(0, 99))


@settings(deadline=None, max_examples=12)
@given(_calls())
@example(((2, 4, 6, 9), 2, (2, 4, 6, 9), True, {"is_causal": True}, 0))
@example(((2, 4, 6, 9), 1, (1, 1, 1, 9), False, {"is_causal": False}, 1))
def test_it_is_jaxs_own_function(call: tuple[Any, ...]) -> None:
    """Rows that see no key are left out: for them JAX returns the mean of all values."""
    (batch, heads, rows, keys), heads_kv, shape, with_bias, options, seed = call
    q, kv = (batch, rows, heads, 8), (batch, keys, heads_kv, 8)
    *qkv, bias = draw(q, kv, kv, (1, heads, rows, keys), dtype="float32", seed=seed)
    mask = draw_mask(shape, seed)
    more = {"bias": bias} if with_bias else {}
    _, lse = formula(*qkv, mask=mask, return_lse=True, **options)
    alive = jnp.isfinite(lse).swapaxes(1, 2)[..., None]

    def total(function: Any, **theirs: Any) -> Any:
        def of(q: Any, k: Any, v: Any, more: Any) -> Any:
            out = function(q, k, v, mask=mask, **more, **options, **theirs)
            return jnp.sin(jnp.where(alive, out, 0)).sum(), out

        return jax.grad(of, (*QKV, 3), has_aux=True)

    mine, out = total(attention)(*qkv, more)
    of_jax = total(jax.nn.dot_product_attention, implementation="xla")
    theirs, expected = jax.jit(of_jax)(*qkv, more)
    assert not jnp.where(alive, 0, out).any()
    np.testing.assert_allclose(out, jnp.where(alive, expected, 0), atol=4e-6)
    for one, other in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        np.testing.assert_allclose(one, other, atol=4e-5)


@pytest.mark.parametrize(
    "kind", [(1, *WHOLE[1:]), WHOLE[1:], (1, 7, 1), (7, 11), (11,), ()], ids=str
)
def test_without_a_batch(wide: None, kind: tuple[int, ...]) -> None:
    arrays = [*draw(Q[1:], KV[1:], KV[1:]), draw_mask(kind, 2, 0.8)]
    one, other = (jax.jit(pulled(f))(*arrays) for f in (attention, formula))
    near(one, other)


@pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "none"])
@pytest.mark.parametrize("kind", [WHOLE, (4, 1, 11)], ids=str)
def test_beside_every_array(wide: None, kind: tuple[int, ...], with_sinks: bool) -> None:
    *qkv, bias, slopes, sinks = draw(Q, KV, KV, (7, 11), (3, 4), (4,))
    arrays = {"bias": bias, "alibi_slopes": slopes} | ({"sinks": sinks} if with_sinks else {})
    mask = draw_mask(kind, 3)

    def of(function: Any) -> Any:
        def loss(arrays: Any, q: Any) -> Any:
            return jnp.sin(function(q, *qkv[1:], mask=mask, is_causal=True, **arrays)).sum()

        gradients, dq = jax.jit(jax.grad(loss, (0, 1)))(arrays, qkv[0])
        return [*(gradients[name] for name in arrays), dq]

    near(of(attention), of(formula))


@pytest.mark.parametrize("wanted", [QKV, (0,), (1, 2)], ids=str)
def test_it_is_no_part_of_what_is_differentiated(wide: None, wanted: tuple[int, ...]) -> None:
    arrays = [*draw(Q, KV, KV), draw_mask((7, 11))]
    (got, _), ran = observed(pulled(attention, wanted), *arrays)
    near(got, pulled(formula, wanted)(*arrays)[0])
    names = tuple("qkv"[i] for i in wanted)
    assert [problem.wrt for problem in ran if problem.operation == "backward"] == [names]


@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("mapped", [True, False], ids=["vmap", "one"])
def test_its_cotangent_is_of_no_numbers(compiled: Any, mapped: bool) -> None:
    """JAX has no cotangent for booleans, even if a caller asks for it."""
    *qkv, mask = [*draw(Q, KV, KV, dtype="float32"), draw_mask(WHOLE)]
    function = lambda *a: attention(*a[:3], mask=a[3])  # noqa: E731
    if mapped:
        function = jax.vmap(function)
        qkv, mask = [a[None] for a in qkv], mask[None]
    out, pull = jax.vjp(compiled(function), *qkv, mask)
    *others, dmask = pull(out)
    assert (dmask.dtype, dmask.shape) == (jax.dtypes.float0, mask.shape)
    _, plain = jax.vjp(lambda *a: function(*a, mask), *qkv)
    for one, other in zip(others, plain(out), strict=True):
        alike(one, other)
    total = compiled(lambda *a: function(*a).sum())
    _, dmask = jax.grad(total, (0, 3), allow_int=True)(*qkv, mask)
    assert (dmask.dtype, dmask.shape) == (jax.dtypes.float0, mask.shape)
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jax.grad(total, 3)(*qkv, mask)


def test_other_derivatives_are_as_without_one() -> None:
    """Forward mode and second derivatives are refused."""
    *qkv, mask = [*draw(Q, KV, KV, dtype="float32"), draw_mask(WHOLE)]
    of_query = lambda q: attention(q, *qkv[1:], mask=mask)  # noqa: E731
    with pytest.raises(cuflash.UnsupportedError, match=r"jax\.grad"):
        jax.jvp(of_query, qkv[:1], qkv[:1])
    with pytest.raises(cuflash.UnsupportedError, match="first derivatives alone"):
        jax.grad(lambda q: jax.grad(lambda p: of_query(p).sum())(q).sum())(qkv[0])


@pytest.mark.parametrize(
    ("of_arrays", "cast"), list(itertools.product(["float16", "bfloat16", "float32"], repeat=2))
)
def test_a_cast_leaves_it_as_it_is(of_arrays: str, cast: str) -> None:
    qkv = draw(Q, KV, KV, dtype=of_arrays)
    mask = draw_mask((3, 1, 7, 11))
    given, (problem,) = observed(lambda *a: attention(*a, mask=mask, dtype=cast), *qkv)
    assert given.dtype == cast
    assert problem.operands["mask"].dtype == "bool"
    alike(given, attention(*(array.astype(cast) for array in qkv), mask=mask))


def test_in_a_loop_of_layers_computed_anew(wide: None) -> None:
    q, k, v = draw(Q, KV, KV)
    masks = draw_mask((5, 1, 1, 7, 11))

    def layers(function: Any) -> Any:
        @jax.checkpoint
        def layer(q: Any, mask: Any) -> Any:
            return q + function(q, k, v, mask=mask), None

        return jax.jit(jax.grad(lambda q: jnp.sin(jax.lax.scan(layer, q, masks)[0]).sum()))(q)

    near(layers(attention), layers(formula))


@pytest.mark.parametrize("mask", [True, False], ids=str)
@pytest.mark.parametrize("axes", range(5))
def test_a_mask_that_shows_all_or_nothing(mask: bool, axes: int) -> None:
    qkv = draw(Q, KV, KV, dtype="float32")
    out, lse = attention(*qkv, mask=np.full((1,) * axes, mask)[..., None][..., 0], return_lse=True)
    if mask:
        alike(out, attention(*qkv))
    else:
        assert not out.any()
        assert np.isneginf(lse).all()


def test_without_entries_queries_or_keys() -> None:
    for q, keys, shape in (
        ((0, 7, 4, 8), 11, (1, 4, 7, 11)),
        ((0, 7, 4, 8), 11, (0, 1, 7, 11)),
        ((3, 0, 4, 8), 11, (4, 1, 11)),
        ((3, 7, 4, 8), 0, (4, 7, 1)),
    ):
        kv = (q[0], keys, 2, 8)
        arrays = [*draw(q, kv, kv, dtype="float32"), jnp.ones(shape, bool)]
        gradients, (out, _) = pulled(attention)(*arrays)
        assert out.shape == q
        assert not any(array.any() for array in (out, *gradients))


SHAPES = [(7, 12), (3, 2, 7, 11), (2, 1, 1, 1), (3, 1, 1), (1, *WHOLE), (0, 1, 1, 1), (7, 0)]
DTYPES = ["int8", "int32", "uint8", "uint32", "float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("mapped", [True, False], ids=["vmap", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_shapes_are_refused(shape: tuple[int, ...], mapped: bool) -> None:
    arrays = [*draw(Q, KV, KV, dtype="float32"), jnp.ones(shape, bool)]
    says = (
        rf"mask: got shape \({', '.join(map(str, shape))}\); expected \(3, 4, 7, 11\) \(batch, he"
    )
    function = lambda *a: attention(*a[:3], mask=a[3])  # noqa: E731
    if mapped:
        arrays, function = [jnp.stack([a] * 2) for a in arrays], jax.vmap(function)
    for call in (function, jax.make_jaxpr(function)):
        with pytest.raises(cuflash.ArgumentValueError, match=says):
            call(*arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_are_refused(dtype: str) -> None:
    arrays = [*draw(Q, KV, KV, dtype="float32"), jnp.ones(WHOLE, dtype)]
    says = rf"mask: got dtype {dtype}; expected bool: .*mask != 0; numbers to add are bias"
    function = lambda *a: attention(*a[:3], mask=a[3], dtype="float32")  # noqa: E731
    for call in (function, jax.make_jaxpr(function)):
        with pytest.raises(cuflash.ArgumentTypeError, match=says):
            call(*arrays)
    with pytest.raises(cuflash.ArgumentTypeError, match=r"mask: got builtins\.ellipsis; expected"):
        attention(*arrays[:3], mask=...)


@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (1, 1, 4, 7, 11), (2, 1, 11), (3, 4, 7, 11)])
def test_without_a_batch_there_is_one_of_one(shape: tuple[int, ...]) -> None:
    arrays = draw(Q[1:], KV[1:], KV[1:], dtype="float32")
    with pytest.raises(cuflash.ArgumentValueError, match=r"mask: .* expected \(1, 4, 7, 11\)"):
        attention(*arrays, mask=np.ones(shape, bool))
