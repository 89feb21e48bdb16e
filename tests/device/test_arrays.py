"""Every kind of device array is taken without a copy, and results are of the same kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash


@pytest.fixture
def expected(problem: dict[str, Any]) -> np.ndarray:
    return cuflash.attention(**problem, causal=True).get()


def test_cupy_in_cupy_out(cp: Any, problem: dict[str, Any], expected: np.ndarray) -> None:
    out, lse = cuflash.attention(**problem, causal=True, return_lse=True)
    assert isinstance(out, cp.ndarray)
    assert out.flags.c_contiguous
    assert out.dtype == np.float16
    assert lse.shape == (2, 4, 300)
    assert lse.dtype == np.float32
    host = {name: array.get() for name, array in problem.items()}
    reference = cuflash.reference.attention(**host, causal=True)[0]
    assert np.abs(out.get() - reference).max() < 2e-3


def test_numpy_goes_to_the_device_and_back(problem: dict[str, Any], expected: np.ndarray) -> None:
    host = {name: array.get() for name, array in problem.items()}
    assert cuflash.explain(*host.values()).backend == "cuda"
    out, lse = cuflash.attention(**host, causal=True, return_lse=True)
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, expected)
    mine = np.zeros_like(out)
    assert cuflash.attention(**host, causal=True, out=mine) is mine
    assert np.array_equal(mine, expected)
    grads = cuflash.attention_backward(out, *host.values(), out, lse, causal=True)
    assert all(isinstance(g, np.ndarray) for g in grads)
    stays = cuflash.attention(**host, causal=True, backend="numpy")
    assert np.abs(stays.astype(np.float32) - expected).max() < 2e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(cp: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    kind = getattr(torch, dtype)
    q = torch.randn(2, 40, 4, 32, device="cuda").to(kind)
    k, v = (torch.randn(2, 50, 2, 32, device="cuda").to(kind) for _ in range(2))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == kind
    assert out.is_cuda
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 32**0.5
    hidden = torch.ones(40, 50, dtype=torch.bool, device="cuda").tril(10).logical_not()
    p = s.masked_fill(hidden, -torch.inf).softmax(-1)
    truth = torch.einsum("bhqk,bkhd->bqhd", p, v.double().repeat_interleave(2, 2))
    assert (out.double() - truth).abs().max() < {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
    mine = torch.zeros_like(out)
    assert cuflash.attention(q, k, v, causal=True, out=mine) is mine
    assert torch.equal(mine, out)
    grads = cuflash.attention_backward(out, q, k, v, out, lse, causal=True)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays(dtype: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA backend here")
    key = jax.random.PRNGKey(0)
    q = jax.random.normal(key, (2, 40, 4, 32), dtype)
    out = cuflash.attention(q, q, q)
    assert type(out) is type(q)
    assert out.dtype == q.dtype
    wide = np.asarray(q.astype("float32"))
    truth = cuflash.reference.attention(wide, wide, wide)[0]
    assert np.abs(np.asarray(out.astype("float32")) - truth).max() < 3e-2


def test_the_cuda_array_interface(cp: Any, problem: dict[str, Any], expected: np.ndarray) -> None:
    class Foreign:
        def __init__(self, array: Any) -> None:
            self.kept = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    foreign = {name: Foreign(array) for name, array in problem.items()}
    out = cuflash.attention(**foreign, causal=True)
    assert isinstance(out, cp.ndarray)
    assert np.array_equal(out.get(), expected)


def test_numba_arrays(problem: dict[str, Any], expected: np.ndarray) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    foreign = {name: cuda.to_device(array.get()) for name, array in problem.items()}
    out = cuflash.attention(**foreign, causal=True)
    assert np.array_equal(out.get(), expected)


def test_host_and_device_do_not_mix(problem: dict[str, Any]) -> None:
    call = {**problem, "k": problem["k"].get()}
    with pytest.raises(cuflash.ArgumentValueError, match=r"k: got an array in host memory"):
        cuflash.attention(**call)
    with pytest.raises(cuflash.ArgumentValueError, match=r"out: got an array in host memory"):
        cuflash.attention(**problem, out=problem["q"].get())


def test_the_numpy_backend_does_not_read_device_memory(problem: dict[str, Any]) -> None:
    with pytest.raises(cuflash.ArgumentValueError, match="backend: got 'numpy' for arrays in CUDA"):
        cuflash.attention(**problem, backend="numpy")


def test_odd_strides_are_copied_and_explain_says_so(
    cp: Any, problem: dict[str, Any], expected: np.ndarray
) -> None:
    wide = cp.zeros((*problem["q"].shape[:-1], 128), np.float16)
    wide[..., ::2] = problem["q"]
    strided = {**problem, "q": wide[..., ::2]}
    assert cuflash.explain(*strided.values(), causal=True).copies == ("q",)
    assert np.array_equal(cuflash.attention(**strided, causal=True).get(), expected)
    out = cp.full((*problem["q"].shape[:-1], 128), 7, np.float16)
    cuflash.attention(**problem, causal=True, out=out[..., ::2])
    assert np.array_equal(out[..., ::2].get(), expected)
    assert (out[..., 1::2] == 7).all()


def _odd(cp: Any, array: Any, offset: int = 1) -> Any:
    """The same values at an address that is not a multiple of their size."""
    memory = cp.zeros(array.nbytes + 16, np.uint8)[offset:][: array.nbytes]
    memory[...] = cp.ascontiguousarray(array).view(np.uint8).ravel()
    shape, strides = array.shape, cp.ascontiguousarray(array).strides
    return cp.ndarray(shape, array.dtype, memory.data, strides)


def test_unaligned_elements_are_copied(
    cp: Any, problem: dict[str, Any], expected: np.ndarray
) -> None:
    odd = {name: _odd(cp, array) for name, array in problem.items()}
    assert cuflash.explain(*odd.values(), causal=True).copies == ("q", "k", "v")
    out, lse = _odd(cp, problem["q"]), _odd(cp, cp.zeros((2, 4, 300), np.float32), 2)
    cuflash.attention(**odd, causal=True, out=out, lse_out=lse)
    even, even_lse = cuflash.attention(**problem, causal=True, return_lse=True)
    assert np.array_equal(even.get(), expected)
    arrays = (even, *problem.values(), even, even_lse)
    shared: dict[str, Any] = {"causal": True, "deterministic": True}
    grads = cuflash.attention_backward(*arrays, dlse=even_lse, **shared)
    mine = tuple(_odd(cp, g) for g in grads)
    others = cuflash.attention_backward(
        out, *odd.values(), out, lse, dlse=lse, grads=mine, **shared
    )
    for got, wanted in zip((out, lse, *others), (even, even_lse, *grads), strict=True):
        flat = cp.ndarray((got.nbytes,), np.uint8, got.data)
        assert flat.get().tobytes() == wanted.get().tobytes()


def test_a_float32_output_of_half_inputs(problem: dict[str, Any], expected: np.ndarray) -> None:
    out, lse = cuflash.attention(**problem, causal=True, out_dtype="float32", return_lse=True)
    assert out.dtype == np.float32
    assert np.array_equal(out.get().astype(np.float16), expected)
    given = (*problem.values(), out, lse)
    dout, shared = out.astype(np.float16), {"causal": True, "deterministic": True}
    half = cuflash.attention_backward(dout, *given, **shared)
    wide = cuflash.attention_backward(dout.astype(np.float32), *given, **shared)
    for a, b in zip(half, wide, strict=True):
        assert np.array_equal(a.get(), b.get())
