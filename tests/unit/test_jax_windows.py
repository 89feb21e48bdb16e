"""``local_window_size`` of ``cuflash.jax``: the rules of ``jax.nn``, gradients and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash

from .divided_case import GROUPED, WHOLE, P, run_divided
from .jax_case import cpu_mesh, draw, formula, jax, jnp, loss, near, seen_pairs, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV = (2, 9, 4, 8), (2, 13, 2, 8)
sides = st.integers(-15, 15)
windows = st.integers(0, 9) | sides | st.tuples(sides, sides)
lengths = st.sampled_from((1, 6, 13))


@settings(max_examples=40)
@given(windows, st.booleans(), lengths, lengths)
@example((-1, 3), False, 6, 6)
@example((3, -1), True, 6, 6)
@example((-4, 2), False, 13, 13)
def test_the_rules_are_those_of_jax(window: Any, is_causal: bool, queries: int, keys: int) -> None:
    """Rows that see no key differ: they are 0 in ``cuflash`` and the mean of all values in JAX."""
    arrays = draw((2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8), dtype="float32")
    options = {"is_causal": is_causal, "local_window_size": window}
    got = np.asarray(attention(*arrays, **options))
    expected = np.asarray(jax.nn.dot_product_attention(*arrays, **options))
    dead = ~seen_pairs(queries, keys, **options).any(axis=1)
    np.testing.assert_allclose(got[:, ~dead], expected[:, ~dead], atol=1e-5)
    assert (got[:, dead] == 0).all()


@pytest.mark.parametrize("q_offset", [0, None, -4])
@pytest.mark.parametrize(
    ("window", "is_causal"),
    [(2, False), ((3, 2), True), ((-2, 4), False), ((5, -2), True), ((-3, 1), False)],
)
def test_gradients(wide: None, window: Any, q_offset: int | None, is_causal: bool) -> None:
    arrays = draw(Q, KV, KV)
    options = {"local_window_size": window, "q_offset": q_offset, "is_causal": is_causal}
    out, lse = attention(*arrays, **options, return_lse=True)
    expected, expected_lse = formula(*arrays, **options, return_lse=True)
    live = jnp.isfinite(expected_lse)
    near(out, expected)
    near(jnp.where(live, lse, 0), jnp.where(live, expected_lse, 0))
    assert (lse[~live] == -jnp.inf).all()

    def of_live(function: Any) -> Any:
        def total(*qkv: Any) -> Any:
            out, lse = function(*qkv, **options, return_lse=True)
            lse = jnp.where(live, lse, 0)
            return jnp.sin(2 * out).sum() + jnp.sin(2 * lse).sum()

        return jax.jit(jax.grad(total, (0, 1, 2)))(*arrays)

    near(of_live(attention), of_live(formula))


def test_under_vmap(wide: None) -> None:
    arrays = draw((3, *Q), KV, (3, *KV))
    options = {"local_window_size": (4, 1)}
    axes = (0, None, 0)
    for function in (attention, jax.grad(loss(attention, **options), (0, 1, 2))):
        extra = options if function is attention else {}
        mapped = jax.vmap(lambda *qkv, f=function, e=extra: f(*qkv, **e), in_axes=axes)(*arrays)
        each = [function(arrays[0][i], arrays[1], arrays[2][i], **extra) for i in range(3)]
        expected = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
        jax.tree.map(near, mapped, expected)


@pytest.mark.parametrize("spec", [P("x"), P("x", None, "y")], ids=str)
def test_divided_over_devices(spec: Any) -> None:
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    gradients = jax.grad(loss(attention, local_window_size=(2, 1), return_lse=True), (0, 1, 2))
    _, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, [spec] * 3)
    assert not collectives


def test_a_window_is_that_of_the_numpy_functions(wide: None) -> None:
    """A bound beyond all keys is no bound; None as the whole argument is no window."""
    arrays = draw(Q, KV, KV)
    host = [np.asarray(array) for array in arrays]
    for window, theirs in ((2, (2, 2)), ((3, 0), (3, 0)), ((3, 99), (3, None)), (None, None)):
        got = attention(*arrays, local_window_size=window)
        expected = cuflash.attention(*host, window_size=theirs, q_offset=0, backend="numpy")
        assert np.asarray(got).tobytes() == expected.tobytes()
    got = attention(*arrays, is_causal=True, local_window_size=(3, 5))
    assert (got == attention(*arrays, local_window_size=(3, 0))).all()


@pytest.mark.parametrize("window", [np.int64(2), np.asarray(2), [2, 2], (np.int32(2), 2)])
def test_sides_are_any_integers(window: Any) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    expected = attention(*arrays, local_window_size=2)
    assert (attention(*arrays, local_window_size=window) == expected).all()


@pytest.mark.parametrize("window", [True, 2.0, "2", (1,), (1, 2, 3), (1, None), (True, 1), {1: 2}])
def test_other_windows_are_refused(window: Any) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(cuflash.ArgumentTypeError, match=r"local_window_size: got .*; expected"):
        attention(*arrays, local_window_size=window)


def test_a_traced_window_is_refused() -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    says = "local_window_size: got an array that JAX is tracing"
    with pytest.raises(cuflash.ArgumentTypeError, match=says):
        jax.jit(lambda window: attention(*arrays, local_window_size=window))(3)
    with pytest.raises(cuflash.ArgumentTypeError, match=says):
        jax.jit(lambda window: attention(*arrays, local_window_size=(window, 1)))(3)
