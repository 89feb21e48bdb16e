"""Dropout of ``cuflash.jax``: values, gradients, vmap, divided arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

from .divided_case import GROUPED, WHOLE, P, run_divided
from .jax_case import alike, cpu_mesh, draw, formula, jax, jnp, loss, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV = (3, 7, 4, 8), (3, 11, 2, 8)
QKV = (0, 1, 2)


def _key(kind: str, seed: int) -> Any:
    """A key of two or four words, typed or not."""
    make = jax.random.key if kind.startswith("typed") else jax.random.PRNGKey
    return make(seed, impl="rbg" if kind.endswith("4") else "threefry2x32")


KEY_KINDS = ["typed 2", "raw 2", "typed 4", "raw 4"]


def _left(q: Any, keys: int, rate: float, key: Any, broadcast: bool) -> Any:
    """The factors by which dropout multiplies the weights, from the words of the key."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(key) if typed else key)
    shape = (1, 1, q.shape[1], keys) if broadcast else (q.shape[0], q.shape[2], q.shape[1], keys)
    kept = cuflash.dropout_mask(shape, dropout_p=rate, dropout_seed=words)
    return kept * (2**14 / round(2**14 * (1 - rate)))


def _options(rate: float, key: Any, broadcast: bool = False) -> dict[str, Any]:
    return {"dropout_rate": rate, "dropout_rng": key, "broadcast_dropout": broadcast}


def _pulled(function: Any, **options: Any) -> Any:
    """A function that returns the gradients of a loss for q, k and v, and the results."""

    def of(*arrays: Any) -> Any:
        results = function(*arrays, **options)
        return loss(lambda: results)(), results

    return jax.grad(of, QKV, has_aux=True)


@st.composite
def _calls(given: Any) -> tuple[Any, ...]:
    batch, group, heads_kv = (given(st.integers(1, 3)) for _ in range(3))
    rows, keys = (given(st.integers(1, 40)) for _ in range(2))
    rate = given(st.sampled_from([0.1, 0.3, 0.9]))
    key = _key(given(st.sampled_from(KEY_KINDS)), given(st.integers(0, 2**31 - 1)))
    more = given(
        st.fixed_dictionaries(
            {"is_causal": st.booleans()},
            optional={
                "local_window_size": st.just((3, 1)),
                "softcap": st.just(0.8),
                "return_lse": st.just(True),
            },
        )
    )
    shapes = (batch, rows, group * heads_kv, 8), (batch, keys, heads_kv, 8)
    return *shapes, rate, key, given(st.booleans()), more, given(st.booleans())


@settings(deadline=None, max_examples=10)
@given(_calls())
def test_values_and_gradients(call: tuple[Any, ...]) -> None:
    """The key's words select the dropped weights, whatever other features a call has."""
    q, kv, rate, key, broadcast, more, with_sinks = call
    arrays = draw(q, kv, kv, dtype="float32")
    more = {**more, "sinks": jnp.ones(q[2], jnp.float32)} if with_sinks else more
    if more.get("return_lse"):  # a window may hide all keys of a row
        more = {**more, "q_offset": None, "local_window_size": None}
    left = _left(arrays[0], kv[1], rate, key, broadcast)
    one = jax.jit(_pulled(attention, **_options(rate, key, broadcast), **more))(*arrays)
    other = _pulled(formula, left=left, **more)(*arrays)
    for got, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        size = np.abs(expected[np.isfinite(expected)]).max(initial=1)
        np.testing.assert_allclose(got, expected, atol=2e-5 * size)


