"""Threads that compute on the NumPy backend at once do not disturb each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge

#: Problems of different shapes, dtypes and masks, so that memory of one would not fit another.
_CASES = (
    Case(2, 4, 2, 70, 100, 64, 64, "float32", causal=True, seed=1),
    Case(1, 3, 3, 130, 90, 40, 72, "float16", seed=2),
    Case(1, 2, 1, 33, 257, 16, 8, "float64", causal=True, q_offset=10, seed=3),
    Case(1, 2, 1, 70, 100, 64, 64, "float32", causal=False, seed=4),
)


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _both(case: Case, x: dict[str, np.ndarray], algorithm: Any) -> dict[str, np.ndarray]:
    options: dict[str, Any] = {**case.options, "algorithm": algorithm, "backend": "numpy"}
    out, lse = cuflash.attention(x["q"], x["k"], x["v"], return_lse=True, **options)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse)
    grads = cuflash.attention_backward(*given, dlse=x["dlse"], **options)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("same", [False, True])
def test_at_once(algorithm: str, same: bool) -> None:
    """The threads have the same problem or different ones; every result must be accurate."""
    chosen = [_CASES[0]] * 4 if same else list(_CASES)
    inputs = [arrays(case, "q", "k", "v", "dout", "dlse") for case in chosen]
    truths = [judge(case, x) for case, x in zip(chosen, inputs, strict=True)]
    start = threading.Barrier(len(chosen))

    def work(index: int) -> list[dict[str, np.ndarray]]:
        start.wait()
        return [_both(chosen[index], inputs[index], algorithm) for _ in range(5)]

    with ThreadPoolExecutor(len(chosen)) as pool:
        for truth, turns in zip(truths, pool.map(work, range(len(chosen))), strict=True):
            for results in turns:
                for name, got in results.items():
                    compare(truth, name, got).check()
