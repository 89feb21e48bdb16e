"""Packed sequences on the device, against the reference and against calls for each sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.packed_lengths import ROWS, Row
from .common import own_stream, skip_without

_Arrays = dict[str, Any]
#: Sequences from which blocks draw several tiles, and short ones.
_LONG = [
    replace(row, sequences=((900, 900), (3, 2000), (1, 1), (2100, 2500), (0, 40), (640, 640)))
    for row in ROWS
    if not row.more and row.architecture == "90" and not row.wild
]
_of_algorithms = pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])


def _both(call: _Arrays, dout: Any, row: Row, spoil: bool = False) -> _Arrays:
    """Results of both passes on the device, in memory that held NaN."""
    out, lse = cuflash.attention(**call, return_lse=True)
    for made in (out, lse):
        made.fill(np.nan)
    cuflash.attention(**call, return_lse=True, out=out, lse_out=lse)
    saved = {"dout": dout, "out": out.copy(), "lse": lse.copy()}
    if spoil:
        row.spoil(saved)
    options: _Arrays = {"deterministic": row.deterministic, "wrt": row.wrt(call)}
    grads = tuple(call[name] + np.nan for name in options["wrt"])
    grads = tuple(one.astype(call[n].dtype) for n, one in zip(options["wrt"], grads, strict=True))
    cuflash.attention_backward(**saved, **call, **options, grads=grads)
    names = ("out", "lse", *(f"d{name}" for name in options["wrt"]))
    return dict(zip(names, (out, lse, *grads), strict=True))


def _call(cp: Any, row: Row) -> tuple[_Arrays, _Arrays, Any]:
    """Arrays on the host, and keywords and dout on the device."""
    skip_without(row.algorithm)
    x = row.arrays()
    put = {name: cp.asarray(array) for name, array in x.items()}
    dout = put.pop("dout")
    return x, {**put, **row.options, "layout": "shd", "algorithm": row.algorithm}, dout


@pytest.mark.parametrize("row", [*ROWS, *_LONG], ids=lambda row: row.name + str(row.totals))
def test_against_the_reference(cp: Any, row: Row) -> None:
    x, call, dout = _call(cp, row)
    found = _both(call, dout, row, spoil=True)
    row.check({name: array.get() for name, array in found.items()}, row.expected(x))


@_of_algorithms
def test_a_sequence_has_the_bits_of_its_own_call(cp: Any, algorithm: Any) -> None:
    """Both calls have the same tiles and sum in one order; other sequences change nothing."""
    row = Row(algorithm, "float16", options={"causal": True}, deterministic=True, heads=(2, 2))
    row = replace(row, sequences=((300, 300), (70, 190), (1, 40), (513, 600)))
    _, call, dout = _call(cp, row)
    tiles = {
        name: said[:2]
        for name, said in (
            (operation, _tile(call, operation)) for operation in ("forward", "backward")
        )
    }
    found = _both(call, dout, row)
    left_out = {"cu_seqlens_q", "cu_seqlens_kv"}
    queries, keys = row.offsets
    for (i, end), (j, last) in zip(pairwise(queries), pairwise(keys), strict=True):
        own = {name: value for name, value in call.items() if name not in left_out}
        own |= {"q": call["q"][i:end], "k": call["k"][j:last], "v": call["v"][j:last]}
        if any(_tile(own, operation)[:2] != tile for operation, tile in tiles.items()):
            continue
        alone = _both(own, dout[i:end], row)
        places = {"out": slice(i, end), "dq": slice(i, end)}
        places |= {"dk": slice(j, last), "dv": slice(j, last)}
        for name, place in places.items():
            cp.testing.assert_array_equal(found[name][place], alone[name])
        cp.testing.assert_array_equal(found["lse"][:, i:end], alone["lse"])


def _tile(call: _Arrays, operation: Any) -> tuple[Any, ...]:
    given = {name: value for name, value in call.items() if name not in ("q", "k", "v")}
    deterministic = {"deterministic": True} if operation == "backward" else {}
    said = cuflash.explain(
        *(call[name] for name in "qkv"), operation=operation, **given, **deterministic
    )
    return said.block_q, said.block_kv


def _contents(cp: Any, offsets: _Arrays) -> list[_Arrays]:
    """The given offsets, then offsets of empty and of short sequences, and of one with all rows."""
    of_one = {name: one[:1].repeat(one.size) for name, one in offsets.items()}
    for one in of_one.values():
        one[-1] = 10**6
    short = {name: cp.minimum(one // 3, 90).astype(np.int32) for name, one in offsets.items()}
    none = {name: cp.zeros_like(one) for name, one in offsets.items()}
    return [{name: one.copy() for name, one in offsets.items()}, none, short, of_one]


@_of_algorithms
def test_a_graph_sees_other_sequences(cp: Any, algorithm: Any) -> None:
    """It is captured with short sequences; replays with others have the bits of eager calls."""
    row = Row(algorithm, "float16", options={"causal": True}, deterministic=True)
    _, call, dout = _call(cp, row)
    for name in ("q", "k", "v"):
        call[name] = cp.nan_to_num(call[name])
    dout = cp.nan_to_num(dout)
    names = ("cu_seqlens_q", "cu_seqlens_kv")
    contents = _contents(cp, {name: call[name] for name in names})
    expected = [_both(call | one, dout, row) for one in contents]
    held = {name: call[name].copy() for name in names}
    made = {name: cp.empty_like(array) for name, array in expected[0].items()}
    grads = tuple(made[f"d{name}"] for name in ("q", "k", "v"))
    stream = own_stream(cp)

    def passes() -> None:
        given = call | held
        cuflash.attention(**given, return_lse=True, out=made["out"], lse_out=made["lse"])
        saved = {"dout": dout, "out": made["out"], "lse": made["lse"]}
        cuflash.attention_backward(**saved, **given, deterministic=True, grads=grads)

    with stream:
        for name in names:
            held[name][...] = contents[2][name]
        passes()
        stream.begin_capture()
        passes()
        graph = stream.end_capture()
        for number in (0, 1, 3, 2, 0):
            for name, array in held.items():
                array[...] = contents[number][name]
            for array in made.values():
                array.fill(np.nan)
            graph.launch()
            stream.synchronize()
            for name, array in made.items():
                cp.testing.assert_array_equal(array, expected[number][name])


@_of_algorithms
def test_many_sequences_of_any_lengths(cp: Any, algorithm: Any) -> None:
    """There are over a thousand sequences, so the kernel lists their begins in several rounds."""
    random = np.random.default_rng(3)
    lengths = random.integers(0, 4, (1500, 2)) * random.integers(0, 2, (1500, 1))
    row = Row(algorithm, "float16", sequences=tuple(map(tuple, lengths.tolist())))
    x, call, dout = _call(cp, row)
    found = _both(call, dout, row, spoil=True)
    row.check({name: array.get() for name, array in found.items()}, row.expected(x))
