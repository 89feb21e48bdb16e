"""The argument ``score_mod``: the text of a score function, and the function's arguments."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .errors import ArgumentTypeError, ArgumentValueError, shown
from .features.score_text import SLOTS, NumpyFunction, ScoreText, check_text

__all__ = ["ScoreMod", "with_arrays"]

#: Names that an argument of a function may not have: words of C++, and names in the function.
_TAKEN = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept
const consteval constexpr const_cast continue decltype default delete do double dynamic_cast else
enum explicit export extern false float for friend goto if inline int long mutable namespace new
noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
requires return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile
wchar_t while xor xor_eq
char8_t char16_t char32_t constinit co_await co_return co_yield INFINITY NAN HUGE_VAL
Arguments Array Real Value Storage params text numpy
"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class ScoreMod:
    """A function that is applied to every score before slopes, bias and masks.

    Parameters
    ----------
    text : str
        The body of a function in CUDA C++ that returns the new score of ``(s, batch, head, i, j,
        offset, p)``: the score ``s = scale * q k^T``; the batch entry, query head, query and key as
        ``int``; query i is at key ``i + offset``; and ``p`` holds the arguments below. ``s`` is a
        dual number (``Value``): it has the arithmetic operators, comparisons, ``exp exp2 log log2
        tanh sqrt rsqrt sin cos pow fabs abs min max`` and ``where(condition, x, y)``, and does not
        convert to a plain number. Other real numbers have the type ``Real``, which is that of the
        softmax; so do decimal literals without a suffix. ``infinity`` is one of them: a score of
        ``-infinity`` hides a pair. The text may not hold preprocessor directives, strings or
        characters.
    numpy : callable, optional
        The same function for the NumPy backend. ``s`` is an array, or an array of dual numbers that
        support NumPy's functions of these names and ``numpy.where``; the other arguments are arrays
        and numbers that broadcast against it. Without it that backend refuses the call.
    **arguments : number or array
        The arguments of the text: ``p.name`` is a number, ``p.name(index, ...)`` an element of an
        array of 1 to 4 axes, with one integer for each axis, clamped to it. Arrays are of the same
        kind as q, at most eight, of float16, bfloat16, float32, float64, int32, int64, uint32 or
        bool; numbers are finite, and integers have 32 bits. Arguments have no gradients; a ``bias``
        has one.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, its value and what is needed.

    Notes
    -----
    The text is compiled with the kernels on first use; the same text is not compiled again. A call
    with new numbers or another ``numpy`` function is decided anew (so make the function once), and
    under JAX traced anew; new arrays of the same shape change nothing. A compiler error names
    "score" and the lines of the text. In bfloat16 ``tanh`` is the hardware's, with a relative error
    of 2^-11. Divisions on 16-bit arrays use approximate reciprocals.

    Examples
    --------
    >>> ScoreMod("return p.cap * tanh(s / p.cap);", cap=50.0)  # soft capping by hand
    ScoreMod('return p.cap * tanh(s / p.cap);', cap=50.0)
    """

    __slots__ = ("_arrays", "_score")

    def __init__(
        self,
        text: str,
        /,
        *,
        numpy: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> None:
        if not isinstance(text, str):
            raise ArgumentTypeError("score_mod", shown(text), "the text of a function")
        check_text(text)
        if numpy is not None and not callable(numpy):
            raise ArgumentTypeError("numpy", shown(numpy), "a function, or None")
        for name in arguments:
            if not _NAME.fullmatch(name) or name in _TAKEN.split():
                raise ArgumentValueError("score_mod", f"an argument {name!r}", "a name of C++")
        plain = {name: value for name, value in arguments.items() if _is_number(value)}
        arrays = {name: value for name, value in arguments.items() if name not in plain}
        for name, value in arrays.items():
            if getattr(value, "shape", None) == ():
                expected = "a number that is known, or an array of 1 to 4 axes"
                raise ArgumentValueError(name, "an array without axes", expected)
        if len(arrays) > len(SLOTS):
            raise ArgumentValueError("score_mod", f"{len(arrays)} arrays", f"up to {len(SLOTS)}")
        found = tuple(_number(name, value) for name, value in plain.items())
        function = None if numpy is None else NumpyFunction(numpy)
        self._score = ScoreText(text, found, tuple(arrays), function)
        self._arrays = tuple(arrays.values())

    @property
    def text(self) -> str:
        """The body of the function."""
        return self._score.text

    @property
    def numpy(self) -> Callable[..., Any] | None:
        """The same function of NumPy arrays, or None."""
        return None if self._score.numpy is None else self._score.numpy.function

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The numbers, then the arrays, by name."""
        return {**self._score.values, **dict(zip(self._score.arrays, self._arrays, strict=True))}

    @property
    def parts(self) -> tuple[ScoreText, tuple[Any, ...]]:
        """The part that does not change with the arrays, and the arrays."""
        return self._score, self._arrays

    @classmethod
    def of(cls, score: ScoreText, arrays: tuple[Any, ...]) -> ScoreMod:
        """The function with these parts."""
        made = object.__new__(cls)
        made._score, made._arrays = score, tuple(arrays)
        return made

    def __repr__(self) -> str:
        values = {**self._score.values, **dict.fromkeys(self._score.arrays, "array")}
        more = "".join(
            f", {name}={'...' if name in self._score.arrays else repr(value)}"
            for name, value in values.items()
        )
        return f"ScoreMod({self.text!r}{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self._score, self._arrays)


def with_arrays(score_mod: Any) -> tuple[ScoreText | None, dict[str, Any]]:
    """The keyword of a call, and the arrays of the function by tensor name.

    Raises
    ------
    ArgumentTypeError
        If it is not a :class:`ScoreMod`.
    """
    if score_mod is None:
        return None, {}
    if not isinstance(score_mod, ScoreMod):
        raise ArgumentTypeError("score_mod", shown(score_mod), "a cuflash.ScoreMod, or None")
    score, arrays = score_mod.parts
    return score, dict(zip(SLOTS, arrays, strict=False))


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Number, np.bool_)) and not isinstance(value, np.ndarray)


def _number(name: str, value: Any) -> tuple[str, bool, str]:
    """The name, whether the value is an integer, and the value as text."""
    if isinstance(value, (bool, np.bool_, numbers.Integral)):
        whole = int(value)
        if not -(2**31) <= whole < 2**31:
            raise ArgumentValueError(name, repr(value), "an integer of 32 bits, or a real number")
        return name, True, str(whole)
    if not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, shown(value), "a real number, an integer or an array")
    real = float(value)
    if not math.isfinite(real):
        raise ArgumentValueError(name, repr(value), "a finite number")
    return name, False, real.hex()
