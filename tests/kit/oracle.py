"""The expected results of a case, and the errors that rounding alone may cause."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from cuflash import reference

from .case import Case
from .data import operands
from .error_model import model_of
from .plain import plain

__all__ = ["Truth", "judge"]

#: NumPy computes x86's extended precision; elsewhere it may be float64 or software.
WIDE = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps


@dataclass(frozen=True)
class Truth:
    """Exact results of a case; arrays are (batch, head, row, dim), rows (batch, head, row).

    Attributes
    ----------
    results : dict
        "out", "lse" and, if requested, the names in ``case.gradients``; those of features keep
        their own axes.
    model : dict
        E of every row of every result, from :mod:`~tests.kit.error_model`.
    plain : tuple of dict
        The results of plain NumPy, forwards and backwards; empty for 16-bit dtypes.
    """

    case: Case
    results: dict[str, np.ndarray]
    model: dict[str, np.ndarray]
    plain: tuple[dict[str, np.ndarray], ...] = ()


def judge(case: Case, inputs: Mapping[str, np.ndarray]) -> Truth:
    """The truth of a case.

    Parameters
    ----------
    case : Case
        float64 is judged in longdouble, so keep it small.
    inputs : mapping
        "q", "k", "v", for the gradients "dout" and perhaps "dlse", in the case's layout. Arrays in
        ``case.operands`` default to the case's.
    """
    with _blas().limit(limits=1, user_api="blas"):
        return _judge(case, inputs)


@functools.cache
def _blas() -> ThreadpoolController:
    """BLAS limited to one thread: with two processes, small products on two threads take four
    times as long."""
    return ThreadpoolController()


def _judge(case: Case, inputs: Mapping[str, np.ndarray]) -> Truth:
    asked, case = (
        case,
        replace(case, written=False),
    )  # in the reference's own terms
    wide: Any = np.longdouble if case.dtype == "float64" else np.float64
    if case.dtype == "float64" and not WIDE:
        raise RuntimeError("float64 cannot be judged here: longdouble is no wider")
    beside = operands(case, **{name: inputs.get(name) for name in case.operands})
    inputs = {**inputs, **beside}
    options = {**case.options, "dtype": wide, **beside}
    q, k, v = (inputs[name] for name in "qkv")
    out, lse = reference.attention(q, k, v, **options)
    results = {"out": out, "lse": lse}
    if "dout" in inputs:
        dlse = inputs.get("dlse")
        grads = reference.attention_backward(inputs["dout"], q, k, v, dlse=dlse, **options)
        results.update(zip(case.gradients, grads, strict=True))
    results = {name: case.heads_first(name, array) for name, array in results.items()}
    steps = (1, -1) if case.storage.itemsize > 2 else ()
    comparators = tuple(plain(case, inputs, step) for step in steps)
    return Truth(asked, results, model_of(case, inputs, results), comparators)
