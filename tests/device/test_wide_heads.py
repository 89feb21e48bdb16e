"""FlashAttention-2's forward tiles of wide heads: pairs of warps, and K and V in one stage.

The heads fill the device, because the plan takes other tiles for few; some are compared with the
truth. Every pass runs twice, with the same bits.
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
    named: dict[str, Any] = {"dtype": case.dtype, "algorithm": "fa2", **case.options}
    tile = cuflash.prepare(*shapes, **named).plan.tile
    if cp.cuda.Device().compute_capability != "90":
        pytest.skip(f"not on this device: {tile}")
    return tile


def _run(case: Case, x: dict[str, np.ndarray], out_dtype: str = "") -> dict[str, np.ndarray]:
    """Out and lse of two runs, which must have the same bits."""
    runner = ApiRunner("cuda", "fa2")
    if out_dtype:  # the runner's destinations would have the case's dtype
        runner = replace(runner, destinations=False, options=(("out_dtype", out_dtype),))
    first, again = (runner.forward(case, x["q"], x["k"], x["v"]) for _ in range(2))
    for name, got, other in zip(("out", "lse"), first, again, strict=True):
        assert got.tobytes() == other.tobytes(), f"{name}: two runs differ"
    return {"out": first[0], "lse": first[1]}


def _hold(case: Case, x: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
    """Compare the last heads with the truth."""
    last = replace(case, batch=1, heads_q=2, heads_kv=1)
    of_last = {name: last_heads(last, name, array) for name, array in x.items()}
    of_last["dout"] = np.zeros(last.shape("dout"), case.storage)
    truth = judge(last, of_last)
    for name, got in results.items():
        compare(truth, name, last_heads(last, name, got)).check()


def _check(case: Case, rising: int = 0) -> None:
    x = arrays(case, "q", "k", "v")
    if rising:
        raise_scores(x, rising, 5.0)
    _hold(case, x, _run(case, x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dims", [(256, 256), (250, 192), (200, 40)], ids=("dims0", "dims1", "dims2")
)
@pytest.mark.parametrize("dtype", _HALVES)
def test_pairs_of_warps(cp: Any, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    """Maxima that hold, outliers, and maxima that rise all the time; tails both ways."""
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


def _square(cp: Any, dtype: str, seqlen_kv: int, q_offset: int) -> Case:
    """Causal, of head_dim 256: the length selects one warp per row or a pair."""
    dims = {"head_dim": 256, "head_dim_v": 256}
    lengths = {**_FULL_OF_TILES, "seqlen_kv": seqlen_kv}
    case = Case(**lengths, **dims, dtype=dtype, causal=True, q_offset=q_offset)
    tile, paired = _tile(cp, case), seqlen_kv >= 1024
    assert (tile.paired, tile.num_stages) == (paired, 2 if paired else 1)
    return case


_square_problems = pytest.mark.parametrize(
    ("dtype", "seqlen_kv", "q_offset"),
    [(dtype, *lengths) for dtype in _HALVES for lengths in ((300, 40), (1100, -40), (1100, 900))],
)


@_square_problems
def test_float32_output(cp: Any, dtype: str, seqlen_kv: int, q_offset: int) -> None:
    """There is no rounding to 16 bits between the sums and the output."""
    case = _square(cp, dtype, seqlen_kv, q_offset)
    x = arrays(case, "q", "k", "v")
    rounded, results = _run(case, x), _run(case, x, "float32")
    assert results["out"].dtype == np.float32
    _hold(case, x, results)
    assert results["out"].astype(case.storage).tobytes() == rounded["out"].tobytes()
    assert results["lse"].tobytes() == rounded["lse"].tobytes()


@_square_problems
def test_keys_of_minus_infinity(cp: Any, dtype: str, seqlen_kv: int, q_offset: int) -> None:
    """Scores are minus infinity at all keys of entry 0 and at the last 100 keys of the others.

    Kernels visit the last keys first. The other keys end within a tile, in the half of the tile
    that the second warp of a pair has.
    """
    case = _square(cp, dtype, seqlen_kv, q_offset)
    x = arrays(case, "q", "k", "v")
    seen = seqlen_kv - 100
    x["q"][..., 0] = 1
    x["k"][0, :, :, 0] = x["k"][1:, seen:, :, 0] = -np.inf
    results = _run(case, x)
    assert (results["out"][0] == 0).all()
    assert (results["lse"][0] == -np.inf).all()
    shorter = replace(case, seqlen_kv=seen)
    _hold(shorter, {name: a if name == "q" else a[:, :seen] for name, a in x.items()}, results)


@pytest.mark.parametrize("seqlen_kv", [300, 1100])
@pytest.mark.parametrize("dtype", _HALVES)
def test_dead_rows_hold_anything(cp: Any, dtype: str, seqlen_kv: int) -> None:
    """The mask hides all keys from the first 40 rows; a row in another warp is dead by itself."""
    case = _square(cp, dtype, seqlen_kv, -40)
    x = arrays(case, "q", "k", "v")
    x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
    clean = _run(case, x)
    _hold(case, x, clean)
    assert (clean["out"][:, :40] == 0).all()
    assert (clean["lse"][:, :, :40] == -np.inf).all()
    x["q"][:, :40] = np.nan
    x["q"][:, 170] = 0
    x["q"][:, 170, :, 0] = -np.inf
    clean["out"][:, 170] = 0
    clean["lse"][:, :, 170] = -np.inf
    for name, got in _run(case, x).items():
        assert np.array_equal(got, clean[name]), name
