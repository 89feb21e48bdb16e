"""Used lengths on the device, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.used_lengths import ROWS, Row
from .common import skip_without

#: Lengths at which blocks draw several tiles.
_LONG = [
    replace(row, lengths=(700, 2500), used=((650, 2500), (0, 9), (700, 1), (129, 1281)))
    for row in ROWS
    if not row.more and row.architecture == "90"
]


def _results(cp: Any, row: Row, x: dict[str, Any]) -> dict[str, np.ndarray]:
    """The results of both passes; the second one gets NaN in rows that do not count."""
    skip_without(row.algorithm)
    put = {name: cp.asarray(array) for name, array in x.items()}
    given = {name: array for name, array in put.items() if name != "dout"} | row.options
    options: dict[str, Any] = {"algorithm": row.algorithm, "blocks": row.blocks}
    out, lse = cuflash.attention(**given, **options, return_lse=True)
    saved = {"dout": put["dout"], "out": out.copy(), "lse": lse.copy()}
    row.spoil(saved)
    options |= {"deterministic": row.deterministic, "wrt": row.wrt(x)}
    grads = cuflash.attention_backward(**saved, **given, **options)
    names = ("out", "lse", *(f"d{name}" for name in row.wrt(x)))
    return {name: a.get() for name, a in zip(names, (out, lse, *grads), strict=True)}


@pytest.mark.parametrize("row", [*ROWS, *_LONG], ids=lambda row: row.name)
def test_against_the_reference(cp: Any, row: Row) -> None:
    x = row.arrays()
    row.check(_results(cp, row, x), row.expected(x))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_graph_sees_other_lengths(cp: Any, algorithm: Any) -> None:
    """It is captured with short lengths; replays with others have the bits of eager calls."""
    skip_without(algorithm)
    row = Row(algorithm, "float16", options={"causal": True})
    whole = {name: cp.asarray(np.nan_to_num(a)) for name, a in row.arrays().items()}
    whole.pop("dout")
    used = {name: whole[name] for name in ("seqused_q", "seqused_kv")}
    out, lse = (cp.empty_like(a) for a in cuflash.attention(**whole, return_lse=True))
    options: dict[str, Any] = {"causal": True, "algorithm": algorithm, "return_lse": True}
    stream = cp.cuda.Stream(non_blocking=True)
    short = {name: cp.full_like(one, 3) for name, one in used.items()}
    given = {**whole, **short}
    with stream:
        cuflash.attention(**given, **options, out=out, lse_out=lse)
        stream.begin_capture()
        cuflash.attention(**given, **options, out=out, lse_out=lse)
        graph = stream.end_capture()
    for lengths in (used, {name: cp.zeros_like(one) for name, one in used.items()}, used):
        with stream:
            for name, one in lengths.items():
                short[name][...] = one
            for array in (out, lse):
                array.fill(np.nan)
            graph.launch()
        stream.synchronize()
        expected = cuflash.attention(**{**whole, **lengths}, **options)
        for got, eager in zip((out, lse), expected, strict=True):
            cp.testing.assert_array_equal(got, eager)
