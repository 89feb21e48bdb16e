"""Right results, rounded once, and which of a case's results fail: for tests of the kit itself."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash import reference

from .case import Case
from .compare import Registry, compare
from .data import operands
from .oracle import Truth, judge

__all__ = ["failing", "rounded"]

#: The truth of the last problems that were judged. Tests judge many results of one problem.
_TRUTHS: OrderedDict[bytes, Truth] = OrderedDict()
_MOST_TRUTHS = 16


def rounded(case: Case, x: Mapping[str, np.ndarray], **changed: Any) -> dict[str, np.ndarray]:
    """Results that are computed in a wider precision and rounded to the case's dtypes.

    Parameters
    ----------
    case : Case
        float64 is computed in longdouble, which is slow; other dtypes are computed in float64.
    x : mapping
        The inputs, "dout" and "dlse" among them; other operands default to the case's.
    **changed
        Options of the reference in place of the case's.
    """
    wide: Any = np.longdouble if case.dtype == "float64" else np.float64
    options = {**case.options, **operands(case, **x), "dtype": wide, **changed}
    q, k, v = (x[name] for name in "qkv")
    out, lse = reference.attention(q, k, v, **options)
    grads = reference.attention_backward(x["dout"], q, k, v, dlse=x["dlse"], **options)
    found = zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True)
    return {name: array.astype(case.dtype_of(name)) for name, array in found}


def failing(case: Case, got: Mapping[str, np.ndarray], x: Mapping[str, np.ndarray]) -> set[str]:
    """The names of the results that a comparison with the truth rejects."""
    truth = _judged(case, x)
    return {n for n in truth.results if not compare(truth, n, got[n], Registry()).passed}


def _judged(case: Case, x: Mapping[str, np.ndarray]) -> Truth:
    """The truth, computed once for each of the last problems."""
    digest = hashlib.sha256(repr(case).encode())
    for name, array in x.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    key = digest.digest()
    if key not in _TRUTHS:
        _TRUTHS[key] = judge(case, x)
    _TRUTHS.move_to_end(key)
    while len(_TRUTHS) > _MOST_TRUTHS:
        _TRUTHS.popitem(last=False)
    return _TRUTHS[key]
