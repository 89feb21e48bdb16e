"""A bias on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import BIASED
from .rows import Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(
    row: Row, case: Case, x: dict[str, np.ndarray], **beside: np.ndarray
) -> dict[str, np.ndarray]:
    """Of both passes."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], **beside)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = row.runner.backward(case, *given, **beside)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _inputs(case: Case) -> dict[str, np.ndarray]:
    return arrays(case, "q", "k", "v", "dout", "dlse")


@pytest.mark.parametrize("row", params(*BIASED))
def test_against_float64(row: Row) -> None:
    for case in row.cases():
        x = _inputs(case)
        truth = judge(case, x)
        for name, got in _results(row, case, x).items():
            compare(truth, name, got).check()
