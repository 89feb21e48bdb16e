"""Dropout on the emulated device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.options import check_options

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import DROPPED
from .host_cupy import host_cupy
from .rows import Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(
    row: Row, case: Case, x: dict[str, np.ndarray], **beside: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes, by name."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], **beside)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = row.runner.backward(case, *given, **beside)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


@pytest.mark.parametrize("row", params(*DROPPED))
def test_against_float64(row: Row) -> None:
    for case in row.cases():
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        truth = judge(case, x)
        for name, got in _results(row, case, x).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("row", params(*DROPPED[::3]))
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*(r for r in DROPPED if not r.bias and not r.mask)))
def test_both_passes_keep_what_the_mask_says(row: Row) -> None:
    """All weights are equal, and each column of v and of dout selects one pair."""
    case = replace(row.cases()[0], values="normal", layout="bshd", strides=Case().strides)
    keep: Any = {"dropout_p": case.dropout_p, "dropout_seed": case.dropout_seed}
    shape = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    kept = cuflash.dropout_mask(shape, **keep) & case.sees()
    flat = (
        {"alibi_slopes": np.zeros(case.shape("alibi_slopes"), case.statistics)}
        if case.alibi
        else {}
    )
    zero = {name: np.zeros(case.shape(name), case.storage) for name in ("q", "k", "v", "dout")}
    width, first = case.head_dim_v, 16
    columns = np.arange(first, min(first + width, case.seqlen_kv))
    v = zero["v"].copy()
    v[:, columns, :, columns - first] = 1
    out, lse = row.runner.forward(case, zero["q"], zero["k"], v, **flat)
    found = out.swapaxes(1, 2)[..., : columns.size] != 0
    np.testing.assert_array_equal(found, kept[..., columns])
    rows = np.arange(first, min(first + width, case.seqlen_q))
    dout = zero["dout"].copy()
    dout[:, rows, :, rows - first] = 1
    out = np.zeros_like(out)
    dv = row.runner.backward(case, dout, zero["q"], zero["k"], v, out, lse, **flat)[2]
    found = dv.swapaxes(1, 2)[..., : rows.size].swapaxes(2, 3) != 0
    of_group = kept[:, :, rows].reshape(case.batch, case.heads_kv, -1, rows.size, case.seqlen_kv)
    np.testing.assert_array_equal(found, of_group.any(axis=2))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_part_of_a_call_draws_as_the_whole(algorithm: Any) -> None:
    """Two mapped entries have the same heads of one entry; the seed holds their place in it."""
    random = np.random.default_rng(2)
    q, k, v = random.standard_normal((3, 2, 40, 6, 64)).astype(np.float16)
    keywords: dict[str, Any] = {"dropout_p": 0.3, "algorithm": algorithm, "backend": "cuda"}
    words = np.array([1, 2, 3, 4, 1, 2], np.uint32)
    some = {name: x[[1, 1], :, 2:5] for name, x in (("q", q), ("k", k), ("v", v))}
    options = replace(check_options(**keywords), draws=(1, 6))
    with host_cupy() as host:
        whole = host.call(cuflash.attention, q, k, v, **keywords, dropout_seed=words[:4])
        inputs = {**some, "dropout_seed": words}
        part = host.call(dispatch.run, "forward", inputs, {}, options)["out"]
    for entry in part:
        np.testing.assert_array_equal(entry, whole[1, :, 2:5])
