"""``mask`` of ``cuflash.jax`` under ``jax.vmap``: unmapped arrays are not repeated."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from .jax_case import draw, formula, jax, near, wide
from .jax_mask_case import (
    KV,
    WHOLE,
    Q,
    draw_mask,
    each_entry,
    four,
    mask_batches,
    observed,
    pulled,
)

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

#: Which of query, key, value and mask are mapped: every choice except none.
MAPPED = [mapped for mapped in itertools.product([True, False], repeat=4) if any(mapped)]


@pytest.mark.parametrize("kind", [WHOLE, (1, 1, 11), (7, 1)], ids=str)
@pytest.mark.parametrize("mapped", MAPPED, ids=lambda m: "".join(map(str, map(int, m))))
def test_every_choice(wide: None, mapped: tuple[bool, ...], kind: tuple[int, ...]) -> None:
    """The mapped axes have several positions, and a pass gets a mask that is not repeated."""
    sizes = (Q, KV, KV, kind)
    places = zip(range(4), sizes, mapped, strict=True)
    axes = [i % (len(size) + 1) if is_mapped else None for i, size, is_mapped in places]
    whole = [
        size if axis is None else (*size[:axis], 2, *size[axis:])
        for size, axis in zip(sizes, axes, strict=True)
    ]
    arrays = [*draw(*whole[:3]), draw_mask(whole[3], 4)]
    got, ran = observed(jax.jit(jax.vmap(pulled(attention), axes)), *arrays)
    near(got, each_entry(arrays, axes, 2))
    assert mask_batches(ran) == {four(kind)[0] * (2 if mapped[3] else 1)}
    assert len(ran) == 2


@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "shared"])
def test_mapped_entries_are_a_batch(wide: None, axis: int | None) -> None:
    """If mapped entries are the batch, the options need no number of entries that share a mask."""
    mask = draw_mask((1, 7, 11) if axis is None else (3, 1, 7, 11))
    arrays = [*draw(Q, KV, KV), mask]
    each = jax.jit(jax.vmap(lambda *a: attention(*a[:3], mask=a[3]), (0, 0, 0, axis)))
    got, (problem,) = observed(each, *arrays)
    near(got, formula(*arrays[:3], mask=mask))
    assert problem.operands["mask"].entries is None


#: The sizes of the outer, the inner and the batch axis of a mask; 1: it lacks the axis.
PATTERNS = list(itertools.product((2, 1), (3, 1), (2, 1)))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_under_two_vmaps(wide: None, pattern: tuple[int, ...]) -> None:
    """A mask is repeated only along a hole: an axis that it lacks between two that it has."""
    outer, inner, batch = pattern
    mapped = tuple(size for size in (outer, inner) if size > 1)
    q, k, v = draw((2, 3, 2, 5, 4, 4), (2, 3, 2, 6, 2, 4), (3, 2, 6, 2, 4))
    mask = draw_mask((*mapped, batch, 1, 5, 6))
    axes = [(0, 0, None, 0 if outer > 1 else None), (0, 0, 0, 0 if inner > 1 else None)]

    def twice(function: Any) -> Any:
        return jax.jit(jax.vmap(jax.vmap(function, in_axes=axes[1]), in_axes=axes[0]))

    got, ran = observed(twice(pulled(attention)), q, k, v, mask)
    near(got, twice(pulled(formula))(q, k, v, mask))
    own = 12 if pattern == (2, 1, 2) else np.prod(pattern)
    assert mask_batches(ran) == {own}
    for problem in ran:
        assert (problem.operands["mask"].entries is None) == (own in (1, 12))


@pytest.mark.parametrize("kind", [WHOLE, (1, 7, 11)], ids=str)
@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "shared"])
def test_beside_mapped_sinks(wide: None, axis: int | None, kind: tuple[int, ...]) -> None:
    """Mapped entries become heads, and a mask that differs by entry or head has all these heads."""
    own = kind if axis is None else (2, *kind)
    arrays = [*draw((2, *Q), KV, KV, (2, 4)), draw_mask(own)]

    def each(function: Any) -> Any:
        def of(q: Any, k: Any, v: Any, sinks: Any, mask: Any) -> Any:
            return pulled(function)(q, k, v, mask, sinks=sinks)

        return jax.jit(jax.vmap(of, (0, None, None, 0, axis)))(*arrays)

    got, ran = observed(lambda: each(attention))
    near(got, each(formula))
    one_head = four(kind)[1] == 1 and axis is None
    wanted = four(kind) if one_head else (*four(kind)[:1], 8, 7, 11)
    assert {problem.operands["mask"].shape for problem in ran} == {wanted}


def test_beside_a_bias_that_is_mapped_otherwise(wide: None) -> None:
    """Bias and mask each have only the entries along their own mapped axis."""
    arrays = [*draw((2, 3, *Q), KV, KV, (2, 1, 1, 7, 11)), draw_mask((3, 7, 11))]

    def twice(function: Any) -> Any:
        def of(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
            return pulled(function)(q, k, v, mask, bias=bias)

        inner = jax.vmap(of, (0, None, None, None, 0))
        return jax.jit(jax.vmap(inner, (0, None, None, 0, None)))

    got, ran = observed(twice(attention), *arrays)
    near(got, twice(formula)(*arrays))
    for problem in ran:
        assert problem.operands["bias"].pairs[0] == 2
        assert problem.operands["mask"].pairs[0] == 3
