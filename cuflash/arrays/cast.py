"""An array in another dtype, of the same kind and in the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .adopt import adopt, dtype_named

__all__ = ["cast"]


def cast(name: str, value: Any, dtype: str | None) -> Any:
    """Round every element of an array to a dtype; the array itself if it has that dtype already.

    Parameters
    ----------
    name
        The name of the argument, for errors.
    value
        An array of any kind that :func:`adopt` takes.
    dtype
        The name of the dtype; None leaves the array alone.

    Returns
    -------
    array
        C-contiguous, of the same kind as ``value``.
    """
    adopted = adopt(name, value)
    if dtype is None or adopted.spec.dtype == dtype:
        return value
    native, kind = adopted.native, dtype_named(dtype)
    if isinstance(native, np.ndarray):
        return adopted.answer(native.astype(kind, order="C"))
    import cupy

    with cupy.cuda.Device(native.device.id):
        return adopted.answer(native.astype(kind, order="C"))
