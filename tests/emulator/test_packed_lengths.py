"""Packed batches on the emulated device, through the public functions, against the reference."""

from __future__ import annotations

from typing import Any

import pytest

import cuflash

from ..kit.packed_lengths import ROWS, Row
from .build import compiler
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(row: Row, x: dict[str, Any]) -> dict[str, Any]:
    """Of both passes on the emulator; the second is given NaN for rows that do not count."""
    given = (
        {name: array for name, array in x.items() if name != "dout"}
        | row.options
        | {"layout": "shd"}
    )
    options: dict[str, Any] = {"algorithm": row.algorithm, "backend": "cuda"}
    with host_cupy(row.architecture, row.num_sms) as host:
        out, lse = host.call(cuflash.attention, **given, **options, return_lse=True)
        saved = {"dout": x["dout"], "out": out.copy(), "lse": lse.copy()}
        row.spoil(saved)
        options |= {"deterministic": row.deterministic, "wrt": row.wrt(x)}
        grads = host.call(cuflash.attention_backward, **saved, **given, **options)
    names = ("out", "lse", *(f"d{name}" for name in row.wrt(x)))
    return dict(zip(names, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_against_the_reference(row: Row) -> None:
    x = row.arrays()
    row.check(_results(row, x), row.expected(x))
