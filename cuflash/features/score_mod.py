"""Score functions that a caller writes, as CUDA C++ and as NumPy.

The function replaces the score ``s = scale * q k^T`` before slopes, bias and masks. Its derivative
comes from dual numbers, so no second text is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, shown
from ..planning.problem import MAX_SEQLEN
from .dual import DualArray
from .feature import ArrayRule, DTypeRule, Feature, Request
from .host import Given, HostPart, ScorePlace
from .score_text import PLACE, SLOTS, ScoreText, TextArray, device_part, size_field
from .use import Operand, Use

__all__ = ["ARRAY_DTYPES", "SCORE_MOD", "host_arguments"]

_NAME = "score_mod"
#: Dtypes of its arrays.
ARRAY_DTYPES: tuple[DTypeRule, ...] = (
    "float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32", "bool",
)  # fmt: skip
_MOST_AXES = 4
_MOST_OF_AXIS = 2**31 - 1


def _check(name: str, value: Any) -> ScoreText:
    if not isinstance(value, ScoreText):
        raise ArgumentTypeError(name, shown(value), "a cuflash.ScoreMod")
    return value


@dataclass(frozen=True)
class _HostArray:
    """An array that a NumPy function calls with indices, each clamped to its axis."""

    array: Any

    def __call__(self, *indices: Any) -> Any:
        if len(indices) != self.array.ndim:
            got = f"{len(indices)} indices of an array of {self.array.ndim} axes"
            raise ArgumentValueError(_NAME, got, "one index for each axis")
        inside = (np.clip(x, 0, n - 1) for x, n in zip(indices, self.array.shape, strict=True))
        return self.array[tuple(inside)]


class _HostArguments:
    """The object ``p`` of a NumPy function."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.__dict__.update(members)


def host_arguments(
    score: ScoreText, arrays: Mapping[str, Any], real: np.dtype[Any]
) -> _HostArguments:
    """The numbers and arrays of a NumPy function; arrays are given by the names of their tensors.

    As on the device, real numbers have the type in which scores are computed.
    """
    named = {name: arrays[slot] for name, slot in zip(score.arrays, SLOTS, strict=False)}
    read = {
        name: _HostArray(array if array.dtype.kind in "iub" else array.astype(real, copy=False))
        for name, array in named.items()
    }
    return _HostArguments({**score.values, **read})


def _run(score: ScoreText, scores: Any, place: ScorePlace, given: Given) -> Any:
    """The scores that the NumPy function returns.

    Raises
    ------
    ArgumentValueError
        If the result does not have their shape.
    UnsupportedError
        If dual numbers do not support a function that it calls.
    """
    arguments = host_arguments(score, given, scores.dtype)
    entry, head = (int(n) for n in given.get(PLACE, (0, 0)))
    batch = entry + place.batch % given["entries"]
    heads = (head + place.head) % given["heads"]
    function: Any = score.numpy
    where = batch, heads, place.i, place.j, given["position"]
    try:
        changed = function(scores, *where, arguments)
    except (TypeError, AttributeError) as error:
        if not isinstance(scores, DualArray):
            raise
        raise UnsupportedError(f"score_mod: numpy= has no derivative here: {error}") from error
    value = np.asarray(changed.value if isinstance(changed, DualArray) else changed)
    if value.dtype == object or np.broadcast_shapes(value.shape, scores.shape) != scores.shape:
        got = f"numpy= that returns {type(changed).__name__} of shape {value.shape}"
        expected = f"numbers that broadcast against the scores, {scores.shape}"
        raise ArgumentValueError(_NAME, got, expected)
    return changed


def _change(score: ScoreText, scores: Any, place: ScorePlace, given: Given) -> None:
    with np.errstate(all="ignore"):
        scores[...] = _run(score, scores.copy(), place, given)


def _change_with_slope(score: ScoreText, scores: Any, place: ScorePlace, given: Given) -> Any:
    with np.errstate(all="ignore"):
        changed = _run(score, DualArray(scores.copy(), np.ones_like(scores)), place, given)
    if not isinstance(changed, DualArray):  # the result does not depend on the scores
        changed = DualArray(changed, 0.0)
    scores[...] = changed.value
    slope = np.empty_like(scores)
    slope[...] = changed.slope
    return slope


@functools.lru_cache(maxsize=256)
def _host_part(score: ScoreText) -> HostPart | None:
    if score.numpy is None:
        return None
    return HostPart(functools.partial(_change, score), functools.partial(_change_with_slope, score))


def _text_array(name: str, array: Operand) -> TextArray:
    """An array as the text sees it. 64-bit indices would cost kernels many more registers."""
    if max(array.shape) > _MOST_OF_AXIS:
        got = f"{name}, an array of shape {array.shape}"
        raise ArgumentValueError(_NAME, got, f"at most {_MOST_OF_AXIS} elements along an axis")
    index = "int" if math.prod(array.shape) <= _MOST_OF_AXIS else "long long"
    return TextArray(name, array.dtype, len(array.shape), index)


def _numbers(
    request: Request, score: ScoreText, arrays: tuple[Operand, ...]
) -> tuple[tuple[str, int | float], ...]:
    """Values of the device block's fields, and the numbers of a NumPy function."""
    problem = request.problem
    entries, heads = request.places or (problem.batches, problem.heads_q)
    sizes = (
        (size_field(array.name, axis), size)
        for array in arrays
        for axis, size in enumerate(array.shape)
    )
    return (
        ("inner", problem.scale),
        ("inner_single", problem.scale),
        ("position", request.position),
        ("entries", entries),
        ("heads", heads),
        *sizes,
        *((f"argument_{name}", value) for name, value in score.values.items()),
    )


def _use(request: Request) -> Use | None:
    score = request.keywords.get(_NAME)
    if score is None:
        if request.operands:
            raise ArgumentValueError(next(iter(request.operands)), "an array", "score_mod with it")
        return None
    if abs(request.position) > MAX_SEQLEN:
        got = f"{request.position} with {_NAME}"
        raise ArgumentValueError("q_offset", got, f"{-MAX_SEQLEN} to {MAX_SEQLEN}")
    problem = request.problem
    if not problem.has_pairs:  # arrays may then be empty
        return None
    operands = tuple(request.operands[slot] for slot in SLOTS[: len(score.arrays)])
    arrays = tuple(map(_text_array, score.arrays, operands))
    return Use(
        _NAME,
        device_part(score, arrays, problem.storage),
        compiled=(("score_mod_storage", problem.storage), ("score_mod_digest", score.digest)),
        numbers=_numbers(request, score, operands),
        operands=(*operands, *(request.operands[n] for n in (PLACE,) if n in request.operands)),
        host=_host_part(score),
        unit=1.0,
        shown="score_mod",
        host_needs="" if score.numpy else "numpy= of score_mod, its function in NumPy",
    )


SCORE_MOD = Feature(
    _NAME,
    _use,
    keywords={_NAME: _check},
    arrays={
        **dict.fromkeys(SLOTS, ArrayRule((), ARRAY_DTYPES, argument=_NAME, most_axes=_MOST_AXES)),
        PLACE: ArrayRule((), ("uint32",), argument=_NAME, lengths=(2,)),
    },
)
