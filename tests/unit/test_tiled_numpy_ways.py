"""FlashAttention-2's three ways through a block: the paper's, for few rows, for small scores."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import tiled_numpy
from cuflash.planning.device import HostLimits
from cuflash.planning.plan import plan
from cuflash.tiled_numpy import fa2, threads

from .tiled_case import check, definition, destinations, draw, problem, run, solve

WAYS = ("_block", "_small_block", "few_rows_block")
SITUATIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "grouped": {"heads_q": 6, "heads_kv": 2, "mask": "causal"},
    "dead rows": {"mask": "causal", "q_offset": -7, "head_dim_v": 3},
    "nothing visible": {"mask": "causal", "q_offset": -19},
    "batches": {"batch": 3, "seqlen_q": 41, "mask": "causal", "q_offset": -18},
}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ways that ran."""
    taken: list[str] = []

    def noted(name: str) -> Any:
        way = getattr(fa2, name)

        def call(*arguments: Any) -> None:
            taken.append(name)
            way(*arguments)

        return call

    for name in WAYS:
        monkeypatch.setattr(fa2, name, noted(name))
    return taken


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(fa2, "FEW_ROWS", 10**9 if way == "few_rows_block" else 0)
    monkeypatch.setattr(fa2, "_ROWS_TO_MEASURE", 1 if way == "_small_block" else 10**9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("blocks", [(5, 7), (3, 100), (64, 2)])
def test_every_way_is_attention(
    blocks: tuple[int, int],
    situation: str,
    way: str,
    ways: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, way)
    p = problem(**SITUATIONS[situation])
    given = draw(p)
    check(solve(p, given, blocks=blocks), definition(p, given), 1e-13)
    assert set(ways) <= {way, "_block"}
    if situation != "nothing visible":  # then nothing can be measured
        assert set(ways) == {way}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_comes_out_of_every_way(
    bad: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, way)
    p = problem(mask="causal")
    given = draw(p)
    given["q"][..., 0] = 1
    given["k"][0, 9, 1, 0] = bad
    got = solve(p, given, blocks=(4, 4))
    sees = np.arange(19) + 4 >= 9
    assert np.isnan(got.out[0, sees, 1]).all()
    assert np.isnan(got.lse[0, 1, sees]).all()
    assert np.isfinite(got.out[0, :, 0]).all()


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ("", "_small_block"),
        ("large scores", "_block"),
        ("large values", "_block"),
        ("tiny values", "_block"),
        ("values of zero", "_small_block"),
        ("a NaN among the keys", "_block"),
        ("hidden NaN", "_small_block"),
        ("common component", "_small_block"),
    ],
)
def test_the_maximum_is_left_out_only_where_it_may_be(
    change: str, way: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa2, "FEW_ROWS", 0)
    p = problem(storage="float32", seqlen_q=300, seqlen_kv=310, mask="causal", q_offset=0)
    given = draw(p)
    if change == "large scores":
        given["q"] *= 20
    elif change == "common component":
        given["k"] += 100
    elif change == "a NaN among the keys":
        given["k"][0, 3] = np.nan
    elif change == "hidden NaN":
        given["k"][:, 300:] = np.nan
        given["v"][:, 300:] = np.nan
    else:
        given["v"] *= {"large values": 1e30, "tiny values": 1e-30, "values of zero": 0}.get(
            change, 1
        )
    into = destinations(p)
    chosen = plan(p, HostLimits(1 << 20), blocks=(64, 64))
    tiled_numpy.forward(chosen, *(given[n] for n in "qkv"), into["out"], into["lse"])
    assert ways[0] == way
    for name in "kv":
        given[name][:, 300:] = 0
    wanted = definition(p, given).out
    seen = np.isfinite(wanted)
    size = np.abs(wanted[seen]).max(initial=0)
    assert np.abs(into["out"][seen] - wanted[seen]).max(initial=0) <= 1e-4 * size


def test_few_rows_go_their_own_way(ways: list[str]) -> None:
    p = problem(storage="float32", heads_q=8, heads_kv=2, seqlen_q=4, seqlen_kv=500)
    given = draw(p)
    check(solve(p, given), definition(p, given), 1e-5)
    assert set(ways) == {"few_rows_block"}
    ways.clear()
    solve(replace(p, seqlen_q=5), draw(replace(p, seqlen_q=5)))
    assert "few_rows_block" not in ways, "20 rows"


@pytest.mark.parametrize("count", [1, 4])
def test_memory_of_threads_stays_far_below_the_square(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 64)
    seqlen = 4096
    p = problem(
        storage="float32",
        batch=1,
        heads_q=1,
        heads_kv=1,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        head_dim=32,
        head_dim_v=32,
    )
    limits = HostLimits(1 << 20, threads=count)
    given, into = draw(p), destinations(p)
    monkeypatch.setattr("tests.unit.tiled_case.LIMITS", limits)
    tracemalloc.start()
    try:
        run(p, given, into)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < seqlen * seqlen * 4 / 3, f"{peak:,} bytes"
