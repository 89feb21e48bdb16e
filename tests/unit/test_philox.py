"""Random bits of dropout: the published generator, and the bits that each pair gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import reference_dropout
from cuflash.features.draws import DRAWS, ROUNDS, draws, limit_of, stream_of
from cuflash.philox import philox4x32

#: Known answers of Random123, the library of the paper's authors: rounds, counter, key, words.
_ONES = "ffffffff"
_PI = "243f6a88 85a308d3 13198a2e 03707344"
_KNOWN = [
    (7, "0 0 0 0", "0 0", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, " ".join([_ONES] * 4), f"{_ONES} {_ONES}", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, _PI, "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, " ".join([_ONES] * 4), f"{_ONES} {_ONES}", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, _PI, "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), _KNOWN)
def test_known_answers(rounds: int, counter: str, key: str, expected: str) -> None:
    found = philox4x32(_words(counter), _words(key), rounds)
    assert [int(word) for word in found] == _words(expected)


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), _KNOWN[:3])
def test_known_answers_of_the_reference(rounds: int, counter: str, key: str, expected: str) -> None:
    """The reference has its own implementation of the generator."""
    assert rounds == ROUNDS
    arrays = [np.array(word, np.uint64) for word in _words(counter)]
    found = reference_dropout._philox(arrays, *_words(key))
    assert [int(word) for word in found] == _words(expected)


def _round(counter: list[int], key: list[int]) -> list[int]:
    """A round as in the paper, with Python's integers."""
    first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
    mask = 2**32 - 1
    return [
        second >> 32 ^ counter[1] ^ key[0],
        second & mask,
        first >> 32 ^ counter[3] ^ key[1],
        first & mask,
    ]


def _philox(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    for _ in range(rounds):
        counter = _round(counter, key)
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


_word = st.integers(0, 2**32 - 1)


@given(st.lists(_word, min_size=4, max_size=4), st.lists(_word, min_size=2, max_size=2))
def test_any_counter_and_key(counter: list[int], key: list[int]) -> None:
    for rounds in (1, 2, 7, 10, 16):
        found = philox4x32(counter, key, rounds)
        assert [int(word) for word in found] == _philox(counter, key, rounds)


def test_counters_broadcast() -> None:
    first, second = np.arange(3)[:, None], np.arange(5)
    found = philox4x32((first, second, 7, 2**31), (1, 2), 7)
    assert [word.shape for word in found] == [(3, 5)] * 4
    for i, j in np.ndindex(3, 5):
        assert [int(word[i, j]) for word in found] == _philox([i, j, 7, 2**31], [1, 2])


def draw_of(stream: Any, head: int, i: int, j: int) -> int:
    """The draw of one pair."""
    counter = [j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, head, stream[2]]
    word = _philox(counter, [*stream[:2]])[i // 8 % 2 + 2 * (j // 8 % 2)]
    return word >> 16 * (j % 2) & 2**14 - 1


_positions = st.one_of(st.integers(0, 70), st.integers(2**30 - 2**13, 2**30 - 2**12 - 40))
_lengths = st.integers(0, 40)


@settings(max_examples=60)
@given(
    stream=st.tuples(_word, _word, _word),
    heads=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
    firsts=st.tuples(_positions, _positions),
    lengths=st.tuples(_lengths, _lengths),
)
def test_the_draw_of_every_pair(stream: Any, heads: list[int], firsts: Any, lengths: Any) -> None:
    """A pair's draw does not depend on which other pairs are drawn."""
    queries, keys = (slice(a, a + n) for a, n in zip(firsts, lengths, strict=True))
    found = draws(stream, np.array(heads), queries, keys)
    assert found.shape == (len(heads), *lengths)
    assert found.dtype == np.uint16
    for h, head in enumerate(heads):
        for i, j in np.ndindex(*lengths):
            if (i * 7 + j * 3) % 5 == 0:
                expected = draw_of(stream, head, firsts[0] + i, firsts[1] + j)
                assert found[h, i, j] == expected


def test_heads_of_several_axes() -> None:
    heads = np.arange(6).reshape(2, 3)
    found = draws((1, 2, 3), heads, slice(5, 30), slice(0, 19))
    for at in np.ndindex(2, 3):
        one = draws((1, 2, 3), heads[at], slice(5, 30), slice(0, 19))
        np.testing.assert_array_equal(found[at], one)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("seed", [3, 2**63 + 5, [1, 2], [1, 2, 3, 4], [0, 9, 0, 9]])
def test_the_reference_draws_the_same(p: float, seed: Any) -> None:
    """The reference shares no code with ``draws``."""
    words = (seed % 2**32, seed // 2**32) if isinstance(seed, int) else seed
    given_ = seed if isinstance(seed, int) else np.array(seed, np.uint32)
    kept = draws(stream_of(words), np.array(11), slice(0, 75), slice(0, 90)) < limit_of(p)
    found = reference_dropout.dropped(p, given_, 11, 75, 90, np.float64)
    np.testing.assert_array_equal(found != 0, kept)
    np.testing.assert_array_equal(found, kept * (DRAWS / limit_of(p)))


def test_every_word_of_a_seed_counts() -> None:
    """Every word changes the draws, even if words repeat, as in a key of JAX's "rbg" generator."""
    words = np.random.default_rng(0).integers(0, 2**32, 4)
    base = draws(stream_of(words), np.array(0), slice(0, 64), slice(0, 64))
    for number in range(4):
        for bit in (0, 13, 31):
            other = words.copy()
            other[number] ^= 1 << bit
            assert (draws(stream_of(other), np.array(0), slice(0, 64), slice(0, 64)) != base).any()
    twice = [stream_of((0, seed, 0, seed)) for seed in range(100)]
    assert len({*twice}) == 100
    assert stream_of((5, 6)) == stream_of((5, 6, 0, 0)) == (5, 6, 0)
    assert stream_of((5, 6, 7, 0)) == (5, 6, 7)


def test_draws_are_uniform_and_apart() -> None:
    """Draws of all pairs of four heads are uniform; neighbours in any direction are independent."""
    found = draws((12, 34, 5), np.arange(4), slice(0, 256), slice(0, 256)).astype(np.float64)
    centred = found / DRAWS - 0.5 + 0.5 / DRAWS
    count = centred.size
    assert abs(centred.mean()) < 4 * np.sqrt(1 / 12 / count)
    assert abs((centred**2).mean() - 1 / 12) < 4 * np.sqrt(1 / 180 / count)
    for axis in range(3):
        for step in (1, 2, 7, 8, 16):
            if step < centred.shape[axis]:
                other = np.roll(centred, step, axis=axis)
                assert abs((centred * other).mean()) < 4 * np.sqrt(1 / 144 / count)
    counts = np.bincount((found // 64).astype(int).ravel(), minlength=256)
    chi = ((counts - count / 256) ** 2 / (count / 256)).sum()
    assert 160 < chi < 360  # with 255 degrees of freedom


@pytest.mark.parametrize(
    ("p", "limit"),
    [(0.0, 16384), (2.0**-14, 16383), (0.1, 14746), (0.5, 8192), (1 - 2.0**-14, 1), (1e-5, 16384)],
)
def test_of_a_part_the_nearest_number_of_draws_counts(p: float, limit: int) -> None:
    assert limit_of(p) == limit
