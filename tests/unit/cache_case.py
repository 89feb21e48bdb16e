"""Calls with caches, the changes after which they are refused, and the check of a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuflash import ArgumentTypeError, ArgumentValueError, UnsupportedError

from ..kit.caches import CacheCase, build, same_bits

__all__ = [
    "INDEXED", "NOTHING_NEW", "PAGED", "PLAIN", "ROTATING", "Row", "T", "U", "V", "check", "entry",
    "numbers", "read_only", "setting", "writable_broadcast", "wrong",
]  # fmt: skip

ROTATING = CacheCase(lengths=(3, 0), new=2, pairs=3, table_rows=10)
PAGED = CacheCase(kind="paged", lengths=(3, 4), slots=4, pages=2, new=2)
INDEXED = CacheCase(kind="indexed", lengths=(3, 0), new=2)
PLAIN = CacheCase(lengths=(3, 0), new=2)
NOTHING_NEW = CacheCase(lengths=(3, 0), new=None)

_Arguments = dict[str, Any]
#: A case, the change to its arguments, the error, and the beginning of the error's text.
Row = tuple[CacheCase, Callable[[_Arguments], _Arguments], type, str]
V, T, U = ArgumentValueError, ArgumentTypeError, UnsupportedError


def numbers(*values: int) -> Any:
    return np.array(values, np.int32)


def wrong(name: str, change: Callable[[Any], Any]) -> Callable[[_Arguments], _Arguments]:
    return lambda given: {name: change(given[name])}


def setting(**values: Any) -> Callable[[_Arguments], _Arguments]:
    return lambda given: values


def entry(name: str, at: Any, value: int) -> Callable[[_Arguments], _Arguments]:
    def change(given: _Arguments) -> _Arguments:
        array = given[name].copy()
        array[at] = value
        return {name: array}

    return change


def read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def writable_broadcast(array: Any) -> Any:
    return np.lib.stride_tricks.as_strided(array, array.shape, (0, *array.strides[1:]))


def check(
    function: Any, case: CacheCase, change: Any, kind: type, text: str, attends: bool
) -> None:
    built = build(case)
    arrays = built.arrays if attends else built.appended
    given = {**built.caches, **arrays, **built.keywords}
    given |= change(given)
    before = [buffer.copy() for buffer in built.raw]
    with pytest.raises(kind, match=f"^{re.escape(text)}") as raised:
        function(**given)
    assert type(raised.value) is kind
    assert all(same_bits(a, b) for a, b in zip(built.raw, before, strict=True))