@pytest.mark.parametrize("broadcast", [True, False])
def test_without_a_batch(wide: None, broadcast: bool) -> None:
    arrays, key = draw(Q[1:], KV[1:], KV[1:]), jax.random.key(3)
    left = _left(arrays[0][None], 11, 0.3, key, broadcast)[0]
    near(
        _pulled(attention, **_options(0.3, key, broadcast))(*arrays),
        _pulled(formula, left=left)(*arrays),
    )


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_a_key_may_be_traced(wide: None, kind: str) -> None:
    """A compiled step takes another key each time."""
    arrays = draw(Q, KV, KV)

    @jax.jit
    def step(key: Any, *arrays: Any) -> Any:
        return _pulled(attention, **_options(0.3, key))(*arrays)

    for seed in (1, 2):
        key = _key(kind, seed)
        near(
            step(key, *arrays),
            _pulled(formula, left=_left(arrays[0], 11, 0.3, key, False))(*arrays),
        )
    assert step._cache_size() == 1


def test_no_rate_needs_no_key(wide: None) -> None:
    arrays = draw(Q, KV, KV)
    for options in (
        {"dropout_rate": 0.0},
        {"dropout_rate": 0.5, "deterministic": True},
        _options(0.5, jax.random.key(0)) | {"deterministic": True},
    ):
        alike(attention(*arrays, **options), attention(*arrays))


def _entries(function: Any, axes: tuple[int | None, ...], *arrays: Any) -> Any:
    """Call a function for every entry, and stack the results as ``jax.vmap`` does."""
    size = next(len(a) for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    every = [
        function(*(a if axis is None else a[n] for a, axis in zip(arrays, axes, strict=True)))
        for n in range(size)
    ]
    return jax.tree.map(lambda *ones: jnp.stack(ones), *every)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize(
    "axes",
    [(0, 0, 0, None), (0, None, None, None), (None, 0, 0, 0), (None, None, None, 0)],
    ids=str,
)
def test_mapped_entries_draw_as_each_alone(wide: None, axes: Any, broadcast: bool) -> None:
    """With one key all entries draw the same bits; with mapped keys each entry has its own."""
    key = jax.random.key(9)
    shapes = [Q, KV, KV]
    arrays = draw(*((3, *s) if axis == 0 else s for s, axis in zip(shapes, axes, strict=False)))
    keys = key if axes[-1] is None else jax.random.split(key, 3)

    def of(q: Any, k: Any, v: Any, key: Any) -> Any:
        return _pulled(attention, **_options(0.3, key, broadcast))(q, k, v)

    near(jax.jit(jax.vmap(of, axes))(*arrays, keys), _entries(of, axes, *arrays, keys))


def test_entries_mapped_twice_and_heads_of_sinks(wide: None) -> None:
    """With mapped sinks, mapped entries become heads; all of them draw as the heads of one call."""
    key = jax.random.key(2)
    q, k, v, sinks = draw((2, 3, *Q), KV, KV, (3, 4))

    def of(sinks: Any, q: Any) -> Any:
        def total(sinks: Any, q: Any) -> Any:
            return loss(attention, **_options(0.4, key), sinks=sinks)(q, k, v)

        return jax.grad(total, (0, 1))(sinks, q)

    twice = jax.vmap(jax.vmap(of), (None, 0))(sinks, q)
    near(twice, _entries(functools.partial(_entries, of, (0, 0)), (None, 0), sinks, q))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize(
    "spec",
    [P("x", None, "y"), P("y", None, "x"), P(("x", "y")), P(None, None, "y"), P("y")],
    ids=str,
)
def test_divided_arrays_draw_as_whole_ones(spec: Any, broadcast: bool, explicit: bool) -> None:
    """Every device knows at which entry and head its arrays begin."""
    arrays = draw(WHOLE, GROUPED, GROUPED, dtype="float32")
    options = _options(0.3, jax.random.key(4), broadcast)
    run_divided(
        _pulled(attention, **options), cpu_mesh(2, 2, explicit=explicit), arrays, [spec] * 3
    )


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "x", None, "y"), P("y", None, None, "x")])
def test_mapped_entries_over_devices(spec: Any) -> None:
    arrays = [jnp.stack([a, -a]) for a in draw(WHOLE, GROUPED, GROUPED, dtype="float32")]
    options = _options(0.3, jax.random.key(4))
    run_divided(jax.vmap(_pulled(attention, **options)), cpu_mesh(2, 2), arrays, [spec] * 3)
