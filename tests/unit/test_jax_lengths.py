"""Sequence lengths do the same in ``cuflash.jax.attention`` as in ``jax.nn``."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import cuflash

from .jax_case import cpu_mesh, draw, jax, jnp, wide
from .jax_mask_case import QKV, draw_mask

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

BATCH, ROWS, KEYS, HEADS, DIM = 3, 7, 11, 4, 8
Q = (BATCH, ROWS, HEADS, DIM)
QUERIES, VALUES = "query_seq_lengths", "key_value_seq_lengths"
LENGTHS = {QUERIES: (0, 4, 7), VALUES: (11, 1, 6)}


def _lengths(*names: str) -> dict[str, Any]:
    return {name: jnp.asarray(LENGTHS[name], "int32") for name in names}


def _pulled(function: Any, arrays: Any, more: Any, **options: Any) -> Any:
    """The gradients of the arrays and of a bias if there is one, and the output."""

    def loss(arrays: Any, bias: Any) -> Any:
        out = function(*arrays, **bias, **more, **options)
        return jnp.sin(2 * out).sum(), out

    bias = {"bias": more.pop("bias")} if "bias" in more else {}
    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(tuple(arrays), bias)


def _alike(arrays: Any, more: dict[str, Any], **options: Any) -> None:
    mine = _pulled(attention, arrays, dict(more), implementation="cuflash", **options)
    theirs = _pulled(jax.nn.dot_product_attention, arrays, dict(more), **options)
    for one, other in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=4e-5)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"local_window_size": (2, 1)},
    {"local_window_size": 3, "is_causal": True, "scale": 0.4},
]
NAMES = [(), (QUERIES,), (VALUES,), (QUERIES, VALUES)]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: "+".join(names) or "whole")
@pytest.mark.parametrize("which", range(4))
def test_values_and_gradients_are_those_of_jax(names: tuple[str, ...], which: int) -> None:
    """Every counted query sees a key, because JAX does not set other rows to zero."""
    options, heads_kv = OPTIONS[which], (HEADS, 2, 1)[(which + len(names)) % 3]
    keys = ROWS if options.get("local_window_size") else KEYS
    more = _lengths(*names)
    if VALUES in more and "local_window_size" in options:
        more[VALUES] = jnp.asarray((7, 7, 6), "int32")  # the last rows still see a key
    kv = (BATCH, keys, heads_kv, DIM)
    *arrays, bias = draw(Q, kv, kv, (1, HEADS, ROWS, keys), dtype="float32")
    _alike(arrays, {**more, "bias": bias} if which % 2 else more, **options)


@pytest.mark.parametrize(
    "kind",
    [(BATCH, HEADS, ROWS, KEYS), (BATCH, HEADS, 1, KEYS), (1, 1, ROWS, KEYS), (BATCH, 1, 1, KEYS)],
    ids=str,
)
def test_a_mask_beside_lengths(kind: tuple[int, ...]) -> None:
    kv = (BATCH, KEYS, 2, DIM)
    arrays = draw(Q, kv, kv, dtype="float32")
    mask = draw_mask(kind, 1).at[..., 0].set(True)
    _alike(arrays, {**_lengths(QUERIES, VALUES), "mask": mask})


def test_no_array_of_pairs_is_made() -> None:
    sizes = (2, 512, 2, 8)
    arrays = draw(sizes, sizes, sizes, dtype="float32")
    lengths = jnp.asarray((100, 512), "int32")

    def loss(q: Any, k: Any, v: Any) -> Any:
        more = {QUERIES: lengths, VALUES: lengths}
        return attention(q, k, v, **more).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, QKV))(*arrays))
    assert "bool[2,1,1,512]" not in text
    assert "512,512" not in text


def test_what_sees_no_key_is_zero(wide: None) -> None:
    """Rows are zero even in an entry without keys, for which JAX returns the mean of all values."""
    kv = (BATCH, KEYS, 2, DIM)
    arrays = draw(Q, kv, kv)
    more = {QUERIES: jnp.asarray((0, 4, 7)), VALUES: jnp.asarray((5, 0, 11))}
    out, lse = attention(*arrays, return_lse=True, **more)
    _, residual = attention(*arrays, return_residual=True, **more)
    for entry, (rows, keys) in enumerate(((0, 5), (0, 0), (7, 11))):
        assert not out[entry, rows:].any()
        assert (lse[entry, :, rows:] == -jnp.inf).all()
        assert out[entry, :rows].all()
        assert jnp.isfinite(lse[entry, :, :rows]).all()
        short = [a[entry : entry + 1, :n] for a, n in zip(arrays, (rows, keys, keys), strict=True)]
        if rows:
            np.testing.assert_allclose(out[entry, :rows], attention(*short)[0], atol=1e-14)
    assert np.array_equal(residual, lse.swapaxes(1, 2))


def test_what_stands_behind_the_end_has_no_gradient(wide: None) -> None:
    kv = (BATCH, KEYS, 2, DIM)
    arrays = draw(Q, kv, kv)
    more = _lengths(QUERIES, VALUES)

    def loss(*arrays: Any) -> Any:
        out, lse = attention(*arrays, return_lse=True, **more)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    dq, dk, dv = jax.grad(loss, QKV)(*arrays)
    for entry, (rows, keys) in enumerate(zip(*LENGTHS.values(), strict=True)):
        assert not dq[entry, rows:].any()
        assert not dk[entry, keys:].any()
        assert not dv[entry, keys:].any()
        assert dv[entry, :keys].all() == (rows > 0)


@pytest.mark.parametrize("names", NAMES[1:], ids=str)
def test_under_vmap(names: tuple[str, ...]) -> None:
    """Mapped entries have their own lengths, or all share them."""
    sizes, kv = (2, *Q), (2, BATCH, KEYS, 2, DIM)
    arrays = draw(sizes, kv, kv, dtype="float32")
    for axis in (0, None):
        given = _lengths(*names)
        if axis == 0:
            given = {name: jnp.stack([one, one[::-1]]) for name, one in given.items()}

        def loss(q: Any, k: Any, v: Any, more: Any, function: Any) -> Any:
            return jnp.sin(2 * function(q, k, v, **more)).sum()

        found = []
        for function in (attention, jax.nn.dot_product_attention):
            pulled = jax.grad(loss, QKV)
            mapped = jax.vmap(lambda *a, f=function, p=pulled: p(*a, f), (0, 0, 0, axis))
            found.append(jax.jit(mapped)(*arrays, given))
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, atol=4e-5)


def test_without_a_batch() -> None:
    kv = (KEYS, 2, DIM)
    arrays = draw(Q[1:], kv, kv, dtype="float32")
    more = {QUERIES: jnp.asarray([4], "int32"), VALUES: jnp.asarray([6], "int32")}
    _alike(arrays, more)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_divided_by_the_batch(explicit: bool) -> None:
    mesh = cpu_mesh(4, explicit=explicit)
    by = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    sizes, kv = (4, ROWS, HEADS, DIM), (4, KEYS, 2, DIM)
    arrays = draw(sizes, kv, kv, dtype="float32")
    more = {QUERIES: jnp.asarray((0, 4, 7, 2)), VALUES: jnp.asarray((11, 1, 6, 3))}
    whole = _pulled(attention, arrays, dict(more))
    divided = jax.device_put((arrays, more), by)
    with jax.set_mesh(mesh):
        parts = _pulled(attention, *divided)
    for one, other in zip(*map(jax.tree.leaves, (parts, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *[(name, np.ones(3, bool), "got dtype bool; expected int") for name in LENGTHS],
        *[(name, np.ones(3), "got dtype float") for name in LENGTHS],
        *[(name, np.ones(2, int), r"got shape \(2,\); expected shape \(3,\)") for name in LENGTHS],
        *[(name, 3, r"got shape \(\)") for name in LENGTHS],
        *[(name, object(), "expected an array") for name in LENGTHS],
        *[("implementation", i, "expected None or 'cuflash'") for i in ("xla", "cudnn", 1, "")],
    ],
)
def test_what_is_refused(name: str, value: Any, says: str) -> None:
    kv = (BATCH, KEYS, 2, DIM)
    error = (cuflash.ArgumentTypeError, cuflash.ArgumentValueError)
    with pytest.raises(error, match=f"{name}: .*{says}"):
        attention(*draw(Q, kv, kv, dtype="float32"), **{name: value})


def test_each_parameter_of_jax_is_taken_in_its_place() -> None:
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    mine = inspect.signature(attention).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    kv = (BATCH, KEYS, 2, DIM)
    *arrays, bias = draw(Q, kv, kv, (1, 1, ROWS, KEYS), dtype="float32")
    mask = draw_mask((1, 1, ROWS, KEYS)).at[..., 0].set(True)
    for given in itertools.product((None, bias), (None, mask)):
        out, residual = attention(*arrays, *given, return_residual=True)
        other, expected = jax.nn.dot_product_attention(*arrays, *given, return_residual=True)
        np.testing.assert_allclose(out, other, atol=4e-6)
        np.testing.assert_allclose(residual, expected, atol=4e-6)
