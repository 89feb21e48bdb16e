"""Functions of scores under JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ScoreMod

from .jax_case import draw, jax, jnp

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV = (2, 9, 4, 8), (2, 13, 2, 8)


def of_table(table: Any, most: float = 2.0) -> ScoreMod:
    return ScoreMod(
        "return p.most * tanh(s / p.most) + p.table(batch, head, i + offset - j + 12);",
        numpy=_numpy,
        most=most,
        table=table,
    )


def _numpy(s: Any, batch: Any, head: Any, i: Any, j: Any, offset: int, p: Any) -> Any:
    return p.most * np.tanh(s / p.most) + p.table(batch, head, i + offset - j + 12)


def inputs() -> list[Any]:
    return [*draw(Q, KV, KV, Q, dtype="float32"), draw((2, 4, 26), dtype="float32")[0]]


def expected(q: Any, k: Any, v: Any, dout: Any, table: Any, **more: Any) -> list[Any]:
    options = {"score_mod": of_table(np.asarray(table)), "q_offset": 0, "causal": True, **more}
    q, k, v, dout = map(np.asarray, (q, k, v, dout))
    out, _ = cuflash.reference.attention(q, k, v, **options)
    return [out, *cuflash.reference.attention_backward(dout, q, k, v, **options)]


def both(q: Any, k: Any, v: Any, dout: Any, score_mod: Any) -> list[Any]:
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, is_causal=True, score_mod=score_mod), q, k, v)
    return [out, *pull(dout)]


@pytest.mark.parametrize("jitted", [False, True])
def test_both_passes(jitted: bool) -> None:
    """Under ``jax.jit`` the function is an argument, whose arrays are leaves."""
    *arrays, table = inputs()
    found = (jax.jit(both) if jitted else both)(*arrays, of_table(table))
    for got, right in zip(found, expected(*arrays, table), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-5)


def test_it_is_a_pytree_of_its_arrays() -> None:
    table = jnp.ones((2, 4, 26))
    function = of_table(table)
    leaves, structure = jax.tree.flatten(function)
    assert len(leaves) == 1
    assert leaves[0] is table
    again = jax.tree.unflatten(structure, [2 * table])
    assert again.parts[0] == function.parts[0]
    assert (again.arguments["table"] == 2).all()
    assert structure == jax.tree.structure(of_table(2 * table))
    assert structure != jax.tree.structure(of_table(table, most=3.0))


def test_a_new_array_is_no_new_trace() -> None:
    *arrays, table = inputs()
    traces = []

    @jax.jit
    def run(score_mod: ScoreMod) -> Any:
        traces.append(score_mod)
        return attention(*arrays[:3], score_mod=score_mod)

    first, second = run(of_table(table)), run(of_table(2 * table))
    assert len(traces) == 1
    assert abs(first - second).max() > 0.01
    run(of_table(table, most=3.0))
    assert len(traces) == 2


@pytest.mark.parametrize("mapped", [False, True])
def test_mapped_entries_are_each_as_alone(mapped: bool) -> None:
    """Each entry has a table of its own, or all entries share one."""
    *arrays, table = inputs()
    several = [jnp.stack([array, -array, 0.5 * array]) for array in arrays]
    tables = jnp.stack([table, -table, 0.5 * table]) if mapped else table

    def of_entry(table: Any, *given: Any) -> Any:
        return both(*given, of_table(table))

    axes = (0 if mapped else None, *(0 for _ in several))
    found = jax.vmap(of_entry, in_axes=axes)(tables, *several)
    for entry in range(3):
        own = tables[entry] if mapped else table
        right = expected(*(array[entry] for array in several), own)
        for got, one in zip(found, right, strict=True):
            np.testing.assert_allclose(got[entry], one, atol=3e-5)


def test_mapped_sinks_leave_heads_as_they_are() -> None:
    """Mapped entries become separate heads; the function sees the head's number in its entry."""
    *arrays, table = inputs()
    sinks = jnp.stack([jnp.arange(4.0), -jnp.arange(4.0)])
    q, k, v, _ = arrays

    def of_entry(sinks: Any) -> Any:
        return attention(q, k, v, score_mod=of_table(table), sinks=sinks)

    found = jax.vmap(of_entry)(sinks)
    options = {"score_mod": of_table(np.asarray(table)), "q_offset": 0}
    for entry in range(2):
        given = [np.asarray(x) for x in (q, k, v)]
        right, _ = cuflash.reference.attention(*given, sinks=np.asarray(sinks[entry]), **options)
        np.testing.assert_allclose(found[entry], right, atol=2e-5)


def test_there_is_no_gradient_of_its_arrays() -> None:
    *arrays, table = inputs()

    def total(table: Any) -> Any:
        return attention(*arrays[:3], score_mod=of_table(table)).sum()

    with pytest.raises(cuflash.ArgumentValueError, match=r"score_mod: .*stop_gradient"):
        jax.grad(total)(table)
    without = jax.grad(lambda table: total(jax.lax.stop_gradient(table)))(table)
    assert not without.any()


def test_refusals() -> None:
    *arrays, table = inputs()
    qkv = arrays[:3]
    with pytest.raises(cuflash.ArgumentTypeError, match=r"score_mod: got .*ScoreMod"):
        attention(*qkv, score_mod="return s;")
    with pytest.raises(cuflash.UnsupportedError, match="softcap with score_mod"):
        attention(*qkv, score_mod=of_table(table), softcap=2.0)
    with pytest.raises(cuflash.UnsupportedError, match="needs numpy= of score_mod"):
        attention(*qkv, score_mod=ScoreMod("return s;"))
    with pytest.raises(
        cuflash.ArgumentTypeError, match=r"score_mod: got builtins\.str; expected an array"
    ):
        attention(*qkv, score_mod=ScoreMod("return s;", table="three"))
