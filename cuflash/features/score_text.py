"""The translation unit's part of a score function: the caller's text, and its arguments."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentValueError
from ..planning.problem import DTYPES, ELEMENTS
from .device import MAIN_KERNELS, DevicePart

__all__ = [
    "PLACE",
    "SLOTS",
    "NumpyFunction",
    "ScoreText",
    "TextArray",
    "check_text",
    "device_part",
    "size_field",
    "uses",
]

#: Tensor names of a function's arrays, in order.
SLOTS: tuple[str, ...] = tuple(f"score_array_{i}" for i in range(8))

#: Name of the tensor that holds the entry and head of a larger call at which the arrays begin.
PLACE = "score_place"

#: What the text may not contain: a preprocessor directive, in any spelling, and characters that
#: could hide the end of a comment or a brace.
_REFUSED = ("#", "%:", "??=", "\\", '"', "'", "\r")
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
#: A name, which may hold digits, or a number with a point or an exponent and without a suffix.
_NAME_OR_NUMBER = re.compile(
    r"[A-Za-z_]\w*|(?:0[xX][\da-fA-F.]+(?:[pP][+-]?\d+)?\w*)"
    r"|(?P<number>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])|[\d.][\w.]*"
)


@dataclass(frozen=True, eq=False)
class NumpyFunction:
    """A function of NumPy arrays that equals only itself, whatever it defines."""

    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        """The function's result."""
        return self.function(*given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumpyFunction) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)


@dataclass(frozen=True)
class ScoreText:
    """A score function without its arrays: hashable, a keyword of a call.

    Attributes
    ----------
    text
        The body of the function, in CUDA C++.
    numbers
        Its numbers: name, whether it is an integer, and the value as text. Real numbers are in
        hexadecimal, so that equal texts mean equal numbers.
    arrays
        Names of its arrays, in the order of :data:`SLOTS`.
    numpy
        The same function of NumPy arrays, or None. The representation leaves it out, so that it is
        the same in every process.
    """

    text: str
    numbers: tuple[tuple[str, bool, str], ...] = ()
    arrays: tuple[str, ...] = ()
    numpy: NumpyFunction | None = field(default=None, repr=False)

    @functools.cached_property
    def digest(self) -> str:
        """A short digest of the text and its arguments."""
        said = repr((self.text, [number[:2] for number in self.numbers], self.arrays))
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    @property
    def values(self) -> dict[str, int | float]:
        """The numbers by name."""
        return {
            name: int(value) if whole else float.fromhex(value)
            for name, whole, value in self.numbers
        }


@dataclass(frozen=True)
class TextArray:
    """The properties of a function's array that change the machine code."""

    name: str
    dtype: str
    axes: int
    index: str  # the C++ type of its indices


def check_text(text: str) -> None:
    """Refuse a text that cannot be the body of a function.

    Raises
    ------
    ArgumentValueError
        Naming the forbidden part.
    """
    found = [one for one in _REFUSED if one in text]
    if found:
        expected = "a text without directives, strings, characters and carriage returns"
        raise ArgumentValueError("score_mod", f"{found[0]!r} in the text", expected)
    code = _COMMENTS.sub(" ", text)
    if "/*" in code:
        raise ArgumentValueError("score_mod", "a comment without an end", "one with */")
    if not re.search(r"\breturn\b", code):
        raise ArgumentValueError("score_mod", "a text without return", "the body of a function")
    depth = 0
    for character in code:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth:
        raise ArgumentValueError("score_mod", "braces that are not in pairs", "{ and } in pairs")


def size_field(slot: str, axis: int) -> str:
    """The field of the device block that holds the size of an axis."""
    return f"{slot}_size_{axis}"


@functools.lru_cache(maxsize=256)
def device_part(score: ScoreText, arrays: tuple[TextArray, ...], storage: str) -> DevicePart:
    """A function's additions to kernels of a storage type."""
    fields = _fields(score, arrays, storage)
    return DevicePart(
        kernels=MAIN_KERNELS,
        struct="ScoreModParams",
        block=np.dtype(fields, align=True),
        seams=(("Score", "ScoreModTerm<{score_mod_storage}>"),),
        header="features/score_mod.cuh",
        text="\n".join(_lines(score, arrays, storage, fields)),
    )


