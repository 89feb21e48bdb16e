"""``softcap`` of ``cuflash.jax``, against the formula that JAX differentiates itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from .jax_case import draw, formula, jax, jnp, loss, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV = (2, 9, 4, 8), (2, 13, 2, 8)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "q_offset": None, "scale": 0.7},
    {"local_window_size": (9, 3)},
]


@pytest.mark.parametrize("softcap", [0.4, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_both_passes(wide: None, softcap: float, options: dict[str, Any]) -> None:
    arrays, options = draw(Q, KV, KV), {**options, "softcap": softcap, "return_lse": True}
    near(attention(*arrays, **options), formula(*arrays, **options))
    mine, theirs = (
        jax.jit(jax.grad(loss(function, **options), (0, 1, 2)))(*arrays)
        for function in (attention, formula)
    )
    near(mine, theirs)


@pytest.mark.parametrize("none", [None, 0, 0.0, np.float32(0), jnp.zeros(())], ids=repr)
def test_zero_is_no_cap(none: Any) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    assert (attention(*arrays, softcap=none) == attention(*arrays)).all()


@pytest.mark.parametrize("three", [3, 3.0, np.int8(3), np.float64(3), jnp.asarray(3.0)], ids=repr)
def test_any_number_is_a_cap(three: Any) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    assert (attention(*arrays, softcap=three) == attention(*arrays, softcap=3.0)).all()
    assert (attention(*arrays, softcap=three) != attention(*arrays)).any()


@pytest.mark.parametrize("cap", [-1, np.inf, np.nan, 1e80])
def test_other_numbers_are_refused(cap: float) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(cuflash.ArgumentValueError, match="softcap: got"):
        attention(*arrays, softcap=cap)


@pytest.mark.parametrize("cap", ["3", True, [3.0], 3j])
def test_what_is_no_number_is_refused(cap: Any) -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(cuflash.ArgumentTypeError, match="softcap: got"):
        attention(*arrays, softcap=cap)


def test_a_traced_cap_is_refused() -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    with pytest.raises(cuflash.ArgumentTypeError, match="known while JAX traces"):
        jax.jit(lambda cap: attention(*arrays, softcap=cap))(3.0)
