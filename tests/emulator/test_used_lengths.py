"""Used lengths on the emulated device, through the public functions, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.used_lengths import ROWS, Row
from .build import compiler
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(row: Row, x: dict[str, Any]) -> dict[str, Any]:
    """The results of both passes; the backward pass gets NaN in rows that do not count."""
    given = {name: array for name, array in x.items() if name != "dout"} | row.options
    options: dict[str, Any] = {"algorithm": row.algorithm, "backend": "cuda", "blocks": row.blocks}
    with host_cupy(row.architecture) as host:
        out, lse = host.call(cuflash.attention, **given, **options, return_lse=True)
        saved = {"dout": x["dout"], "out": out.copy(), "lse": lse.copy()}
        row.spoil(saved)
        options |= {"deterministic": row.deterministic, "wrt": row.wrt(x)}
        grads = host.call(cuflash.attention_backward, **saved, **given, **options)
    names = ("out", "lse", *(f"d{name}" for name in row.wrt(x)))
    return dict(zip(names, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_rows_that_do_not_count_change_no_bit(algorithm: Any) -> None:
    row = Row(algorithm, "float16", deterministic=True)
    x = {name: np.nan_to_num(array) for name, array in row.arrays().items()}
    first = _results(row, x)
    for value in (40, np.nan):
        changed = {name: array.copy() for name, array in x.items()}
        for b, ends in enumerate(row.used):
            for name in ("q", "dout", "k", "v"):
                changed[name][b, max(0, ends[name in ("k", "v")]) :] = value
        for name, found in _results(row, changed).items():
            np.testing.assert_array_equal(found, first[name], err_msg=f"{name} {value}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_against_the_reference(row: Row) -> None:
    x = row.arrays()
    row.check(_results(row, x), row.expected(x))