def _fields(
    score: ScoreText, arrays: tuple[TextArray, ...], storage: str
) -> list[tuple[str, type]]:
    real = np.float64 if DTYPES[storage].compute == "float64" else np.float32
    fields: list[tuple[str, type]] = [("inner", np.float64), ("inner_single", np.float32)]
    fields += [(name, np.int32) for name in ("position", "entries", "heads")]
    fields += [(PLACE, np.uint64)]
    for slot, array in zip(SLOTS, arrays, strict=False):
        fields += [(slot, np.uint64)]
        fields += [(size_field(slot, axis), np.int32) for axis in range(array.axes)]
    fields += [(f"argument_{n}", np.int32 if whole else real) for n, whole, _ in score.numbers]
    return fields


#: C++ names of the types of fields; a pointer may point to anything.
_TYPES: dict[Any, str] = {
    np.float64: "double",
    np.float32: "float",
    np.int32: "int",
    np.uint64: "const void*",
}


def _lines(
    score: ScoreText,
    arrays: tuple[TextArray, ...],
    storage: str,
    fields: Iterable[tuple[str, type]],
) -> Iterable[str]:
    """The header of the function, and the function with its own line numbers."""
    return [
        f"namespace cuflash_text {{ using Storage = {DTYPES[storage].cuda}; }}",
        '#include "features/score_text.cuh"',
        "namespace cuflash {",
        "struct ScoreModParams {",
        *(f"  {_TYPES[kind]} {name};" for name, kind in fields),
        "};",
        "}  // namespace cuflash",
        "namespace cuflash_text {",
        f"constexpr bool kUsesPosition = {_has(score.text, 'i', 'j')};",
        f"constexpr bool kUsesHead = {_has(score.text, 'batch', 'head')};",
        *_struct_lines(score, arrays),
        "__device__ __forceinline__ Value score(Value s, int batch, int head, int i, int j,",
        "    int offset, const Arguments& p) {",
        "  const Real infinity = cuflash::infinity<Real>();",
        '#line 1 "score"',
        _with_real_numbers(score.text),
        '#line 1 "cuflash"',
        "  return Value(Real(infinity - infinity));  // of a text that does not always return",
        "}",
        "}  // namespace cuflash_text",
        '#include "features/score_mod.cuh"',
    ]


def _struct_lines(score: ScoreText, arrays: tuple[TextArray, ...]) -> Iterable[str]:
    """The struct that the text uses as ``p``."""
    members, initial = [], []
    for name, whole, _ in score.numbers:
        members.append(f"  {'int' if whole else 'Real'} {name};")
        initial.append(f"{name}(params.argument_{name})")
    for slot, array in zip(SLOTS, arrays, strict=False):
        element = ELEMENTS[array.dtype].cuda
        sizes = ", ".join(f"params.{size_field(slot, axis)}" for axis in range(array.axes))
        members.append(f"  Array<{element}, {array.axes}, {array.index}> {array.name};")
        initial.append(f"{array.name}{{static_cast<const {element}*>(params.{slot}), {{{sizes}}}}}")
    made = "explicit Arguments(const cuflash::ScoreModParams& params)"
    made += f"{' : ' if initial else ''}{', '.join(initial)} {{}}"
    return ["struct Arguments {", *members, f"  __device__ {made}", "};"]


def _has(text: str, *names: str) -> str:
    """Whether the text has one of these names, as a C++ literal."""
    return "true" if uses(text, *names) else "false"


def uses(text: str, *names: str) -> bool:
    """Whether the text has one of these names."""
    return re.search(rf"\b({'|'.join(names)})\b", _COMMENTS.sub(" ", text)) is not None


def _with_real_numbers(text: str) -> str:
    """The text with its decimal literals in the type in which scores are computed."""

    def real(found: re.Match[str]) -> str:
        return f"Real({found[0]})" if found["number"] else found[0]

    return _NAME_OR_NUMBER.sub(real, text)
