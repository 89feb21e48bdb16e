"""What a caller gives as ``score_mod``: the text of a function of scores, and what it reads."""

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

#: Words that no argument of a function may have as its name: of C++, and of the function itself.
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
    """A function that every score goes through before slopes, bias and masks.

    Parameters
    ----------
    text : str
        The body of a function in CUDA C++ that returns the new score of
        ``(s, batch, head, i, j, offset, p)``: ``s = scale * q k^T``; entry,
        query head, query and key; query i stands at key ``i + offset``; and the
        arguments below. Integers are ``int``. ``s`` is a dual number
        (``Value``): it has the arithmetic operators, comparisons, ``exp exp2
        log log2 tanh sqrt rsqrt sin cos pow fabs abs min max`` and
        ``where(condition, x, y)``, and no conversion to a plain number.
        Other real numbers are of type ``Real``, which is that of the softmax,
        and so are decimal ones without a suffix that the text writes out.
        ``infinity`` is one: a score of ``-infinity`` hides a pair. No
        preprocessor directives, strings or characters.
    numpy : callable, optional
        The same function of the same arguments for the NumPy backend: ``s`` is
        an array, or an array of dual numbers that NumPy's functions of these
        names and ``numpy.where`` know, and the others are arrays and numbers
        that broadcast against it. Without it that backend refuses the call.
    **arguments : number or array
        What the text reads: ``p.name`` is a number, ``p.name(index, ...)`` an
        element of an array of 1 to 4 axes, with as many integers, each clamped
        to its axis. Arrays are of the kind that q is, at most eight, of
        float16, bfloat16, float32, float64, int32, int64, uint32 or bool;
        numbers are finite, and integers are of 32 bits. There are no gradients
        of arguments: a ``bias`` has one.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, what it got and what is needed.

    Notes
    -----
    The text is compiled with the kernels when it is first used, and found again
    by its letters. Calls are decided anew for new numbers and for another
    ``numpy`` (make the function once), under JAX traced anew; not for other
    arrays of the same shape. An error of the compiler names "score" and the lines
    of the text. In bfloat16 ``tanh`` is the hardware's, with a relative error
    of 2^-11; 16-bit types divide by approximate reciprocals.

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
        """The same function of NumPy arrays; None if there is none."""
        return None if self._score.numpy is None else self._score.numpy.function

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Numbers, then arrays, by name."""
        return {**self._score.values, **dict(zip(self._score.arrays, self._arrays, strict=True))}

    @property
    def parts(self) -> tuple[ScoreText, tuple[Any, ...]]:
        """What does not change when arrays do, and the arrays."""
        return self._score, self._arrays

    @classmethod
    def of(cls, score: ScoreText, arrays: tuple[Any, ...]) -> ScoreMod:
        """The function of these parts."""
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
    """The keyword of a call, and the arrays of the function by the names of their tensors.

    Raises
    ------
    ArgumentTypeError
        If it is no :class:`ScoreMod`.
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
    """Name, whether it is an integer, and the value in letters."""
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
