"""The parameters of a launch: they follow the addresses, and the same ones are not made again."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import numpy as np

from cuflash.cuda import launch
from cuflash.cuda.launch import _Parameters, _Places
from cuflash.cuda.tensor_map import WORDS, TensorMapEncoder


class FakeEncoder:
    """A map of an address is that address in every word."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def write(self, address: int, to: Any) -> None:
        self.asked.append(address)
        to[:] = address


#: A word of the template, two maps, a tensor, the counter, two parts of the workspace.
_LENGTH = 1 + 2 * WORDS + 4
_DTYPE = np.dtype([(f"word{i}", np.uint64) for i in range(_LENGTH)])


def _parameters() -> tuple[_Parameters, list[FakeEncoder]]:
    encoders = [FakeEncoder(), FakeEncoder()]
    maps = tuple(
        (1 + WORDS * i, name, cast(TensorMapEncoder, encoder))
        for i, (name, encoder) in enumerate(zip("qk", encoders, strict=True))
    )
    at = 1 + 2 * WORDS
    places = _Places(maps, ((at, "out"),), ((at + 2, 256), (at + 3, 512)), at + 1)
    template = np.full(_LENGTH, 5, np.uint64)
    return _Parameters(template, _DTYPE, places), encoders


def _expected(q: int, k: int, out: int, workspace: int, counter: int) -> list[int]:
    return [5, *[q] * WORDS, *[k] * WORDS, out, counter, workspace + 256, workspace + 512]


def test_parameters_follow_every_address() -> None:
    parameters, encoders = _parameters()
    every = list(product((16, 48), (32, 64), (80, 96), (1 << 20, 1 << 21), (7, 8)))
    for q, k, out, workspace, counter in [*every, *reversed(every)]:
        made = parameters.of({"q": q, "k": k, "out": out}, workspace, counter)
        assert (made.dtype, made.shape) == (_DTYPE, (1,))
        assert [*made[0]] == _expected(q, k, out, workspace, counter)
    assert len(encoders[0].asked) == len(every)  # not again for addresses that have been


def test_an_absent_tensor_is_at_0() -> None:
    parameters, _ = _parameters()
    assert [*parameters.of({"q": 16, "k": 32}, 0, 7)[0]] == _expected(16, 32, 0, 0, 7)


def test_so_many_are_kept_and_no_more() -> None:
    parameters, encoders = _parameters()
    for i in range(3 * launch._KEPT):
        parameters.of({"q": 16 * i, "k": 32}, 0, 7)
        assert 0 < len(parameters._kept) <= launch._KEPT
    last = 16 * (3 * launch._KEPT - 1)
    before = len(encoders[0].asked)
    assert [*parameters.of({"q": last, "k": 32}, 0, 7)[0]] == _expected(last, 32, 0, 0, 7)
    assert len(encoders[0].asked) == before


def test_what_is_kept_does_not_change_when_others_are_made() -> None:
    """A launch of another thread may be about to read it."""
    parameters, _ = _parameters()
    first = parameters.of({"q": 16, "k": 32}, 0, 7)
    parameters.of({"q": 48, "k": 32}, 0, 7)
    assert [*first[0]] == _expected(16, 32, 0, 0, 7)


def test_without_maps_the_rest_is_the_template() -> None:
    dtype = np.dtype([(name, np.uint64) for name in "abc"])
    places = _Places((), ((1, "q"),), (), None)
    parameters = _Parameters(np.arange(3, dtype=np.uint64), dtype, places)
    assert [*parameters.of({"q": 16}, 999, 0)[0]] == [0, 16, 2]
