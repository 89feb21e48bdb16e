"""The parameters that a launch fills: maps follow the addresses, and no launch shares its words."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from cuflash.cuda.launch import Maps, _Parameters
from cuflash.cuda.tensor_map import WORDS, TensorMapEncoder


class FakeEncoder:
    """A map of an address is that address in every word."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def map_of(self, address: int) -> Any:
        self.asked.append(address)
        return np.full(WORDS, address, np.uint64)


def _parameters() -> tuple[_Parameters, list[FakeEncoder]]:
    encoders = [FakeEncoder(), FakeEncoder()]
    maps: Maps = tuple(
        (1 + WORDS * i, name, cast(TensorMapEncoder, encoder))
        for i, (name, encoder) in enumerate(zip("qk", encoders, strict=True))
    )
    return _Parameters(np.arange(2 * WORDS + 2, dtype=np.uint64), maps), encoders


def test_maps_follow_the_addresses() -> None:
    parameters, encoders = _parameters()
    for q, k in ((16, 32), (16, 32), (48, 32), (16, 32)):
        words = parameters.words_of({"q": q, "k": k, "out": 64})
        assert (words[0], words[-1]) == (0, 2 * WORDS + 1)
        assert (words[1 : 1 + WORDS] == q).all()
        assert (words[1 + WORDS : -1] == k).all()
    assert encoders[0].asked == [16, 48, 16]  # not again for the addresses of the launch before


def test_every_launch_has_words_of_its_own() -> None:
    for pointers in ({"q": 16, "k": 32}, {"q": 48, "k": 32}):
        parameters, _ = _parameters()
        first = parameters.words_of(pointers)
        first[:] = 7
        assert not (parameters.words_of(pointers) == 7).any()


def test_without_maps_the_words_are_the_template() -> None:
    template = np.arange(5, dtype=np.uint64)
    parameters = _Parameters(template, ())
    words = parameters.words_of({"q": 16})
    assert (words == template).all()
    words[:] = 9
    assert (parameters.words_of({}) == np.arange(5)).all()
