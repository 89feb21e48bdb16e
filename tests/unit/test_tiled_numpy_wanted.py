"""Gradients that the tiled NumPy backend is not asked for, and the bits of requested ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from cuflash.tiled_numpy import gradients, threads

from .sinks_case import arrays_of, bits, solve
from .tiled_case import ALGORITHMS, LIMITS, Array, problem


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dsinks_has_the_same_bits_in_every_run_and_for_any_threads(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    p = problem(storage="float32", batch=3, heads_q=4, heads_kv=2, seqlen_q=700, seqlen_kv=600)
    arrays = arrays_of(p)
    first = bits(solve(p, arrays))
    for _ in range(3):
        assert bits(solve(p, arrays, limits=replace(LIMITS, threads=count))) == first


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("common", [0.0, 50.0])
def test_what_is_not_wanted_is_left_out_and_the_rest_keeps_its_bits(
    common: float, algorithm: str
) -> None:
    p = problem(heads_q=4, mask="band", q_offset=3, q_first=-3)
    arrays = arrays_of(p)
    arrays["k"][..., 0] += common
    everything = bits(solve(p, arrays, algorithm=algorithm, blocks=(6, 7)))
    for count in (1, 2, 3):
        for wrt in itertools.combinations("qkvs", count):
            got = bits(solve(p, arrays, "".join(wrt), algorithm=algorithm, blocks=(6, 7)))
            assert len(got) == len(wrt) + 2
            assert got == {name: everything[name] for name in got}


def test_products_that_nothing_wanted_needs_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[str] = []
    product = gradients.transposed_product

    def record(keys: Array, rows: Array, scratch: Any, name: str) -> Array:
        formed.append(name)
        return product(keys, rows, scratch, name)

    monkeypatch.setattr(gradients, "transposed_product", record)
    p = problem()
    arrays = arrays_of(p)
    for wrt, names in (("v", {"weights"}), ("k", {"weights", "dscores"}), ("s", set())):
        formed.clear()
        solve(p, arrays, wrt)
        assert set(formed) == names, wrt
