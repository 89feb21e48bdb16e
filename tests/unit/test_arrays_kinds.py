"""Kinds of arrays: other libraries' arrays, subclasses, and objects that only look like arrays."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.adopt import adopt

from .foreign import Tensor, library

__all__ = ["library"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (1, 5, 2, 4)


def _normal(dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(dtype)


def _refused(value: Any, says: str) -> None:
    """Check that both passes refuse the value as any argument before they write anything."""
    x, rows = _normal(), np.zeros((1, 2, 5), np.float32)
    out = np.full(SHAPE, 7, np.float32)
    for name in ("q", "k", "v", "out", "lse_out"):
        arrays = {"q": x, "k": x, "v": x, "out": out, name: value}
        with pytest.raises(cuflash.ArgumentTypeError, match=f"^{name}: got .*{says}"):
            cuflash.attention(**arrays, backend="numpy")
    for name in ("dout", "q", "k", "v", "out", "lse", "dlse"):
        arrays = dict.fromkeys(("dout", "q", "k", "v", "out"), x) | {"lse": rows, name: value}
        with pytest.raises(cuflash.ArgumentTypeError, match=f"^{name}: got .*{says}"):
            cuflash.attention_backward(**arrays, backend="numpy")
    assert (out == 7).all()


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_another_librarys_arrays_are_answered_in_kind(
    library: ModuleType, dtype: str, versioned: bool
) -> None:
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    plain = _normal(kind)

    def foreign(array: np.ndarray) -> Tensor:
        half = array.dtype == BFLOAT16
        return Tensor(array.view(np.uint16) if half else array, dtype if half else "", versioned)

    q = foreign(plain)
    native = adopt("q", q).native
    assert native.dtype == kind
    assert np.shares_memory(native, plain)
    expected, lse = cuflash.attention(plain, plain, plain, return_lse=True, backend="numpy")
    grads = cuflash.attention_backward(expected, plain, plain, plain, expected, lse)
    got, pullback = cuflash.attention_vjp(q, q, q, backend="numpy")
    for one, other in zip((got, *pullback(got)), (expected, *grads), strict=True):
        assert type(one) is Tensor
        assert one.dtype == dtype
        assert one.array.tobytes() == other.tobytes()
    made = np.zeros_like(plain)
    mine = foreign(made)
    if versioned:
        assert cuflash.attention(q, q, q, out=mine, backend="numpy") is mine
        assert made.tobytes() == expected.tobytes()
    else:  # an unversioned capsule cannot say that its memory may be written
        with pytest.raises(cuflash.ArgumentValueError, match="out: got a read-only array"):
            cuflash.attention(q, q, q, out=mine, backend="numpy")


def test_a_subclass_is_answered_by_the_library_of_its_base(library: ModuleType) -> None:
    class Mine(Tensor):
        pass

    Mine.__module__ = "nowhere.to_be_found"
    q = Mine(_normal())
    out = cuflash.attention(q, q, q, backend="numpy")
    assert type(out) is Tensor
    given = Mine(np.zeros(SHAPE, np.float32))
    assert cuflash.attention(q, q, q, out=given, backend="numpy") is given
    assert np.array_equal(given.array, out.array)


def test_arrays_of_no_library_are_answered_by_numpy() -> None:
    class Mine(Tensor):
        pass

    q = Mine(_normal())
    assert type(cuflash.attention(q, q, q, backend="numpy")) is np.ndarray


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Nowhere", "without memory"),
        ("Negative", "negation is still to be done; expected its resolve_neg()"),
        ("Deleted", "deleted or donated"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_that_is_not_the_contents_is_refused(
    library: ModuleType, kind: str, says: str, dtype: str
) -> None:
    memory = _normal(BFLOAT16).view(np.uint16) if dtype == "bfloat16" else _normal()
    _refused(getattr(library, kind)(memory, dtype), says.replace("(", r"\(").replace(")", r"\)"))


def test_nothing_needs_no_memory(library: ModuleType) -> None:
    q = library.Nowhere(np.zeros((1, 0, 2, 4), np.float32))
    kv = _normal()
    assert cuflash.attention(q, kv, kv, backend="numpy").array.shape == (1, 0, 2, 4)
    positive = library.Negative(_normal())
    for pending in (False, "of each element"):  # another library's is_neg may return anything
        positive.pending = pending
        cuflash.attention(positive, kv, kv, backend="numpy")


def test_no_bfloat16_has_8_bits(library: ModuleType) -> None:
    _refused(Tensor(np.zeros(SHAPE, np.uint8), "bfloat16"), "refused to share its memory")


def _mean(kind: type) -> type:
    """A subclass whose memory is right, but whose methods all fail."""

    def wrong(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is asked of a subclass")

    names = ("__getitem__", "__setitem__", "__array_ufunc__", "__array_function__", "__matmul__")
    names += ("transpose", "astype", "copy", "view", "reshape", "sum", "__add__", "__mul__")
    return type("Mean", (kind,), dict.fromkeys(names, wrong))


_KINDS: dict[str, type] = {
    "a subclass": type("Mine", (np.ndarray,), {}),
    "a mean one": _mean(np.ndarray),
    "a record array": np.recarray,
    "a mean one of that": _mean(np.recarray),
}


@given(
    kinds=st.dictionaries(
        st.sampled_from(["q", "k", "v", "out", "lse_out", "dout", "lse", "dlse", "dq", "dk", "dv"]),
        st.sampled_from(sorted(_KINDS)),
        min_size=1,
    ),
    dtype=st.sampled_from([np.float16, BFLOAT16, np.float32, np.float64]),
    causal=st.booleans(),
)
def test_subclasses_are_computed_as_plain_arrays(
    kinds: dict[str, str], dtype: Any, causal: bool
) -> None:
    rows = np.float64 if dtype is np.float64 else np.float32

    def of_kind(name: str, array: np.ndarray) -> np.ndarray:
        return np.ndarray.view(array, _KINDS[kinds[name]]) if name in kinds else array

    def run(of: Any) -> tuple[np.ndarray, ...]:
        x = {name: _normal(dtype, seed) for seed, name in enumerate(("q", "k", "v", "dout"))}
        x = {name: of(name, array) for name, array in x.items()}
        out = of("out", np.zeros(SHAPE, dtype))
        lse = of("lse_out", np.zeros((1, 2, 5), rows))
        qkv, options = (x["q"], x["k"], x["v"]), {"causal": causal, "backend": "numpy"}
        assert cuflash.attention(*qkv, out=out, lse_out=lse, **options) is out
        plain = cuflash.attention(*qkv, return_lse=True, **options)
        given = [np.ndarray.view(array, np.ndarray) for array in (out, lse)]
        dlse = of("dlse", np.ones((1, 2, 5), rows))
        grads = tuple(of(name, np.zeros(SHAPE, dtype)) for name in ("dq", "dk", "dv"))
        saved = (x["dout"], *qkv, out, of("lse", given[1]))
        made = cuflash.attention_backward(*saved, dlse=dlse, **options)
        got = cuflash.attention_backward(*saved, dlse=dlse, grads=grads, **options)
        assert all(one is other for one, other in zip(got, grads, strict=True))
        assert all(type(array) is np.ndarray for array in (*plain, *made))
        written = [np.ndarray.view(array, np.ndarray) for array in grads]
        return (*given, *plain, *written, *made)

    for got, expected in zip(run(of_kind), run(lambda name, array: array), strict=True):
        assert got.tobytes() == expected.tobytes()


def test_a_memmap_is_an_array(tmp_path: Path) -> None:
    x = _normal()
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=SHAPE)
    mapped[...] = x
    out = cuflash.attention(mapped, x, x, backend="numpy")
    assert type(out) is np.ndarray
    assert np.array_equal(out, cuflash.attention(x, x, x, backend="numpy"))


class _Quantity(np.ndarray):
    """A quantity as in astropy and unyt; the unit of a column of a table may be None."""

    unit: str | None = "m"


def test_what_would_lose_its_meaning_is_refused() -> None:
    x = _normal()
    _refused(np.ma.masked_array(x), "MaskedArray; expected a plain NumPy array")
    _refused(np.ma.masked_array(x, x > 0), "MaskedArray")
    _refused(x[0, :, 0].view(np.matrix), "matrix")
    _refused(x.view(_Quantity), "which has a unit")
    _refused(SimpleNamespace(units="m", __array__=x.__array__), "which has a unit")
    column = x.view(_Quantity)
    column.unit = None
    assert type(cuflash.attention(column, column, column, backend="numpy")) is np.ndarray
    _refused(np.zeros(SHAPE, "V0"), "dtype void")


def test_a_wrapper_that_passes_everything_on_is_no_array() -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            if name in ("unit", "units"):
                raise AttributeError(name)
            return getattr(_normal(), name)

    _refused(Wrapper(), "Wrapper; expected an array")


@pytest.mark.parametrize("kind", [np.ndarray, Tensor, int, SimpleNamespace])
def test_a_class_is_no_array(kind: type) -> None:
    _refused(kind, rf"the class {kind.__module__}\.{kind.__qualname__}; expected an array")


def test_mocks_are_no_arrays() -> None:
    _refused(mock.Mock(spec=np.ndarray), "Mock; expected an array")
    _refused(mock.MagicMock(), "MagicMock")
