"""With a soft cap, the kit accepts rounding and rejects wrong caps and slopes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes  # noqa: F401  (adds bfloat16 to NumPy)
import numpy as np
import pytest

from cuflash import reference, reference_heads

from ..kit import oracle
from ..kit.case import Case
from ..kit.compare import Registry, compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.runners import ApiRunner

_CASE = Case(2, 4, 2, 70, 90, 16, 16, causal=True, softcap=2.0, seed=1)
_DTYPES = ["float16", "bfloat16", "float32", "float64"]
_NAMES = ("out", "lse", "dq", "dk", "dv")


def _results(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results computed in wide precision and rounded once."""
    options = {**case.options, "dtype": np.longdouble}
    out, lse = reference.attention(x["q"], x["k"], x["v"], **options)
    dlse = {"dlse": x["dlse"]}
    grads = reference.attention_backward(x["dout"], x["q"], x["k"], x["v"], **dlse, **options)
    found = zip(_NAMES, (out, lse, *grads), strict=True)
    return {name: array.astype(case.dtype_of(name)) for name, array in found}


def _failed(case: Case, got: dict[str, np.ndarray], x: dict[str, np.ndarray]) -> set[str]:
    truth = judge(case, x)
    return {n for n in _NAMES if not compare(truth, n, got[n], Registry()).passed}


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
def test_rounded_results_pass(dtype: str, softcap: float) -> None:
    case = replace(_CASE, dtype=dtype, softcap=softcap)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    assert not _failed(case, _results(case, x), x)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_another_cap_fails(dtype: str) -> None:
    """The cap is off by 3 % in 16 bits, where bfloat16's tanh errs too, and by 1e-4 otherwise."""
    case = replace(_CASE, dtype=dtype)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    other = replace(case, softcap=2.06 if case.storage.itemsize == 2 else 2.0002)
    assert _failed(case, _results(other, x), x) >= {"out", "dv"}
    none = _results(replace(case, softcap=None), x)
    assert _failed(case, none, x) == set(_NAMES)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_gradients_without_slopes_fail(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(_CASE, dtype=dtype)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    with monkeypatch.context() as patched:
        patched.setattr(reference_heads, "cap_slopes", lambda scores, cap: np.ones_like(scores))
        got = _results(case, x)
    assert _failed(case, got, x) == {"dq", "dk"}


def test_a_case_with_a_cap_is_read_back() -> None:
    assert Case.parse(_CASE.repro) == _CASE
    assert "softcap=2.0" in _CASE.repro


@pytest.mark.skipif(not oracle.WIDE, reason="longdouble is no wider than float64")
def test_rows_of_one_score_share_its_error() -> None:
    """The slope of a score far beyond the cap has 87 times the score's error, here in 63 rows."""
    case = Case(1, 1, 1, 63, 1, 192, 128, "float64", values="equal", softcap=0.5, seed=11129)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    runner = ApiRunner("numpy", "fa2")
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    dq, *_ = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    truth = judge(case, x)
    compare(truth, "dq", dq, Registry()).check()
    with pytest.raises(AssertionError, match="rule plain"):
        compare(truth, "dq", dq * (1 + 1e-12), Registry()).check()
