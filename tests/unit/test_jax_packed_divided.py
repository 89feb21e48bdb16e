"""Packed sequences in arrays that are divided over four devices: only heads stay divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .divided_case import P, entries, place, run_divided
from .jax_case import alike, cpu_mesh, draw, jax, jnp, near, wide
from .jax_packed_case import looped, offsets, pulled

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV, SINGLE = (20, 8, 8), (28, 4, 8), (28, 1, 8)
SHARED = [P(), P()]
_HEADS = [P(None, "x"), P(None, ("x", "y")), P(None, "y")]


def _arrays(kv: Any = KV, *more: tuple[int, ...]) -> list[Any]:
    """q, k, v and arrays of the shapes ``more``, followed by the offsets."""
    return [*draw(Q, kv, kv, *more, dtype="float32"), *offsets().values()]


def _pass(names: tuple[str, ...] = (), **options: Any) -> Any:
    """A function of arrays, followed by offsets, that runs both passes."""
    of = pulled(attention, names=names, is_causal=True, **options)

    def run(*given: Any) -> Any:
        at = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), given[-2:], strict=True))
        (_, results), grads = of(given[:-2], at)
        return results, grads

    return run


@pytest.mark.parametrize("spec", _HEADS, ids=str)
def test_heads_stay_divided(spec: Any) -> None:
    results, collectives = run_divided(_pass(), cpu_mesh(2, 2), _arrays(), [spec] * 3 + SHARED)
    assert not set(collectives) - {"all-reduce"}  # the sum of the loss
    out, lse, *grads = results
    assert entries(lse.sharding.spec, 2)[0] == entries(spec, 3)[1]
    for result in (out, *grads):
        assert entries(result.sharding.spec, 3) == entries(spec, 3)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("spec", _HEADS, ids=str)
def test_features_of_heads(spec: Any, broadcast: bool) -> None:
    """Sinks and slopes are divided like the heads; dropout draws for a head as in whole arrays."""
    sinks, slopes = draw((8,), (8,), dtype="float32")
    options = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(4)}
    call = _pass(("sinks",), **options, broadcast_dropout=broadcast, alibi_slopes=slopes / 8)
    q, k, v, *at = _arrays()
    specs = [spec] * 3 + [P(entries(spec, 3)[1]), *SHARED]
    results, collectives = run_divided(call, cpu_mesh(2, 2), [q, k, v, sinks, *at], specs)
    assert not set(collectives) - {"all-reduce"}
    assert entries(results[-1].sharding.spec, 1) == entries(specs[3], 1)


def _table(s: Any, batch: Any, head: Any, i: Any, j: Any, offset: Any, p: Any) -> Any:
    return s * np.cos(batch + 3 * head)


def test_functions_of_scores_know_the_head() -> None:
    import cuflash

    score = cuflash.ScoreMod("return s * cos(batch + 3 * head);", numpy=_table)
    run_divided(_pass(score_mod=score), cpu_mesh(2, 2), _arrays(), [P(None, "y")] * 3 + SHARED)


@pytest.mark.parametrize(
    ("specs", "kv"),
    [
        ([P("x")] * 3 + SHARED, KV),
        ([P(("x", "y")), P(), P(), *SHARED], KV),
        ([P(None, None, "x")] * 3 + SHARED, KV),
        ([P(None, "x"), P(), P(), *SHARED], SINGLE),
        ([P(None, "x", "y"), P("y", "x"), P(None, "x"), *SHARED], KV),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_gathered(specs: list[Any], kv: Any) -> None:
    """Rows are gathered too: a sequence may begin on one device and end on another."""
    _, collectives = run_divided(_pass(), cpu_mesh(2, 2), _arrays(kv), specs)
    assert collectives


def test_offsets_that_are_divided_are_gathered() -> None:
    """The axis of the offsets is no batch axis."""
    arrays = [*_arrays()[:3], jnp.asarray([0, 5, 9, 20]), jnp.asarray([0, 9, 9, 28])]
    for spec in (P(), P(None, "y")):
        run_divided(_pass(), cpu_mesh(2, 2), arrays, [spec] * 3 + [P("x")] * 2)


@pytest.mark.parametrize("spec", [P("x"), P("x", None, "y"), P(None, None, "x")], ids=str)
def test_mapped_entries_over_devices(spec: Any) -> None:
    arrays = [jnp.stack([a, a]) for a in _arrays()]
    specs = [spec] * 3 + [P(spec[0])] * 2
    run_divided(jax.vmap(_pass()), cpu_mesh(2, 2), arrays, specs)


def test_a_mesh_of_explicit_axes() -> None:
    mesh, spec, arrays = cpu_mesh(2, 2, explicit=True), P(None, "y"), _arrays()
    expected = jax.jit(_pass())(*arrays)
    with jax.set_mesh(mesh):
        got = jax.jit(_pass())(*place(mesh, arrays, [spec] * 3 + SHARED))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        alike(one, other)
    assert entries(jax.typeof(got[0][0]).sharding.spec, 3) == (None, "y", None)


@pytest.mark.parametrize("check", [{}, {"check_vma": False}], ids=str)
def test_shard_map(wide: None, check: dict[str, Any]) -> None:
    """Offsets are the same on all devices; sinks are divided like the heads."""
    q, k, v, sinks = draw(Q, KV, KV, (8,))
    at = offsets()
    each = jax.shard_map(
        lambda q, k, v, sinks, at: attention(q, k, v, sinks=sinks, **at),
        mesh=cpu_mesh(4),
        in_specs=(*[P(None, "x")] * 3, P("x"), P()),
        out_specs=P(None, "x"),
        **check,
    )

    def of(function: Any) -> Any:
        return jax.grad(lambda *a: jnp.sin(function(*a)).sum(), (0, 1, 2, 3))(q, k, v, sinks)

    near(of(lambda *a: each(*a, at)), of(lambda q, k, v, s: looped(q, k, v, sinks=s, **at)))
