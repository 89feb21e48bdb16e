"""The CUDA sources themselves, run on the CPU.

The tests cover indexing, masks, barriers, waits, edges and units. Rounding, the order of additions
and speed differ from a GPU's.
"""

from __future__ import annotations

import numpy as np
import pytest

from cuflash import reference

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays, raise_scores
from ..kit.oracle import judge
from .build import compiler
from .device import EmulatedRunner, emulated_device, on_device
from .rows import ROWS, SMALL, Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_SMALL = [row for row in ROWS if not row.planned and row.dims == (64, 64)]
_NEWEST = [row for row in _SMALL if (row.algorithm, row.architecture) == ("fa2", "90")]
_HOPPER = [row for row in ROWS if row.algorithm == "fa3"]


@pytest.mark.parametrize("row", params(*ROWS))
def test_against_float64(row: Row) -> None:
    for case in row.cases():
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
        truth = judge(case, x)
        given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        grads = row.runner.backward(case, *given)
        for which, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
            compare(truth, which, got).check()


@pytest.mark.parametrize("row", params(*(row for row in ROWS if row.algorithm == "fa2")))
def test_maxima_that_rise(row: Row) -> None:
    case = Case(1, 2, 1, 70, 100, *row.dims, row.dtype, causal=row.causal)
    x = arrays(case, "q", "k", "v")
    block_kv = row.runner.tiles(case)[1]
    raise_scores(x, block_kv, 5.0 if block_kv == 64 else 8.0)
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
    truth = judge(case, {**x, "dout": np.zeros_like(out)})
    for which, got in (("out", out), ("lse", lse)):
        compare(truth, which, got).check()


@pytest.mark.parametrize("row", params(*_NEWEST))
def test_six_checks(row: Row) -> None:
    case = Case(1, 2, 1, 40, 70, *row.dims, row.dtype, causal=row.causal)
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*dict.fromkeys([*_SMALL, *_HOPPER])))
def test_what_dead_rows_hold_reaches_nothing(row: Row) -> None:
    dead = (3, 50)
    case = Case(1, 4, 2, 70, 100, *row.dims, row.dtype, causal=row.causal)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
    x["q"][:, dead] = 0
    x["q"][:, dead, :, 0] = -np.inf
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
    given = (x["dout"], x["q"], x["k"], x["v"])
    grads = row.runner.backward(case, *given, out, lse, x["dlse"])
    expected = reference.attention_backward(
        *given, dlse=x["dlse"], causal=row.causal, dtype=np.float64
    )
    for got, truth in zip(grads, expected, strict=True):
        assert np.isfinite(truth).all()
        assert np.abs(got.astype(np.float64) - truth).max() < 0.05 * np.abs(truth).max()
    assert (out[:, dead] == 0).all()
    assert (grads[0][:, dead] == 0).all()
    assert (lse[..., dead] == -np.inf).all()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_batches_lie_more_than_two_to_the_31_elements_apart(algorithm: str) -> None:
    runner = EmulatedRunner("90", algorithm, SMALL["float16"])
    case = Case(2, 1, 1, 20, 30, 16, 16, "float16")
    x = arrays(case, "q", "k", "v")
    expected = runner.forward(case, x["q"], x["k"], x["v"])[0]
    far = 2**31 + 64
    memory = np.empty(far + 30 * 16, np.float16)  # little of it is ever touched
    k = np.lib.stride_tricks.as_strided(memory, x["k"].shape, (2 * far, 32, 32, 2))
    k[...] = x["k"]
    out = np.full_like(expected, np.nan)
    with emulated_device("90"):
        tensors = [on_device(a) for a in (x["q"], k, x["v"])]
        ready = runner.prepare(case, "forward", tensors)
        workspace = np.empty(ready.workspace_bytes + 256, np.uint8)
        pointers = {n: a.ctypes.data for n, a in (*x.items(), ("k", k), ("out", out))}
        ready.run(pointers, workspace=-(-workspace.ctypes.data // 256) * 256)
    assert np.array_equal(out, expected)
