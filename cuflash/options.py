"""The keywords of a call, each checked separately."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np

from .arrays.spec import LAYOUTS, LayoutName
from .errors import ArgumentTypeError, ArgumentValueError, shown
from .features.table import every_feature
from .planning.plan import ALGORITHMS, Algorithm, Backend
from .planning.problem import DTYPES, ELEMENTS, MAX_SEQLEN, DTypeName, ElementName
from .tensors import QKV, differentiable

__all__ = [
    "AUTO",
    "AlgorithmChoice",
    "BackendChoice",
    "Differentiable",
    "Options",
    "WindowSize",
    "check_blocks",
    "check_dtype",
    "check_element",
    "check_flag",
    "check_options",
    "check_wrt",
    "names_of",
    "seed_of",
]


AlgorithmChoice = Algorithm | Literal["auto"]
BackendChoice = Backend | Literal["auto"]
#: What ``backend`` and ``algorithm`` are by default.
AUTO: Final = "auto"
#: The (left, right) sides of a window.
WindowSize = tuple[int | None, int | None]
#: The names that ``wrt`` may hold.
Differentiable = Literal["q", "k", "v", "alibi_slopes", "bias", "sinks"]


@dataclass(frozen=True)
class Options:
    """The checked keywords of a call; None where the problem decides.

    They are passed on as one object and never unpacked into keywords again.
    """

    causal: bool = False
    scale: float | None = None
    q_offset: int | None = None
    layout: LayoutName | None = None
    out_dtype: DTypeName | None = None
    deterministic: bool = False
    backend: BackendChoice = "auto"
    algorithm: AlgorithmChoice = "auto"
    blocks: tuple[int, int] | None = None
    kv_chunk: int | None = None
    #: Whether a row has the same bits in a batch of any size.
    batch_invariant: bool = False
    wrt: tuple[str, ...] = QKV
    more: tuple[tuple[str, Any], ...] = ()  # keywords of features that were given, in order
    #: For broadcast arrays, by name: how many neighbouring batch entries share one entry of the
    #: array, and how many share one of its gradient. An array without an item here has one entry
    #: for all, or one for each. With (n, m), batch entry e reads entry ``e // n`` modulo the number
    #: of entries.
    entries: tuple[tuple[str, tuple[int, int]], ...] = ()
    #: For dropout: the numbers of batch entries and of query heads after which draws repeat. The
    #: seed then has two more words, the entry and head at which the arrays begin. None: every entry
    #: and head has its own draws.
    draws: tuple[int, int] | None = None
    #: For a score function: the numbers of batch entries and of query heads after which its
    #: arguments repeat. None: it sees the entries and heads of the arrays.
    places: tuple[int, int] | None = None

    def keyword(self, name: str) -> Any:
        """The value of a feature's keyword; None if it was not given."""
        return dict(self.more).get(name)


def check_options(**given: Any) -> Options:
    """Check every keyword separately; absent keywords keep their defaults.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the keyword, its value and what it takes.
    """
    more = []
    for feature in every_feature():
        for name, check in feature.keywords.items():
            value = given.pop(name, None)
            if value is not None:
                more.append((name, check(name, value)))
    checked = {name: _BASE_CHECKS[name](name, value) for name, value in given.items()}
    return Options(**checked, more=tuple(more))


def seed_of(value: Any) -> tuple[Any, Any]:
    """A dropout seed as a keyword and as an array; at least one of the two is None."""
    return (value, None) if isinstance(value, numbers.Number) else (None, value)


