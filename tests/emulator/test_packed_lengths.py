"""Packed batches on the emulated device, through the public functions, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.packed_lengths import ROWS, Row
from .build import compiler
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(row: Row, x: dict[str, Any]) -> dict[str, Any]:
    """The results of both passes; the backward pass gets NaN in rows that do not count."""
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


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_no_other_sequence_changes_a_bit(algorithm: Any) -> None:
    """Tiles that end inside a sequence also hold rows of other sequences, here even NaN."""
    sequences = ((37, 300), (91, 60), (20, 150))
    row = Row(algorithm, "float16", sequences, deterministic=True, heads=(1, 1))
    x = {name: np.nan_to_num(array) for name, array in row.arrays().items()}
    first = _of_ends(row, _results(row, x))
    for factor in (60, np.nan):
        changed = dict(x)
        for name, at in (("q", row.offsets[0]), ("dout", row.offsets[0]), ("k", row.offsets[1]),
                         ("v", row.offsets[1])):  # fmt: skip
            changed[name] = x[name].copy()
            changed[name][at[1] : at[2]] *= np.float16(factor)
        found = _of_ends(row, _results(row, changed))
        for name, expected in first.items():
            np.testing.assert_array_equal(found[name], expected, err_msg=f"{name} {factor}")


def _of_ends(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """The results of the first and the last of three sequences."""
    parts = {}
    for name, array in found.items():
        at = row.offsets[name in ("dk", "dv")]
        rows = array.T if name == "lse" else array
        parts[name] = np.concatenate([rows[: at[1]], rows[at[2] : at[3]]])
    return parts


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_against_the_reference(row: Row) -> None:
    x = row.arrays()
    row.check(_results(row, x), row.expected(x))
