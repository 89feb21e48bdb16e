"""Refuses arrays whose meaning is not the numbers in their memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError

__all__ = ["check_byte_order", "check_foreign", "check_subclass", "class_of", "kind_of"]

#: Methods of PyTorch tensors and JAX arrays that return True if their memory is not their contents.
#: Each is followed by what is wrong and by what to pass instead.
_TELL = (
    ("is_neg", "whose negation is still to be done", "its resolve_neg()"),
    (
        "is_deleted",
        "which was deleted or donated and has no memory",
        "an array that is still there",
    ),
)


def kind_of(value: Any) -> str:
    """Module and name of the class of a value."""
    return _name_of(type(value))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def class_of(module: str, *path: str) -> type | tuple[()]:
    """A class of a module, for isinstance; ``()`` if the module or the class is missing."""
    found: Any = sys.modules.get(module)
    for name in path:
        found = getattr(found, name, None)
    return found if isinstance(found, type) else ()


def check_byte_order(name: str, array: Any) -> None:
    """Refuse a NumPy or CuPy array whose byte order is not that of this machine."""
    if not array.dtype.isnative:
        raise ArgumentTypeError(
            name, f"dtype {array.dtype.str!r}, not in native byte order", "native byte order"
        )


def check_subclass(name: str, array: Any) -> None:
    """Refuse subclasses of ``numpy.ndarray`` that would lose their meaning.

    Such a subclass adds a mask or a unit, or changes what ``*`` means. A masked array is refused
    even if nothing is masked: whether a call works should not depend on the contents of its arrays.
    """
    if isinstance(array, np.ma.MaskedArray):
        expected = "a plain NumPy array, as its .filled(...) or .data"
        raise ArgumentTypeError(name, kind_of(array), expected)
    if isinstance(array, np.matrix):
        raise ArgumentTypeError(name, kind_of(array), "a plain NumPy array, as its .A")
    _check_unit(name, array)


def check_foreign(name: str, value: Any) -> None:
    """Refuse objects that are not arrays, and arrays whose memory is not their contents."""
    if isinstance(value, type):
        raise ArgumentTypeError(name, f"the class {_name_of(value)}", "an array")
    if isinstance(value, class_of("jax", "core", "Tracer")):
        raise ArgumentTypeError(
            name,
            f"{kind_of(value)}: JAX is tracing, and there is no memory yet",
            "an array; inside jax.jit, jax.grad or jax.vmap call cuflash.jax.attention",
        )
    _check_unit(name, value)
    for method, is_what, remedy in _TELL:
        tell = getattr(type(value), method, None)
        if tell is not None and tell(value) is True:
            raise ArgumentTypeError(name, f"{kind_of(value)}, {is_what}", remedy)


def _check_unit(name: str, value: Any) -> None:
    """Refuse quantities, as in astropy, pint and unyt: scores have no unit."""
    if any(getattr(value, attribute, None) is not None for attribute in ("unit", "units")):
        raise ArgumentTypeError(
            name, f"{kind_of(value)}, which has a unit", "numbers: its .value or .magnitude"
        )