def check_flag(name: str, value: Any) -> bool:
    """True or False; other values that are merely truthy are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(name, shown(value), "True or False")
    return bool(value)


def _check_scale(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, shown(value), "a number, or None for 1/sqrt(head_dim)")
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentValueError(name, shown(value), "a finite positive number")
    return scale


def _check_integer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(name, shown(value), "an integer or None")
    return int(value)


def _check_layout(name: str, value: Any) -> LayoutName | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ArgumentTypeError(name, shown(value), f"None or one of {names_of(LAYOUTS)}")
    if value not in LAYOUTS:
        raise ArgumentValueError(name, shown(value), f"one of {names_of(LAYOUTS)}")
    return LAYOUTS[value].name


def check_dtype(name: str, value: Any) -> DTypeName | None:
    """The name of a dtype of NumPy or of another library; None for None.

    Raises
    ------
    ArgumentTypeError
        If it is not one of the four storage types in native byte order.
    """
    if value is None:
        return None
    try:
        known = _dtype_name(value)
        if known is not None:
            return known
        dtype = np.dtype(value)
    except Exception as error:  # NumPy raises many types of errors for a wrong dtype
        raise ArgumentTypeError(name, shown(value), f"one of {names_of(DTYPES)}") from error
    if dtype.name not in DTYPES or not dtype.isnative:
        raise ArgumentTypeError(name, shown(dtype), f"one of {names_of(DTYPES)}")
    return DTYPES[dtype.name].name


def check_element(name: str, value: Any) -> ElementName:
    """The name of a dtype of a feature's array: a storage type, bool or an integer.

    Raises
    ------
    ArgumentTypeError
        If it is none of these.
    """
    last_word = str(value).rpartition(".")[2].rstrip("'>")  # of torch.bool, numpy.uint32
    if value is bool or last_word in ("bool", "bool_", "?"):
        return "bool"
    if last_word in ("int32", "int64", "uint8", "uint32"):
        return cast(ElementName, last_word)
    expected = f"one of {names_of(ELEMENTS)}"
    try:
        dtype = check_dtype(name, value)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(name, error.got, expected) from error
    if dtype is None:
        raise ArgumentTypeError(name, "None", expected)
    return dtype


def _dtype_name(value: Any) -> DTypeName | None:
    """The name of a dtype that NumPy does not know: bfloat16, or one of another library."""
    if type(value).__name__.lower() == "dtype":  # as torch.float32, mlx.core.float32
        value = str(value).rpartition(".")[2]
        return DTYPES[value].name if value in DTYPES else None
    return "bfloat16" if isinstance(value, str) and value == "bfloat16" else None


def _check_choice(name: str, value: Any) -> Any:
    choices = ("auto", "cuda", "numpy") if name == "backend" else ("auto", *sorted(ALGORITHMS))
    if not isinstance(value, str) or value not in choices:
        raise ArgumentValueError(name, shown(value), f"one of {names_of(choices)}")
    return value


def check_wrt(name: str, value: Any) -> tuple[str, ...]:
    """Names of tensors that have a gradient, each once, in the order given.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is not a sequence of names, is empty, or holds an unknown name or one twice.
    """
    choices = differentiable()
    expected = f"some of {names_of(choices)}, each once, as a tuple"
    if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
        raise ArgumentTypeError(name, shown(value), expected)
    if not value or len(set(value)) != len(value) or not set(value) <= set(choices):
        raise ArgumentValueError(name, shown(value), expected)
    named = tuple(map(str, value))
    return QKV if named == QKV else named


def check_chunk(name: str, value: Any) -> int | None:
    """The number of keys that one thread block processes, 0 for all; None for None."""
    chunk = _check_integer(name, value)
    if chunk is not None and not 0 <= chunk <= MAX_SEQLEN:
        raise ArgumentValueError(name, shown(value), f"an integer from 0 to {MAX_SEQLEN}")
    return chunk


def check_blocks(name: str, value: Any) -> tuple[int, int] | None:
    """Two positive integers; None for None."""
    expected = f"(block_q, block_kv), two integers from 1 to {MAX_SEQLEN}"
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(name, shown(value), expected)
    given = [_check_integer(name, block) for block in value]
    blocks = [block for block in given if block is not None and 1 <= block <= MAX_SEQLEN]
    if len(blocks) != 2:
        raise ArgumentValueError(name, shown(value), expected)
    return blocks[0], blocks[1]


_BASE_CHECKS = {
    "causal": check_flag,
    "scale": _check_scale,
    "q_offset": _check_integer,
    "layout": _check_layout,
    "out_dtype": check_dtype,
    "deterministic": check_flag,
    "backend": _check_choice,
    "algorithm": _check_choice,
    "blocks": check_blocks,
    "kv_chunk": check_chunk,
    "batch_invariant": check_flag,
    "wrt": check_wrt,
}


def names_of(values: Any) -> str:
    """The values as a caller writes them."""
    return ", ".join(map(repr, values))
