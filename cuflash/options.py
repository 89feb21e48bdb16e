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
from .planning.problem import DTYPES, DTypeName

__all__ = ["AlgorithmChoice", "BackendChoice", "Options", "check_flag", "check_options", "names_of"]


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
        raise ArgumentTypeError(name, repr(value), "True or False")
    return bool(value)


def _check_scale(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, repr(value), "a number, or None for 1/sqrt(head_dim)")
    scale = float(value)
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentValueError(name, repr(value), "a finite positive number")
    return scale


def _check_integer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(name, repr(value), "an integer or None")
    return int(value)


def _check_layout(name: str, value: Any) -> str | None:
    if value is not None and value not in LAYOUTS:
        raise ArgumentValueError(name, repr(value), f"one of {', '.join(map(repr, LAYOUTS))}")
    return None if value is None else str(value)


def _check_dtype(name: str, value: Any) -> DTypeName | None:
    if value is None:
        return None
    try:
        dtype = "bfloat16" if value == "bfloat16" else np.dtype(value).name
    except TypeError as error:
        raise ArgumentTypeError(name, repr(value), f"one of {names_of(DTYPES)}") from error
    if dtype not in DTYPES:
        raise ArgumentTypeError(name, dtype, f"one of {names_of(DTYPES)}")
    return DTYPES[dtype].name


def _check_choice(name: str, value: Any) -> Any:
    choices = ("auto", "cuda", "numpy") if name == "backend" else ("auto", *sorted(ALGORITHMS))
    if not isinstance(value, str) or value not in choices:
        raise ArgumentValueError(name, repr(value), f"one of {names_of(choices)}")
    return value


def _check_blocks(name: str, value: Any) -> tuple[int, int] | None:
    expected = "(block_q, block_kv), two positive integers"
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentTypeError(name, repr(value), expected)
    block_q, block_kv = (_check_integer(name, block) for block in value)
    if block_q is None or block_kv is None or block_q < 1 or block_kv < 1:
        raise ArgumentValueError(name, repr(value), expected)
    return block_q, block_kv


_OPTION_CHECKS = {
    "causal": check_flag,
    "scale": _check_scale,
    "q_offset": _check_integer,
    "layout": _check_layout,
    "out_dtype": _check_dtype,
    "deterministic": check_flag,
    "backend": _check_choice,
    "algorithm": _check_choice,
    "blocks": _check_blocks,
}


def names_of(values: Any) -> str:
    """The values as a caller would write them."""
    return ", ".join(map(repr, values))
