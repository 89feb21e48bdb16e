"""``cuflash.jax.attention`` on the device: XLA's stream, its buffers, its command buffers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
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
from .common import skip_without

# JAX reads this when it starts; by default it would take three quarters of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

CASE = Case(batch=2, heads_q=4, heads_kv=2, seqlen_q=150, seqlen_kv=201, seed=5)
GRADIENTS = ("dq", "dk", "dv")
MASKS: list[dict[str, Any]] = [{}, {"causal": True, "q_offset": 0}, {"causal": True}]
CHOICES = [
    *((dtype, "fa3") for dtype in ("float16", "bfloat16")),
    *(
        (d, a)
        for d in ("float16", "bfloat16", "float32", "float64")
        for a in ("auto", "fa1", "fa2")
    ),
]


@pytest.fixture(params=["handler", "callback"])
def jax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """JAX on CUDA, with float64: once with the handler of launch tables, once with callbacks."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA backend here")
    if request.param == "handler":
        pytest.importorskip("numba", reason="Numba is not installed")
    monkeypatch.setenv("CUFLASH_JAX_NATIVE", str(int(request.param == "handler")))
    jax.clear_caches()
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


def _attention(case: Case, **options: Any) -> Any:
    from cuflash.jax import attention

    shared = {"is_causal": case.causal, "q_offset": case.q_offset, "scale": case.scale, **options}
    return lambda *qkv: attention(*qkv, return_lse=True, **shared)


