"""NaN and infinity reach exactly the results that see them, on the emulated device."""

from __future__ import annotations

import pytest

from ..kit.case import Case
from ..kit.nonfinite import SPOILED, spoiled
from .build import compiler
from .rows import ROWS, Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_SHOWN = [
    row
    for row in ROWS
    if (
        not row.planned
        and row.dims == (64, 64)
        and not row.forward_row
        and row.architecture != "75"
    )
    or row.algorithm == "fa3"
]


@pytest.mark.parametrize("row", params(*_SHOWN))
@pytest.mark.parametrize(
    "place", [0.1, 0.6]
)  # keys that are seen; a hidden key may reach results of its tile
def test_who_sees_it(row: Row, place: float) -> None:
    wide = row.algorithm == "fa3" or row.filled
    lengths = (150, 200) if wide else (70, 100)
    case = Case(1, 2, 1, *lengths, *row.dims, row.dtype, causal=row.causal, q_offset=-20, seed=1)
    slack = 128 if wide else 64
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, slack)
        x = one.x
        out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
        given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        dq, dk, dv = row.runner.backward(case, *given)
        one.check({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
