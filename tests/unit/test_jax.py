"""``cuflash.jax.attention`` on the CPU: values and gradients of every dtype and alignment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .jax_case import draw, formula, jax, jnp, loss, near, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

CASE = Case(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=37, seqlen_kv=53, head_dim=16, head_dim_v=16, seed=3
)
GRADIENTS = ("dq", "dk", "dv")
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True, "q_offset": 0},
    {"causal": True},
    {"causal": True, "q_offset": 5, "scale": 0.5},
]


def _options(case: Case) -> dict[str, Any]:
    return {"is_causal": case.causal, "q_offset": case.q_offset, "scale": case.scale}


def _run(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every result of a case. The cotangent of lse is ``dlse``, or 0 if there is none."""
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    options = _options(case)
    results, pull = jax.vjp(lambda *qkv: attention(*qkv, return_lse=True, **options), q, k, v)
    dlse = x.get("dlse", np.zeros(case.shape("lse"), case.statistics))
    grads = pull((jnp.asarray(x["dout"]), jnp.asarray(dlse)))
    named = dict(zip(("out", "lse", *GRADIENTS), (*results, *grads), strict=True))
    return {name: np.asarray(array) for name, array in named.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_every_dtype_is_as_exact_as_the_kit_asks(
    wide: None, dtype: str, mask: dict[str, Any]
) -> None:
    case = replace(CASE, dtype=dtype, head_dim_v=24, **mask)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth = judge(case, x)
    for name, array in _run(case, x).items():
        compare(truth, name, array).check()


def _of_jax(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The output and gradients of JAX's own function, in float32."""
    q, k, v, dout = (jnp.asarray(x[name], np.float32) for name in ("q", "k", "v", "dout"))

    def function(*qkv: Any) -> Any:
        return jax.nn.dot_product_attention(*qkv, scale=case.scale, is_causal=case.causal)

    out, pull = jax.vjp(function, q, k, v)
    named = dict(zip(("out", *GRADIENTS), (out, *pull(dout)), strict=True))
    return {name: np.asarray(array) for name, array in named.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mask", MASKS[:2], ids=repr)
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_it_is_jaxs_own_function(dtype: str, mask: dict[str, Any], heads_kv: int) -> None:
    case = replace(CASE, dtype=dtype, heads_kv=heads_kv, **mask)
    x = arrays(case)
    truth = judge(case, x)
    mine, theirs = _run(case, x), _of_jax(case, x)
    if dtype == "float32":  # both round, each in its own way
        for name in theirs:
            compare(truth, name, mine[name]).check()
            compare(truth, name, theirs[name]).check()
        return
    judged = {name: case.heads_first(name, array) for name, array in theirs.items()}
    judged = {name: array.astype(np.float64) for name, array in judged.items()}
    truth = replace(truth, results={**truth.results, **judged})
    for name in judged:
        compare(truth, name, mine[name]).check()


def test_the_defaults_are_jaxs(wide: None) -> None:
    q, k, v = draw((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    near(attention(q, k, v, is_causal=True), formula(q, k, v, is_causal=True, q_offset=0))
    lower_right = attention(q, k, v, is_causal=True, q_offset=None)
    near(lower_right, formula(q, k, v, is_causal=True, q_offset=4))
    near(lower_right, attention(q, k, v, is_causal=True, q_offset=k.shape[1] - q.shape[1]))
    near(attention(q, k, v, q_offset=None), formula(q, k, v))
    q = q[:, :, :, :5]
    near(attention(q, k[..., :5], v), formula(q, k[..., :5], v, scale=5**-0.5))


@pytest.mark.parametrize("mask", [{}, {"is_causal": True, "q_offset": 2}], ids=repr)
def test_arrays_without_a_batch(wide: None, mask: dict[str, Any]) -> None:
    q, k, v = draw((5, 4, 8), (9, 2, 8), (9, 2, 3))
    out, lse = attention(q, k, v, return_lse=True, **mask)
    assert (out.shape, lse.shape) == ((5, 4, 3), (4, 5))
    near((out, lse), formula(q, k, v, return_lse=True, **mask))
    mine, plain = (loss(f, return_lse=True, **mask) for f in (attention, formula))
    near(jax.grad(mine, (0, 1, 2))(q, k, v), jax.grad(plain, (0, 1, 2))(q, k, v))


def test_only_the_lse_may_be_used(wide: None) -> None:
    q, k, v = draw((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))

    def of(function: Any) -> Any:
        return jax.grad(lambda *qkv: function(*qkv, return_lse=True)[1].sum(), (0, 1, 2))

    grads = of(attention)(q, k, v)
    near(grads, of(formula)(q, k, v))
    assert not grads[2].any()


def test_an_unused_lse_has_no_cotangent() -> None:
    q, k, v = draw((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), dtype="float32")
    for with_lse in (False, True):

        def out(*qkv: Any, with_lse: bool = with_lse) -> Any:
            results = attention(*qkv, return_lse=with_lse)
            return (results[0] if with_lse else results).sum()

        text = str(jax.make_jaxpr(jax.grad(out))(q, k, v))
        calls = text.split("cuflash_attention")[1:]
        assert [len(call.split("] ")[1].split("\n")[0].split()) for call in calls] == [3, 6]


@pytest.mark.parametrize(
    ("length", "keys", "batch"), [(0, 7, 2), (5, 0, 2), (0, 0, 2), (5, 7, 0), (0, 7, 0)]
)
def test_empty_sequences(wide: None, length: int, keys: int, batch: int) -> None:
    shapes = (batch, length, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 8)
    q, k, v = draw(*shapes)
    for function in (attention, jax.jit(attention, static_argnames="return_lse")):
        out, lse = function(q, k, v, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, (batch, 4, length))
        assert not out.any()
        assert (lse == (-np.inf if keys == 0 else 0)).all()
    grads = jax.grad(lambda *qkv: attention(*qkv).sum(), (0, 1, 2))(q, k, v)
    assert [grad.shape for grad in grads] == list(shapes)
    assert not any(grad.any() for grad in grads)


def test_rows_that_see_no_key(wide: None) -> None:
    q, k, v = draw((1, 6, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    shared: dict[str, Any] = {"is_causal": True, "q_offset": None}  # queries 0 and 1 see nothing
    out, lse = attention(q, k, v, return_lse=True, **shared)
    assert not out[:, :2].any()
    assert (lse[..., :2] == -np.inf).all()
    near(out[:, 2:], formula(q[:, 2:], k, v, is_causal=True))
    grads = jax.grad(loss(attention, **shared), (0, 1, 2))(q, k, v)
    expected = jax.grad(loss(formula, is_causal=True), (0, 1, 2))(q[:, 2:], k, v)
    near((grads[0][:, 2:], *grads[1:]), expected)
    assert not grads[0][:, :2].any()


def test_options_reach_the_passes() -> None:
    q, k, v = draw((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), dtype="float32")
    for options in ({"algorithm": "fa1"}, {"algorithm": "fa2", "deterministic_gradients": True}):
        ran: list[Any] = []
        with dispatch.observe(ran.append):
            jax.block_until_ready(jax.grad(loss(attention, **options))(q, k, v))
        assert [plan.problem.operation for plan in ran] == ["forward", "backward"]
        assert {plan.backend for plan in ran} == {"numpy"}
        assert {plan.algorithm for plan in ran} == {options["algorithm"]}
        assert ran[1].problem.deterministic is options.get("deterministic_gradients", False)


def test_it_is_what_the_library_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code runs on the same numbers, so the bits are the same."""
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    case = replace(CASE, dtype="bfloat16", causal=True)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    got = _run(case, x)
    q, k, v = (x[name] for name in "qkv")
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    grads = cuflash.attention_backward(x["dout"], q, k, v, out, lse, dlse=x["dlse"], causal=True)
    for name, expected in zip(got, (out, lse, *grads), strict=True):
        assert got[name].tobytes() == expected.tobytes(), name
