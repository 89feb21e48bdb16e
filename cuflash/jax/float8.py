"""Float8 caches inside JAX: arrays of ``jax.numpy.float8_e4m3fn`` and their scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..caches.float8 import Numbers, split_scales
from ..errors import ArgumentTypeError
from .arguments import as_array

__all__ = ["scales_of"]

_NAME = "float8_e4m3fn"


def scales_of(
    given: Mapping[str, Any], caches: Mapping[str, Any]
) -> tuple[dict[str, Any], Numbers | None]:
    """The scales that are arrays by name, and the numbers; None for caches of other dtypes.

    Parameters
    ----------
    given
        Every argument by name.
    caches
        ``k_cache`` and ``v_cache``.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If a scale is missing beside float8 caches, is given beside other caches, or is
        no scale; if only one of the caches is float8; or if the caches hold bytes.
    """
    float8 = _are_float8({name: str(array.dtype) for name, array in caches.items()})
    arrays, numbers = split_scales(given, float8)
    found = {name: _in_float32(as_array(name, value)) for name, value in arrays.items()}
    return found, numbers if float8 else None


def _are_float8(dtypes: Mapping[str, str]) -> bool:
    float8 = _NAME in dtypes.values()
    for name, dtype in dtypes.items():
        if dtype == "uint8" or (float8 and dtype != _NAME):
            remedy = "jax.lax.bitcast_convert_type makes it of bytes"
            expected = f"{_NAME}, for float8 caches: {remedy}"
            raise ArgumentTypeError(name, f"dtype {dtype}", expected)
    return float8


def _in_float32(scale: Any) -> Any:
    """Return a traced Python number in float32, and any other array unchanged."""
    is_number = scale.weak_type and not jnp.issubdtype(scale.dtype, jnp.complexfloating)
    return scale.astype(jnp.float32) if is_number else scale
