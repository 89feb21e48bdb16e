"""Float8 caches: recognising them, their scales, and conversion between bytes and numbers."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..arrays.adopt import Adopted, adopt
from ..arrays.spec import TensorSpec
from ..errors import ArgumentTypeError, ArgumentValueError, shown
from ..features.float8 import NAMES, NUMBERS

__all__ = [
    "Numbers",
    "adopt_scales",
    "as_bytes",
    "check_cache_dtype",
    "check_scales",
    "dequantised",
    "of_each_head",
    "quantised",
    "scale_spec",
    "split_scales",
]

_Array = NDArray[Any]
#: Scales that are numbers, by the keywords that attention has for them.
Numbers = tuple[tuple[str, float], ...]

_NAME = "float8_e4m3fn"
_TYPE = np.dtype(ml_dtypes.float8_e4m3fn)
_CACHES = ("k_cache", "v_cache")
_MOST = 448.0


def check_cache_dtype(value: Any, dtypes: Mapping[str, str]) -> bool:
    """Return whether caches are float8, by ``cache_dtype`` or by their own dtype.

    Parameters
    ----------
    value
        ``cache_dtype`` as it was given.
    dtypes
        Dtypes of the caches, by argument name.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If ``value`` is no dtype of caches, or the caches do not hold bytes.
    """
    told = value is not None
    if told and not _is_float8(value):
        expected = f"None, or {_NAME!r} for caches of bytes"
        raise ArgumentValueError("cache_dtype", shown(value), expected)
    float8 = told or _NAME in dtypes.values()
    for name, dtype in dtypes.items():
        if float8 and dtype not in ("uint8", _NAME):
            expected = f"uint8 or {_NAME}, for float8 caches"
            raise ArgumentTypeError(name, f"dtype {dtype}", expected)
        if dtype == "uint8" and not told:
            raise ArgumentTypeError(name, "dtype uint8", f"cache_dtype={_NAME!r} beside it")
    return float8


def _is_float8(value: Any) -> bool:
    """Return whether a name or a library's dtype is e4m3 without infinities."""
    if isinstance(value, str):
        return value == _NAME
    name = getattr(value, "name", None) or getattr(value, "__name__", None) or shown(value)
    return isinstance(name, str) and name.rpartition(".")[2] == _NAME


def as_bytes(arrays: Mapping[str, Adopted]) -> dict[str, Adopted]:
    """Return the arrays with caches of float8 numbers viewed as bytes."""
    found = dict(arrays)
    for name in _CACHES:
        array = found.get(name)
        if array is not None and array.spec.dtype == _NAME:
            found[name] = replace(array, native=array.native.view(np.uint8))
    return found


def split_scales(given: Mapping[str, Any], float8: bool) -> tuple[dict[str, Any], Numbers]:
    """Return the scales that are arrays, by name, and the scales that are numbers.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If one is missing beside float8 caches, given without them, or no scale.
    """
    arrays: dict[str, Any] = {}
    found: list[tuple[str, float]] = []
    for name in NAMES:
        value = given.get(name)
        if not float8:
            if value is not None:
                said = f"None: it goes with float8 caches, which hold {_NAME}"
                raise ArgumentValueError(name, shown(value), said)
        elif value is None:
            expected = "a number, or a float32 array: what is stored is multiplied by it"
            raise ArgumentTypeError(name, "None beside float8 caches", expected)
        elif isinstance(value, (bool, np.bool_, numbers.Number)):
            found.append((NUMBERS[name], _number(name, value)))
        else:
            arrays[name] = value
    return arrays, tuple(found)


def _number(name: str, value: Any) -> float:
    """Return a scale as a number of float32, after checking that it is 2^-100 to 2^100."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(name, shown(value), "a number, or a float32 array")
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not 2.0**-100 <= scale <= 2.0**100:
        raise ArgumentValueError(name, shown(value), "a positive number, 2^-100 to 2^100")
    return float(np.float32(scale))


def adopt_scales(arrays: Mapping[str, Any]) -> dict[str, Adopted]:
    """Return the scales that are arrays as native arrays of at least one axis."""
    found = {}
    for name, value in arrays.items():
        array = adopt(name, value)
        native = array.native if array.native.shape else array.native.reshape(1)
        found[name] = replace(array, native=native)
    return found


def scale_spec(spec: TensorSpec) -> TensorSpec:
    """Return the description of a scale that is an array, with at least one axis."""
    return spec if spec.shape else replace(spec, shape=(1,), strides=(1,))


def check_scales(specs: Mapping[str, TensorSpec], batch: int, heads_kv: int) -> None:
    """Check shapes and dtypes of the scales that are arrays.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.
    """
    for name in NAMES:
        if name not in specs:
            continue
        spec = specs[name]
        if spec.dtype != "float32":
            raise ArgumentTypeError(name, f"dtype {spec.dtype}", "float32")
        if spec.shape not in ((1,), (batch, heads_kv)):
            expected = f"(), (1,) or ({batch}, {heads_kv}): of all, or of each entry and head"
            raise ArgumentValueError(name, f"shape {spec.shape}", expected)
        if not (spec.is_contiguous and spec.whole_elements):
            got = f"strides of {spec.strides} elements"
            raise ArgumentValueError(name, got, "a C-contiguous array")


def of_each_head(name: str, arrays: Mapping[str, Any], given: Numbers) -> _Array:
    """Return a scale on the host as (batch or 1, heads_kv or 1), float32."""
    if name in arrays:
        scale: _Array = arrays[name]
        return scale if scale.ndim == 2 else scale.reshape(1, 1)
    return np.full((1, 1), dict(given)[NUMBERS[name]], np.float32)


@functools.cache
def _numbers_of_bytes() -> _Array:
    """Return the float8 number of every byte, float32."""
    table: _Array = np.arange(256, dtype=np.uint8).view(_TYPE).astype(np.float32)
    return table


def dequantised(stored: _Array, scale: _Array) -> _Array:
    """Return stored numbers (batch, rows, heads, columns) times their scale, float32."""
    found: _Array = _numbers_of_bytes()[stored]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        found *= scale[:, None, :, None]
    return found


def quantised(x: _Array, scale: _Array) -> _Array:
    """Return numbers (..., heads, columns) divided by a scale (..., heads), as bytes.

    Quotients are formed in float32, rounded to the nearest float8 number (ties to
    even), and saturated; NaN stays NaN.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        quotient = x.astype(np.float32) / scale[..., None]
        stored: _Array = np.clip(quotient, -_MOST, _MOST).astype(_TYPE).view(np.uint8)
    stored[np.isnan(quotient)] = 0x7F
    return stored
