"""A sink far above the scores of a row multiplies the row by one factor, which has an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kit import oracle
from tests.kit.case import Case
from tests.kit.compare import Registry, compare
from tests.kit.data import arrays
from tests.kit.oracle import judge
from tests.unit.emulation import Emulation

pytestmark = pytest.mark.skipif(not oracle.WIDE, reason="longdouble is no wider than float64")

_SEEDS = 20


def _worst(case: Case, sink: float, score: float, bug: str = "") -> dict[str, float]:
    """The worst ratio to the limit over many seeds; ``score`` is added to all scores."""
    found: dict[str, float] = {}
    for seed in range(_SEEDS):
        x = arrays(replace(case, seed=seed), "q", "k", "v", "dout", "dlse")
        for name in ("v", "dout"):  # the added numbers have one sign
            np.abs(x[name], out=x[name])
        x["q"][..., 0], x["k"][..., 0] = score / case.factor, 1
        x["dlse"][...] = 0  # dlse would hide the error of delta
        x["sinks"] = np.full(case.heads_q, sink, case.dtype_of("sinks"))
        given, runner = (x["q"], x["k"], x["v"]), Emulation(bug)
        out, lse = runner.forward(case, *given, sinks=x["sinks"])
        grads = runner.backward(case, x["dout"], *given, out, lse, x["dlse"], sinks=x["sinks"])
        truth = judge(case, x)
        for name, got in zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True):
            worst = compare(truth, name, got, Registry()).worst
            found[name] = max(found.get(name, 0), worst.ratio / worst.limit)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("sink", "score"), [(20.0, 0.0), (0.3, -60.0)])
def test_the_rounding_of_the_distance_passes(dtype: str, sink: float, score: float) -> None:
    """The sink is far from 0, or the scores are."""
    case = Case(seqlen_q=31, seqlen_kv=200, head_dim=16, head_dim_v=8, dtype=dtype, sinks=dtype)
    worst = _worst(case, sink, score)
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("bug", ["sink_twice", "sink_output"])
def test_a_wrong_sink_far_above_the_scores_is_rejected(dtype: str, bug: str) -> None:
    case = Case(seqlen_q=31, seqlen_kv=200, head_dim=16, head_dim_v=8, dtype=dtype, sinks=dtype)
    assert _worst(case, 9.0, 0.0, bug)["out"] > 1
