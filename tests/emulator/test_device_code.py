"""The CUDA sources themselves, run on the CPU: what needs no GPU to be right or wrong.

Rounding, order of adding and speed are not the GPU's here; indexing, masks,
barriers, waits, edges and units are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import reference

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.strides import Strides
from .build import compiler
from .device import EmulatedRunner, emulated_device, on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Small tiles, so that short problems have many of them; and the plan's own.
SMALL = {"float16": (32, 32), "bfloat16": (32, 32), "float32": (16, 24), "float64": (16, 24)}
#: Runners by name: of the oldest instructions, and of the newest that FlashAttention-1 uses.
RUNNERS = {
    "sm_90": lambda dtype: EmulatedRunner("90", blocks=SMALL[dtype]),
    "sm_75": lambda dtype: EmulatedRunner("75", blocks=SMALL[dtype]),
    "sm_90-planned": lambda dtype: EmulatedRunner("90"),
}
_STRIDED = {
    "q": Strides((1, 0, 2, 3), (0, 8, 16, 0), 16, (1,)),
    "k": Strides((), (8, 8, 8, 0), 8, (0, 2)),
    "v": Strides((2, 1, 0, 3), (0, 0, 24, 0)),
}


def _cases(dtype: str, dims: tuple[int, int], causal: bool) -> list[Case]:
    """Several tiles and tails both ways; grouped heads; dead rows and tiles; strides; one row."""
    first = Case(2, 4, 2, 70, 100, *dims, dtype, causal=causal, seed=1)
    second = replace(first, batch=1, heads_q=2, seqlen_q=37, seqlen_kv=130, seed=2)
    short = replace(second, q_offset=-40, seqlen_q=70, seqlen_kv=33, layout="bhsd", seed=3)
    return [
        first.with_strides(**_STRIDED),
        replace(second, q_offset=20, values="outliers"),
        short,
        replace(second, seqlen_q=1),
        replace(second, values="x8", layout="bhsd"),
    ]


def _params() -> list[Any]:
    both = [("sm_90", "float16"), ("sm_90", "float32"), ("sm_75", "float16")]
    named = [(*row, causal) for row in both for causal in (False, True)]
    named += [("sm_90", "bfloat16", True), ("sm_90", "float64", True), ("sm_75", "float32", True)]
    found = [
        (name, dtype, dims, causal) for name, dtype, causal in named for dims in ((64, 64), (5, 24))
    ]
    found += [("sm_90", "float16", dims, True) for dims in ((96, 128), (256, 192))]
    found += [("sm_90-planned", dtype, (64, 64), True) for dtype in SMALL]
    return [
        pytest.param(*row, id=f"{row[0]}-{row[1]}-d{row[2][0]}-dv{row[2][1]}-{_mask(row[3])}")
        for row in found
    ]


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


@pytest.mark.parametrize(("name", "dtype", "dims", "causal"), _params())
def test_against_float64(name: str, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    runner = RUNNERS[name](dtype)
    for case in _cases(dtype, dims, causal):
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        truth = judge(case, x)
        given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        grads = runner.backward(case, *given)
        for which, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
            compare(truth, which, got).check()


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [("float16", True), ("bfloat16", False), ("float32", False), ("float64", True)],
)
def test_six_checks(dtype: str, causal: bool) -> None:
    case = Case(1, 4, 2, 70, 100, 32, 48, dtype, causal=causal)
    require(case, run_checks(EmulatedRunner("90", blocks=SMALL[dtype]), case))


@pytest.mark.parametrize("dtype", SMALL)
def test_what_dead_rows_hold_reaches_nothing(dtype: str) -> None:
    runner, case = RUNNERS["sm_90"](dtype), Case(1, 4, 2, 70, 100, 40, 64, dtype)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
    for row in (3, 50):
        x["q"][:, row] = 0
        x["q"][:, row, :, 0] = -np.inf
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    expected = reference.attention_backward(
        x["dout"], x["q"], x["k"], x["v"], dlse=x["dlse"], dtype=np.float64
    )
    for got, truth in zip(grads, expected, strict=True):
        assert np.isfinite(truth).all()
        assert np.abs(got.astype(np.float64) - truth).max() < 0.05 * np.abs(truth).max()
    assert (out[:, [3, 50]] == 0).all()
    assert (grads[0][:, [3, 50]] == 0).all()
    assert (lse[..., [3, 50]] == -np.inf).all()


def test_batches_lie_more_than_two_to_the_31_elements_apart() -> None:
    runner, case = RUNNERS["sm_90"]("float16"), Case(2, 1, 1, 20, 30, 16, 16, "float16")
    x = arrays(case, "q", "k", "v")
    expected = runner.forward(case, x["q"], x["k"], x["v"])[0]
    far = 2**31 + 64
    memory = np.empty(far + 30 * 16, np.float16)  # of which little is ever touched
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
