"""The keywords of a call, each checked by itself."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .arrays.spec import LAYOUTS
from .errors import ArgumentTypeError, ArgumentValueError
from .planning.plan import ALGORITHMS, Algorithm, Backend
from .planning.problem import DTYPES, MAX_SEQLEN, DTypeName

__all__ = [
    "AlgorithmChoice",
    "BackendChoice",
    "Options",
    "check_blocks",
    "check_dtype",
    "check_flag",
    "check_options",
    "names_of",
]


AlgorithmChoice = Algorithm | Literal["auto"]
BackendChoice = Backend | Literal["auto"]


@dataclass(frozen=True)
class Options:
    """The keywords of a call, checked; None where the problem decides."""

    causal: bool = False
    scale: float | None = None
    q_offset: int | None = None
    layout: str | None = None
    out_dtype: DTypeName | None = None
    deterministic: bool = False
    backend: BackendChoice = "auto"
    algorithm: AlgorithmChoice = "auto"
    blocks: tuple[int, int] | None = None


def check_options(**given: Any) -> Options:
    """Check every keyword by itself; what is not given keeps its default.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the keyword, what it got and what it takes.
    """
    checked = {name: _OPTION_CHECKS[name](name, value) for name, value in given.items()}
    return Options(**checked)


def check_flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as it."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(name, _shown(value), "True or False")
    return bool(value)


def _check_scale(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, _shown(value), "a number, or None for 1/sqrt(head_dim)")
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentValueError(name, _shown(value), "a finite positive number")
    return scale


def _check_integer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(name, _shown(value), "an integer or None")
    return int(value)


def _check_layout(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ArgumentTypeError(name, _shown(value), f"None or one of {names_of(LAYOUTS)}")
    if value not in LAYOUTS:
        raise ArgumentValueError(name, _shown(value), f"one of {names_of(LAYOUTS)}")
    return str(value)


def check_dtype(name: str, value: Any) -> DTypeName | None:
    """The name of a dtype, of NumPy or of another library; None for None.

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
    except Exception as error:  # NumPy's parser has a type for every mistake
        raise ArgumentTypeError(name, _shown(value), f"one of {names_of(DTYPES)}") from error
    if dtype.name not in DTYPES or not dtype.isnative:
        raise ArgumentTypeError(name, _shown(dtype), f"one of {names_of(DTYPES)}")
    return DTYPES[dtype.name].name


def _dtype_name(value: Any) -> DTypeName | None:
    """The name of a dtype that NumPy does not know: bfloat16, or another library's."""
    if type(value).__name__.lower() == "dtype":  # as torch.float32, mlx.core.float32
        value = str(value).rpartition(".")[2]
        return DTYPES[value].name if value in DTYPES else None
    return "bfloat16" if isinstance(value, str) and value == "bfloat16" else None


def _check_choice(name: str, value: Any) -> Any:
    choices = ("auto", "cuda", "numpy") if name == "backend" else ("auto", *sorted(ALGORITHMS))
    if not isinstance(value, str) or value not in choices:
        raise ArgumentValueError(name, _shown(value), f"one of {names_of(choices)}")
    return value


def check_blocks(name: str, value: Any) -> tuple[int, int] | None:
    """Two positive integers; None for None."""
    expected = f"(block_q, block_kv), two integers from 1 to {MAX_SEQLEN}"
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(name, _shown(value), expected)
    given = [_check_integer(name, block) for block in value]
    blocks = [block for block in given if block is not None and 1 <= block <= MAX_SEQLEN]
    if len(blocks) != 2:
        raise ArgumentValueError(name, _shown(value), expected)
    return blocks[0], blocks[1]


_OPTION_CHECKS = {
    "causal": check_flag,
    "scale": _check_scale,
    "q_offset": _check_integer,
    "layout": _check_layout,
    "out_dtype": check_dtype,
    "deterministic": check_flag,
    "backend": _check_choice,
    "algorithm": _check_choice,
    "blocks": check_blocks,
}


def names_of(values: Any) -> str:
    """The values as a caller would write them."""
    return ", ".join(map(repr, values))


def _shown(value: Any) -> str:
    """What an error says it got: short, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # whatever a caller's object raises; ints of thousands of digits too
        return f"a value of type {type(value).__qualname__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
