"""Arrays of optional libraries, if they are installed.

:mod:`.test_arrays_kinds` tests the same behaviour with stand-ins for these libraries.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.arrays.adopt import adopt

SHAPE = (1, 5, 2, 4)


def _import(name: str, title: str) -> Any:
    return pytest.importorskip(name, reason=f"{title} is not installed")


@pytest.fixture
def torch() -> Any:
    return _import("torch", "PyTorch")


def _refused(value: Any, says: str) -> None:
    x = np.ones(SHAPE, np.float32)
    with pytest.raises(cuflash.ArgumentTypeError, match=f"^q: got .*{says}"):
        cuflash.attention(value, x, x, backend="numpy")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_come_and_go(torch: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)
    plain = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    q = torch.from_numpy(plain).to(kind)
    bits = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    host = adopt("q", q).native
    assert host.dtype == bits
    assert host.ctypes.data == q.data_ptr()
    expected, pullback = cuflash.attention_vjp(host, host, host, causal=True, backend="numpy")
    got, pulled = cuflash.attention_vjp(q, q, q, causal=True, backend="numpy")
    for one, other in zip((got, *pulled(got)), (expected, *pullback(expected)), strict=True):
        assert type(one) is torch.Tensor
        assert one.dtype == kind
        assert np.array_equal(one.double().numpy(), other.astype(np.float64))
    mine = torch.zeros_like(q)[:, :, :, :]
    assert cuflash.attention(q, q, q, causal=True, out=mine, backend="numpy") is mine
    assert torch.equal(mine, got)
    again = pickle.loads(pickle.dumps(pulled))(got)
    assert all(torch.equal(a, b) for a, b in zip(again, pulled(got), strict=True))


def test_torch_dtypes_are_dtypes(torch: Any) -> None:
    q = torch.ones(SHAPE, dtype=torch.float16)
    wide = cuflash.attention(q, q, q, out_dtype=torch.float32, backend="numpy")
    assert wide.dtype == torch.float32
    assert cuflash.attention(q, q, q, out_dtype=torch.half, backend="numpy").dtype == torch.float16
    for wrong in (torch.bfloat16, torch.int8, torch.complex64):
        with pytest.raises(cuflash.ArgumentTypeError, match=r"^out_dtype: got "):
            cuflash.attention(q, q, q, out_dtype=wrong, backend="numpy")
    assert "bfloat16" in str(cuflash.explain((4, 8), (4, 8), (4, 8), dtype=torch.bfloat16))


def test_subclasses_of_tensors_come_back_as_tensors(torch: Any) -> None:
    mine = type("Mine", (torch.Tensor,), {"__module__": "nowhere.to_be_found"})
    parameter = torch.nn.Parameter(torch.ones(SHAPE), requires_grad=False)
    for q in (torch.ones(SHAPE).as_subclass(mine), parameter):
        assert type(cuflash.attention(q, q, q, backend="numpy")) is torch.Tensor


def _fake(torch: Any) -> Any:
    fakes = pytest.importorskip("torch._subclasses", reason="this PyTorch has no fake tensors")
    with fakes.FakeTensorMode():
        return torch.ones(SHAPE)


TENSORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "negated": (
        lambda torch: torch.complex(torch.zeros(SHAPE), torch.ones(SHAPE)).conj().imag,
        "negation is still to be done",
    ),
    "conjugated": (lambda torch: torch.ones(SHAPE, dtype=torch.complex64).conj(), "conjugate"),
    "meta": (lambda torch: torch.ones(SHAPE, device="meta"), "meta"),
    "fake": (_fake, "without memory"),
    "zero": (lambda torch: torch._efficientzerotensor(SHAPE), "without memory"),
    "sparse": (lambda torch: torch.ones(SHAPE).to_sparse(), "refused to share"),
    "differentiated": (lambda torch: torch.ones(SHAPE, requires_grad=True), "detach"),
    "the class": (lambda torch: torch.Tensor, "the class torch.Tensor"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_whose_memory_is_not_their_contents(torch: Any, name: str) -> None:
    make, says = TENSORS[name]
    _refused(make(torch), says)


def test_a_resolved_negation_is_taken(torch: Any) -> None:
    x = torch.complex(torch.zeros(SHAPE), torch.ones(SHAPE)).conj().imag.resolve_neg()
    assert (cuflash.attention(x, x, x, backend="numpy") == -1).all()


@pytest.mark.parametrize("transform", ["vmap", "functionalize", "grad"])
def test_tensors_that_are_being_transformed(torch: Any, transform: str) -> None:
    def within(x: Any) -> Any:
        _refused(x, "")
        return x.sum()

    getattr(torch.func, transform)(within)(torch.ones(SHAPE))


def test_torch_tensors_over_one_file_overlap(torch: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "file")
    one, other = (torch.from_file(path, shared=True, size=40).view(SHAPE) for _ in range(2))
    with pytest.raises(cuflash.ArgumentValueError, match="out: got memory that q uses"):
        cuflash.attention(one, one, one, out=other, backend="numpy")


def test_a_deleted_jax_array() -> None:
    jax = _import("jax", "JAX")
    x = jax.device_put(jax.numpy.ones(SHAPE), jax.devices("cpu")[0])
    x.delete()
    _refused(x, "deleted or donated")
    _refused(jax.Array, "the class ")


def test_quantities_with_a_unit() -> None:
    x = np.ones(SHAPE, np.float32)
    units = _import("astropy.units", "astropy")
    _refused(units.Quantity(x, "m"), "which has a unit")
    _refused(units.Quantity(x), "which has a unit")  # a dimensionless quantity
    assert (
        type(cuflash.attention(x, units.Quantity(x, "m").value, x, backend="numpy")) is np.ndarray
    )


def test_quantities_of_pint() -> None:
    pint = _import("pint", "pint")
    quantity = pint.UnitRegistry().Quantity(np.ones(SHAPE, np.float32), "m")
    _refused(quantity, "which has a unit")
    assert type(cuflash.attention(*[quantity.magnitude] * 3, backend="numpy")) is np.ndarray
