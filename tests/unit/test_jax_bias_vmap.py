"""``bias`` of ``cuflash.jax`` and its gradient, under ``jax.vmap``."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from .jax_bias_case import FEW, KV, WHOLE, Q, expected, four, observed, pulled, total
from .jax_case import draw, formula, jax, jnp, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention


@pytest.mark.parametrize("kind", FEW, ids=str)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, -1)], ids=str)
def test_under_vmap(wide: None, axes: tuple[int | None, int | None], kind: tuple[int, ...]) -> None:
    """Queries and bias are mapped or not, and every mapped entry has its own gradient."""
    of_q, of_bias = axes
    in_axes = (of_q, None, of_q, of_bias)
    arrays = []
    for seed, (size, axis) in enumerate(zip([Q, KV, KV, kind], in_axes, strict=True)):
        place = None if axis is None else axis % (len(size) + 1)
        whole = size if place is None else (*size[:place], 2, *size[place:])
        arrays += draw(whole, seed=seed)

    each = jax.jit(jax.vmap(pulled(attention), in_axes=in_axes))
    got, ran = observed(each, *arrays)
    *first, bias = (
        jnp.stack([array] * 2) if axis is None else jnp.moveaxis(array, axis, 0)
        for array, axis in zip(arrays, in_axes, strict=True)
    )
    (*others, dbias), results = expected(*first, bias, axes=(2, *four(kind)), full=(2, *WHOLE))
    near(got, ([*others, dbias.reshape(2, *kind)], results))
    own = four(kind)[0] * (1 if of_bias is None else 2)
    assert {problem.operands["bias"].shape[0] for problem in ran} == {own}


@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "shared"])
def test_mapped_entries_are_a_batch(wide: None, axis: int | None) -> None:
    """If mapped entries are the batch, the options need no number of entries that share a bias."""
    arrays = draw(Q, KV, KV, (1, 7, 11) if axis is None else (3, 1, 7, 11))
    each = jax.jit(jax.vmap(attention, (0, 0, 0, axis)))
    got, (problem,) = observed(each, *arrays)
    near(got, jax.jit(formula)(*arrays))
    assert problem.operands["bias"].entries is None


#: The sizes of the outer, the inner and the batch axis of a bias; 1: it lacks the axis.
PATTERNS = list(itertools.product((2, 1), (3, 1), (2, 1)))


def _of_pattern(pattern: tuple[int, ...]) -> tuple[list[Any], Any, Any]:
    """Arrays with two mapped axes, a function that maps another one twice, and expected results."""
    outer, inner, batch = pattern
    mapped = tuple(size for size in (outer, inner) if size > 1)
    q, k, v, bias = draw(
        (2, 3, 2, 5, 4, 4), (2, 3, 2, 6, 2, 4), (3, 2, 6, 2, 4), (*mapped, batch, 1, 5, 6)
    )

    def twice(function: Any) -> Any:
        one = jax.vmap(function, in_axes=(0, 0, 0, 0 if inner > 1 else None))
        return jax.vmap(one, in_axes=(0, 0, None, 0 if outer > 1 else None))

    whole = expected(
        q, k, jnp.stack([v] * 2), bias, axes=(*pattern, 1, 5, 6), full=(2, 3, 2, 4, 5, 6)
    )
    return [q, k, v, bias], twice, whole


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_under_two_vmaps(wide: None, pattern: tuple[int, ...]) -> None:
    """A bias is repeated only along a hole: an axis that it lacks between two that it has."""
    arrays, twice, whole = _of_pattern(pattern)
    got, ran = observed(jax.jit(twice(pulled(attention))), *arrays)
    near(got, whole)
    hole = pattern == (2, 1, 2)
    own = 12 if hole else np.prod(pattern)
    forward, backward = (problem.operands["bias"] for problem in ran)
    assert forward.shape == backward.shape == (own, 1, 5, 6)
    assert (forward.entries is None) == (own in (1, 12))
    assert (backward.entries is None) == (own == 12)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_gradient_of_two_vmaps(wide: None, pattern: tuple[int, ...]) -> None:
    """Entries that share a bias add to one gradient of it."""
    arrays, twice, ((*_, dbias), _) = _of_pattern(pattern)
    lacking = [axis for axis in (0, 1) if pattern[axis] == 1]
    got = jax.jit(jax.grad(lambda *a: twice(total(attention))(*a).sum(), 3))(*arrays)
    near(got, dbias.sum(lacking).reshape(arrays[3].shape))


@pytest.mark.parametrize("kind", [WHOLE, (1, 7, 11)], ids=str)
@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "shared"])
def test_beside_mapped_sinks(wide: None, axis: int | None, kind: tuple[int, ...]) -> None:
    """Mapped entries become heads, and a bias that differs by entry or head has all these heads."""
    own = kind if axis is None else (2, *kind)
    arrays = draw((2, *Q), KV, KV, own, (2, 4))
    in_axes = (0, None, None, axis, 0)
    for wanted in ((0, 3), (1, 4)):
        one, other = (
            jax.jit(jax.vmap(pulled(function, wanted), in_axes))
            for function in (attention, formula)
        )
        got, ran = observed(one, *arrays)
        near(got, other(*arrays))
        forward, backward = (problem.operands["bias"].shape for problem in ran)
        one_head = four(kind)[1] == 1 and axis is None
        assert forward == (four(kind) if one_head else (*four(kind)[:1], 8, 7, 11))
        assert (backward == forward) == (not one_head or 3 not in wanted)


@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "shared"])
def test_beside_sinks_of_two_vmaps(wide: None, axis: int | None) -> None:
    """The outer mapped entries become entries of the batch, and the inner ones become heads."""
    inner = () if axis is None else (3,)
    arrays = draw((2, 3, *Q), (3, *KV), (3, *KV), (2, *inner, 1, 1, 7, 11), (3, 4))

    def twice(function: Any) -> Any:
        one = jax.vmap(jax.grad(total(function), (0, 3)), (0, 0, 0, axis, 0))
        return jax.jit(jax.vmap(one, (0, None, None, 0, None)))(*arrays)

    near(twice(attention), twice(formula))
