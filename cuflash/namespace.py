"""The array module of an array: NumPy, CuPy or JAX."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ArgumentTypeError, shown

__all__ = ["namespace_of"]

#: Array modules by the package of an array's type.
_NAMESPACES = {"numpy": "numpy", "cupy": "cupy", "jax": "jax.numpy", "jaxlib": "jax.numpy"}


def namespace_of(name: str, array: Any) -> Any:
    """The module ``numpy``, ``cupy`` or ``jax.numpy``, also for JAX tracers.

    Parameters
    ----------
    name
        The name of the argument, for errors.
    array
        The argument.

    Raises
    ------
    ArgumentTypeError
        If it is not an array of these libraries.
    """
    for kind in type(array).__mro__:
        found = _NAMESPACES.get(kind.__module__.partition(".")[0])
        if found is not None and hasattr(array, "ndim"):
            return importlib.import_module(found)
    raise ArgumentTypeError(name, shown(array), "an array of NumPy, CuPy or JAX")
