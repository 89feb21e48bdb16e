"""Orders of thread blocks that the plan does not choose for small problems."""

from __future__ import annotations

from unittest import mock

import pytest

from cuflash.planning import fa2

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .rows import ROWS, Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_HALF = [r for r in ROWS if (r.algorithm, r.dtype, r.dims) == ("fa2", "float16", (64, 64))]


@pytest.mark.parametrize("row", params(*(r for r in _HALF if not r.planned)))
def test_heads_in_groups(row: Row) -> None:
    """Groups of three do not divide eight query heads or four kv heads: the last is smaller."""
    case = Case(2, 4, 2, 70, 100, *row.dims, row.dtype, causal=row.causal, seed=1)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    with mock.patch.object(fa2, "head_group_of", return_value=3):
        out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
        given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        grads = row.runner.backward(case, *given)
    truth = judge(case, x)
    for which, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        compare(truth, which, got).check()
