"""Boolean masks on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays, tensor
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import MASKED
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


def _check(row: Row, case: Case) -> dict[str, np.ndarray]:
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth, found = judge(case, x), _results(row, case, x)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


@pytest.mark.parametrize("row", params(*MASKED))
def test_against_float64(row: Row) -> None:
    for case in row.cases():
        if min(case.seqlen_q, case.seqlen_kv) > 1:
            _check(row, case)


@pytest.mark.parametrize("row", params(*MASKED[::3]))
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*MASKED))
def test_a_mask_that_hides_nothing_changes_nothing(row: Row) -> None:
    """But the order of roundings where kernels make weights in another way."""
    case = replace(row.cases()[0], bias="")
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth = judge(replace(case, mask=""), x)
    every = np.ones(case.shape("mask"), bool)
    for name, array in _results(row, case, x, mask=every).items():
        compare(truth, name, array).check()


@pytest.mark.parametrize("row", params(*MASKED))
def test_a_mask_that_hides_everything_leaves_zeros(row: Row) -> None:
    case = replace(row.cases()[0], sinks="")
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    found = _results(row, case, x, mask=np.zeros(case.shape("mask"), bool))
    assert (found.pop("lse") == -np.inf).all()
    for name, array in found.items():
        assert (array == 0).all(), name


@pytest.mark.parametrize("row", params(*(row for row in MASKED if "k" in row.mask)))
def test_keys_that_it_hides_may_hold_anything(row: Row) -> None:
    """Padding, in the forward pass: no score of it is left."""
    case = row.cases()[0]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    hidden = np.arange(case.seqlen_kv) >= case.seqlen_kv * 2 // 3
    mask = tensor(case, "mask") & ~hidden
    truth = judge(case, {**x, "mask": mask})
    case.heads_first("k", x["k"])[:, :, hidden] = np.nan
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], mask=mask)
    for name, array in {"out": out, "lse": lse}.items():
        compare(truth, name, array).check()
