"""FlashAttention-2's forward tiles of wide heads: pairs of warps, and K and V in one stage.

As many heads as fill the device, since the plan takes others for few; some are
held to the truth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays, raise_scores
from ..kit.oracle import judge
from ..kit.runners import ApiRunner
from .common import last_heads

_HALVES = ("float16", "bfloat16")
_FULL_OF_TILES = {"batch": 6, "heads_q": 12, "heads_kv": 6, "seqlen_q": 290}


def _tile(cp: Any, case: Case) -> Any:
    shapes = [case.shape(name) for name in "qkv"]
    named: dict[str, Any] = {"dtype": case.dtype, "causal": case.causal, "algorithm": "fa2"}
    tile = cuflash.prepare(*shapes, **named).plan.tile
    if cp.cuda.Device().compute_capability != "90":
        pytest.skip(f"not on this device: {tile}")
    return tile


def _check(case: Case, rising: int = 0) -> None:
    x = arrays(case, "q", "k", "v")
    if rising:
        raise_scores(x, rising, 5.0)
    runner = ApiRunner("cuda", "fa2")
    results = dict(zip(("out", "lse"), runner.forward(case, x["q"], x["k"], x["v"]), strict=True))
    again = runner.forward(case, x["q"], x["k"], x["v"])
    last = replace(case, batch=1, heads_q=2, heads_kv=1)
    of_last = {name: last_heads(last, name, array) for name, array in x.items()}
    of_last["dout"] = np.zeros_like(last_heads(last, "out", results["out"]))
    truth = judge(last, of_last)
    for (name, got), other in zip(results.items(), again, strict=True):
        assert got.tobytes() == other.tobytes(), f"{name}: two runs differ"
        compare(truth, name, last_heads(last, name, got)).check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dims", [(256, 256), (250, 192), (200, 40)], ids=("dims0", "dims1", "dims2")
)
@pytest.mark.parametrize("dtype", _HALVES)
def test_pairs_of_warps(cp: Any, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    """Maxima that hold, outliers, maxima that rise all the time; tails both ways."""
    for values, rising in (("normal", False), ("outliers", False), ("normal", True)):
        case = Case(
            **_FULL_OF_TILES,
            seqlen_kv=1100,
            head_dim=dims[0],
            head_dim_v=dims[1],
            dtype=dtype,
            causal=causal,
            values=values,
        )
        tile = _tile(cp, case)
        assert tile.paired
        _check(case, tile.block_kv if rising else 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dims", [(192, 192), (160, 256), (256, 16)], ids=("dims0", "dims1", "dims2")
)
@pytest.mark.parametrize("dtype", _HALVES)
def test_single_stage(cp: Any, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    for seqlen_kv in (70, 700):
        case = Case(
            **_FULL_OF_TILES,
            seqlen_kv=seqlen_kv,
            head_dim=dims[0],
            head_dim_v=dims[1],
            dtype=dtype,
            causal=causal,
        )
        tile = _tile(cp, case)
        assert tile.num_stages == 1
        _check(case, tile.block_kv)