def _all_results(jax: Any, function: Any, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Out, lse and gradients, with a cotangent of lse if there is one."""

    def both(q: Any, k: Any, v: Any, *cotangents: Any) -> Any:
        results, pull = jax.vjp(function, q, k, v)
        dlse = cotangents[1] if len(cotangents) > 1 else jax.numpy.zeros_like(results[1])
        return (*results, *pull((cotangents[0], dlse)))

    given = [jax.numpy.asarray(x[name]) for name in ("q", "k", "v", "dout", "dlse") if name in x]
    results = jax.jit(both)(*given)
    assert all(next(iter(r.devices())).platform == "gpu" for r in results)
    return dict(zip(("out", "lse", *GRADIENTS), map(np.asarray, results), strict=True))


@pytest.mark.parametrize(("dtype", "algorithm"), CHOICES)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_results_are_as_exact_as_the_kit_asks(
    jax: Any, dtype: str, algorithm: str, mask: dict[str, Any]
) -> None:
    skip_without(algorithm)
    case = replace(CASE, dtype=dtype, **mask)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth = judge(case, x)
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        results = _all_results(jax, _attention(case, algorithm=algorithm), x)
    assert not ran  # neither the tiled NumPy code nor a call that makes its own plan
    for name, array in results.items():
        compare(truth, name, array).check()


@pytest.mark.parametrize("deterministic", [False, True])
def test_it_is_what_the_library_gives(cp: Any, jax: Any, deterministic: bool) -> None:
    """The same kernels run and give the same bits; dq only if it is summed in order."""
    case = replace(CASE, dtype="float16", causal=True)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    got = _all_results(jax, _attention(case, deterministic_gradients=deterministic), x)
    dout, q, k, v, dlse = (cp.asarray(x[name]) for name in ("dout", "q", "k", "v", "dlse"))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    shared: dict[str, Any] = {"dlse": dlse, "causal": True, "deterministic": deterministic}
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, **shared)
    expected = dict(zip(("out", "lse", *GRADIENTS), (out, lse, *grads), strict=True))
    for name in expected if deterministic else ("out", "lse", "dk", "dv"):
        assert got[name].tobytes() == expected[name].get().tobytes(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_residual_is_the_float32_output_of_the_library(
    cp: Any, jax: Any, dtype: str
) -> None:
    case = replace(CASE, dtype=dtype, causal=True)
    x = arrays(case, "q", "k", "v", "dout")
    options = {"residual_dtype": "float32", "deterministic_gradients": True}
    got = _all_results(jax, _attention(case, **options), x)
    plain = _all_results(jax, _attention(case, deterministic_gradients=True), x)
    assert got["out"].tobytes() == plain["out"].tobytes()
    assert got["out"].dtype == plain["out"].dtype
    q, k, v, dout = (jax.numpy.asarray(x[name]) for name in ("q", "k", "v", "dout"))
    q, k, v, dout = (cp.from_dlpack(array) for array in (q, k, v, dout))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True, out_dtype="float32")
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
    for name, grad in zip(GRADIENTS, grads, strict=True):
        assert got[name].tobytes() == grad.get().tobytes(), name


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_computation_that_is_replayed_sees_new_data(cp: Any, jax: Any, algorithm: str) -> None:
    """Eight passes in a row are enough for XLA to make a command buffer of them."""
    from cuflash.jax import attention

    skip_without(algorithm)

    def layers(x: Any) -> Any:
        for _ in range(8):
            x = attention(x, x, x, is_causal=True, algorithm=algorithm)
        return x

    compiled = jax.jit(layers)
    rng = np.random.default_rng(1)
    for _ in range(6):
        host = rng.standard_normal((2, 300, 4, 64)).astype(np.float16)
        x = cp.asarray(host)
        for _ in range(8):
            x = cuflash.attention(x, x, x, causal=True, q_offset=0, algorithm=algorithm)
        assert np.asarray(compiled(jax.numpy.asarray(host))).tobytes() == x.get().tobytes()


def test_a_callback_allocates_nothing(cp: Any, jax: Any) -> None:
    from cuflash.jax import attention

    x = jax.numpy.ones((2, 300, 4, 64), "float16")
    step = jax.jit(jax.grad(lambda x: attention(x, x, x).sum(dtype="float32")))
    jax.block_until_ready(step(x))
    cp.get_default_memory_pool().free_all_blocks()
    before = cp.get_default_memory_pool().total_bytes()
    for _ in range(3):
        jax.block_until_ready(step(x))
    assert cp.get_default_memory_pool().total_bytes() == before


def test_vmap_and_grad(jax: Any) -> None:
    from cuflash.jax import attention

    rng = np.random.default_rng(2)
    q, k, v = (
        jax.numpy.asarray(rng.standard_normal(shape), "float32")
        for shape in ((3, 2, 65, 4, 32), (2, 70, 2, 32), (3, 2, 70, 2, 32))
    )

    def mapped(x: Any, y: Any, z: Any) -> Any:
        each = jax.vmap(lambda *a: attention(*a, is_causal=True), in_axes=(0, None, 0))
        return jax.numpy.sin(each(x, y, z)).sum()

    def one_by_one(x: Any, y: Any, z: Any) -> Any:
        outs = [attention(x[i], y, z[i], is_causal=True) for i in range(3)]
        return jax.numpy.sin(jax.numpy.stack(outs)).sum()

    of_map, of_each = (jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (mapped, one_by_one))
    for got, expected in zip(of_map, of_each, strict=True):
        # Parts of dq are added in another order: a few roundings of float32.
        error, size = np.abs(got - expected).max(), np.abs(expected).max()
        assert error <= 2.0**-24 * 70 * size


def test_empty_sequences(jax: Any) -> None:
    from cuflash.jax import attention

    for length, keys in ((0, 7), (5, 0), (0, 0)):
        q, k = (jax.numpy.ones((2, n, 2, 64), "float16") for n in (length, keys))
        out, lse = jax.jit(lambda q, k: attention(q, k, k, return_lse=True))(q, k)
        assert out.shape == q.shape
        assert not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all()
        grads = jax.jit(jax.grad(lambda q, k: attention(q, k, k).sum(), (0, 1)))(q, k)
        assert not any(np.asarray(grad).any() for grad in grads)


def test_a_computation_on_the_cpu_stays_there(jax: Any) -> None:
    from cuflash.jax import attention

    x = jax.device_put(np.ones((1, 5, 2, 8), np.float32), jax.devices("cpu")[0])
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        out = jax.block_until_ready(attention(x, x, x))
    assert [plan.backend for plan in ran] == ["numpy"]
    assert next(iter(out.devices())).platform == "cpu"


def test_another_device_than_the_first(jax: Any) -> None:
    from cuflash.jax import attention

    if jax.local_device_count() < 2:
        pytest.skip("needs a second CUDA device")
    host = np.random.default_rng(3).standard_normal((2, 130, 4, 64)).astype(np.float16)
    outs = [
        jax.jit(attention)(*[jax.device_put(host, device)] * 3)
        for device in jax.local_devices()[:2]
    ]
    assert [next(iter(out.devices())) for out in outs] == jax.local_devices()[:2]
    assert np.asarray(outs[0]).tobytes() == np.asarray(outs[1]).tobytes()


@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_arrays_divided_over_devices_are_not_gathered(
    jax: Any, spec: tuple[Any, ...], algorithm: str
) -> None:
    from cuflash.jax import attention

    skip_without(algorithm)
    if jax.local_device_count() < 2:
        pytest.skip("needs a second CUDA device")
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    rng = np.random.default_rng(4)
    host = [rng.standard_normal((2, 150, heads, 64)).astype(np.float16) for heads in (4, 2, 2)]

    def both(q: Any, k: Any, v: Any) -> Any:
        options = {"algorithm": algorithm, "deterministic_gradients": True}
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, is_causal=True, **options), q, k, v)
        return out, *pull(out)

    divided = [jax.device_put(array, sharding) for array in host]
    compiled = jax.jit(both).lower(*divided).compile()
    assert not re.findall("all-gather|all-reduce|collective-permute|all-to-all", compiled.as_text())
    # A pass over whole arrays may sum in another order. So each half of the results is compared
    # with a separate pass over that half of the arrays.
    axis = spec.index("x")
    halves = zip(*(np.split(array, 2, axis) for array in host), strict=True)
    parts = [jax.jit(both)(*map(jax.numpy.asarray, half)) for half in halves]
    for got, *half in zip(compiled(*divided), *parts, strict=True):
        assert len(got.sharding.device_set) == 2
        assert np.asarray(got).tobytes() == np.concatenate(half, axis).tobytes()
