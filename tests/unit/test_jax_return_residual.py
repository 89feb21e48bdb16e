"""``return_residual`` of ``cuflash.jax.attention``: the log-sum-exp as JAX returns it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import cuflash

from .jax_case import alike, cpu_mesh, draw, jax, jnp
from .jax_mask_case import KV, QKV, Q, draw_mask, observed

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

jaxs = jax.nn.dot_product_attention
needs_jaxs = pytest.mark.skipif(
    "return_residual" not in inspect.signature(jaxs).parameters,
    reason="this JAX has no return_residual",
)
MASK = draw_mask((3, 1, 7, 11), share=0.8) | jnp.eye(1, 11, dtype=bool)  # every row sees a key


@needs_jaxs
@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("with_batch", [True, False], ids=["batch", "none"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": MASK}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_jaxs_own(dtype: str, options: Any, with_batch: bool, compiled: Any) -> None:
    arrays = draw(Q, KV, KV, dtype=dtype)
    if not with_batch:
        arrays = [array[0] for array in arrays]
        options = {name: v if v is True else v[0] for name, v in options.items()}
    got, expected = (
        compiled(lambda *a, f=f: f(*a, return_residual=True, **options))(*arrays)
        for f in (attention, jaxs)
    )
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-20
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (array.astype("float32") for array in (one, other))
        np.testing.assert_allclose(one, other, rtol=unit, atol=2 * unit)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_is_the_lse_rounded(dtype: str) -> None:
    """The residual has the dtype to which keys are cast; a row without keys has minus infinity."""
    arrays = draw(Q, KV, KV, dtype="float32")
    options: dict[str, Any] = {"is_causal": True, "q_offset": -2, "dtype": dtype}
    out, residual = attention(*arrays, return_residual=True, **options)
    same, lse = attention(*arrays, return_lse=True, **options)
    assert residual.dtype == dtype
    alike(out, same)
    alike(residual, lse.swapaxes(1, 2).astype(dtype))
    assert np.isneginf(residual[:, :2]).all()
    assert np.isfinite(residual[:, 2:]).all()


def test_it_is_constant() -> None:
    arrays = [*draw(Q, KV, KV, dtype="float32"), draw_mask((7, 11))]

    def both(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out, residual = attention(q, k, v, mask=mask, return_residual=True)
        return out.sum() + jnp.where(jnp.isfinite(residual), residual, 0).sum()

    got = jax.grad(both, QKV)(*arrays)
    plain = jax.grad(lambda q, k, v, mask: attention(q, k, v, mask=mask).sum(), QKV)(*arrays)
    for one, other in zip(got, plain, strict=True):
        alike(one, other)
    alone = jax.grad(lambda *qkv: attention(*qkv, return_residual=True)[1].sum(), QKV)
    gradients, ran = observed(alone, *arrays[:3])
    assert not any(gradient.any() for gradient in gradients)
    assert [problem.operation for problem in ran] == ["forward"]


def test_under_vmap() -> None:
    arrays = draw((2, *Q), (2, *KV), KV, dtype="float32")
    each = jax.vmap(lambda *qkv: attention(*qkv, return_residual=True), (0, 0, None))
    _, residual = jax.jit(each)(*arrays)
    for entry, (q, k) in enumerate(zip(*arrays[:2], strict=True)):
        alike(residual[entry], attention(q, k, arrays[2], return_residual=True)[1])


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_where_arrays_are_divided(explicit: bool) -> None:
    mesh = cpu_mesh(2, 2, explicit=explicit)
    spec = jax.sharding.PartitionSpec("x", None, "y")
    arrays = draw((4, 6, 8, 8), (4, 6, 4, 8), (4, 6, 4, 8), dtype="float32")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    call = jax.jit(lambda *qkv: attention(*qkv, return_residual=True))
    _, residual = call(*(jax.device_put(array, sharding) for array in arrays))
    alike(residual, call(*arrays)[1])
    assert residual.sharding.spec == spec


def test_what_is_refused() -> None:
    arrays = draw(Q, KV, KV, dtype="float32")
    says = "return_residual: got True beside return_lse=True; expected one of the two"
    with pytest.raises(cuflash.ArgumentValueError, match=says):
        attention(*arrays, return_lse=True, return_residual=True)
    for value in (None, 1, "yes"):
        with pytest.raises(cuflash.ArgumentTypeError, match="return_residual: got"):
            attention(*arrays, return_residual=value)
