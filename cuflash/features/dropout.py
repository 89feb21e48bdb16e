"""Dropout: drops weights of random pairs and scales up the others.

``out = sum keep / (1 - p) P v`` with P of the softmax without dropout; the log-sum-exp covers all
weights. Which pairs are kept depends only on the seed, the batch entry, the number of heads, the
head, the query and the key: see ``draws``. p is rounded to a whole number of draws, both for the
pairs and for the factor.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ArgumentValueError, shown
from .device import MAIN_KERNELS, DevicePart
from .draws import DRAWS, draws, limit_of, stream_of
from .feature import ArrayRule, Feature, Request
from .host import Given, HostPart, ScorePlace
from .use import Use

__all__ = [
    "DROPOUT",
    "PART_LENGTH",
    "SEED_LENGTHS",
    "check_both",
    "check_probability",
    "check_seed",
    "words_of",
]

_NAME = "dropout_seed"
#: Lengths of a seed array: a key, or a key and an offset.
SEED_LENGTHS = (2, 4)
#: The length of one that also holds the entry and head at which a part of a larger call begins.
PART_LENGTH = 6
_SEEDS = 2**64
_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="DropoutParams",
    block=np.dtype(
        [
            (_NAME, np.uint64),
            ("inverse_keep", np.float64),
            ("inverse_keep_single", np.float32),
            ("limit", np.uint32),
            ("key0", np.uint32),
            ("key1", np.uint32),
            ("words", np.int32),
            ("entries", np.int32),
            ("heads", np.int32),
        ],
        align=True,
    ),
    seams=(("Weights", "Dropout"), ("Rows", "DropoutEnd")),
    header="features/dropout.cuh",
)


def check_probability(name: str, value: Any) -> float:
    """A probability from 0 to below 1 that keeps some pairs.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is not such a number.
    """
    expected = "a number from 0 to below 1"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, shown(value), expected)
    try:
        p = float(value)
    except OverflowError:
        p = math.inf
    if not 0 <= p < 1:
        raise ArgumentValueError(name, shown(value), expected)
    if limit_of(p) == 0:
        most = 1 - 1 / DRAWS
        raise ArgumentValueError(name, f"{shown(value)}, which keeps nothing", f"at most {most}")
    return p


def check_seed(name: str, value: Any) -> int:
    """A seed that is not an array.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is not an integer, or out of range.
    """
    expected = f"an integer from 0 to {_SEEDS - 1}, or an array of 2 or 4 uint32"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(name, shown(value), expected)
    if not 0 <= int(value) < _SEEDS:
        raise ArgumentValueError(name, shown(value), expected)
    return int(value)


def _kept(place: ScorePlace, given: Given) -> Any:
    words = given.get(_NAME)
    stream = stream_of((given["key0"], given["key1"]) if words is None else words)
    entry, head = _first(words)
    entries = entry + place.batch[:, :, 0] % given["entries"]
    heads = entries * given["heads"] + (head + place.head[:, :, 0]) % given["heads"]
    queries, keys = (slice(run[0], run[-1] + 1) for run in (place.i, place.j.ravel()))
    found = draws(stream, heads[..., 0], queries, keys) < given["limit"]
    return found.transpose(0, 1, 4, 2, 3)


def _first(words: Any) -> tuple[int, int]:
    """The entry and the head at which the arrays begin, from a seed's words."""
    if words is None or len(words) < PART_LENGTH:
        return 0, 0
    return int(words[4]), int(words[5])


def check_both(p: float | None, seeded: bool) -> None:
    """Check that a probability and a seed are given together.

    Raises
    ------
    ArgumentValueError
        If one is given without the other.
    """
    if p and not seeded:
        expected = "an integer, or an array of 2 or 4 uint32: gradients need the same one"
        raise ArgumentValueError(_NAME, f"None with dropout_p {p:g}", expected)
    if seeded and not p:
        got = "a seed without dropout_p" if p is None else "a seed with dropout_p 0"
        raise ArgumentValueError(_NAME, got, "None, or dropout_p above 0")


def words_of(seed: int) -> tuple[int, int]:
    """The words of a seed that is not an array, the lower one first."""
    return seed % 2**32, seed // 2**32


def _use(request: Request) -> Use | None:
    p = request.keywords.get("dropout_p")
    seed, words = request.keywords.get(_NAME), request.operands.get(_NAME)
    check_both(p, seed is not None or words is not None)
    if not p:
        return None
    limit = limit_of(p)
    lower, upper = words_of(seed or 0)
    entries, heads = request.draws or (request.problem.batches, request.problem.heads_q)
    if words is not None and request.draws is None and words.shape[0] not in SEED_LENGTHS:
        fitting = " or ".join(f"({length},)" for length in SEED_LENGTHS)
        raise ArgumentValueError(_NAME, f"shape {words.shape}", fitting)
    return Use(
        "dropout",
        _DEVICE,
        numbers=(
            ("inverse_keep", DRAWS / limit),
            ("inverse_keep_single", DRAWS / limit),
            ("limit", limit),
            ("key0", lower),
            ("key1", upper),
            ("words", 0 if words is None else words.shape[0]),
            ("entries", max(1, entries)),
            ("heads", max(1, heads)),
        ),
        operands=() if words is None else (words,),
        host=HostPart(kept=_kept),
        shown=f"dropout {p:g}",
    )


DROPOUT = Feature(
    "dropout",
    _use,
    _DEVICE,
    keywords={"dropout_p": check_probability, _NAME: check_seed},
    arrays={_NAME: ArrayRule((), ("uint32",), lengths=SEED_LENGTHS, part_length=PART_LENGTH)},
)
