"""Converts padded arrays to packed sequences and back, for NumPy, CuPy and JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import ArgumentTypeError, ArgumentValueError, shown
from .namespace import namespace_of

__all__ = ["cu_seqlens_of", "pack", "unpack"]


def pack(x: Any, lengths: Any, *, total: int | None = None) -> tuple[Any, Any]:
    """Put the used rows of all sequences one after the other.

    Parameters
    ----------
    x : array, (batch, seqlen, ...)
        An array of NumPy, CuPy or JAX; sequence b is ``x[b, :lengths[b]]``.
    lengths : array of integers, (batch,)
        An array of the same library. NumPy lengths are checked; others are clamped to 0 and
        ``seqlen``, because a check would wait for the device.
    total : int, optional
        The number of rows of the result. Rows after the last sequence are 0, and rows that do not
        fit are left out. By default the sum of the lengths, which only NumPy lengths give without
        waiting; other libraries need ``total``.

    Returns
    -------
    packed : array, (total, ...)
        As ``attention`` takes it with ``layout="shd"``. JAX can differentiate it.
    cu_seqlens : array of int32, (batch + 1,)
        The begin of each sequence, and the end of the last one.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.arange(8.0).reshape(2, 4, 1)
    >>> packed, cu_seqlens = cuflash.pack(x, np.array([1, 3]))
    >>> packed[:, 0], cu_seqlens
    (array([0., 4., 5., 6.]), array([0, 1, 4], dtype=int32))
    """
    xp = namespace_of("x", x)
    if x.ndim < 2:
        raise ArgumentValueError("x", f"shape {tuple(x.shape)}", "(batch, seqlen, ...)")
    batch, seqlen = x.shape[:2]
    _check_integers("lengths", lengths, xp, (batch,))
    if xp is np and batch and not 0 <= lengths.min() <= lengths.max() <= seqlen:
        raise ArgumentValueError("lengths", f"{lengths.min()} to {lengths.max()}", f"0 to {seqlen}")
    rows = _rows("total", total, lengths if xp is np else None)
    ends = xp.minimum(xp.cumsum(_clipped(xp, lengths, seqlen), dtype="int32"), rows)
    offsets = xp.concatenate([xp.zeros(1, "int32"), ends.astype("int32")])
    if not batch or not seqlen:
        return xp.zeros((rows, *x.shape[2:]), x.dtype), offsets
    place = xp.arange(rows)
    entry = xp.minimum(xp.searchsorted(offsets[1:], place, side="right"), batch - 1)
    row = xp.clip(place - offsets[entry], 0, seqlen - 1)
    return _shown(xp, x[entry, row], place < offsets[-1]), offsets


def unpack(packed: Any, cu_seqlens: Any, seqlen: int) -> Any:
    """Give every sequence its own rows again: the inverse of :func:`pack`.

    Parameters
    ----------
    packed : array, (total, ...)
        An array of NumPy, CuPy or JAX.
    cu_seqlens : array of integers, (batch + 1,)
        An array of the same library: the begin of each sequence, and the end of the last. An offset
        outside of the rows is replaced by the nearest valid one. A sequence that ends before it
        begins is empty.
    seqlen : int
        The number of rows of each sequence in the result. Rows after a sequence's end are 0, and
        rows that do not fit are left out.

    Returns
    -------
    array, (batch, seqlen, ...)
        JAX can differentiate it.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> packed = np.array([[1.0], [2.0], [3.0]])
    >>> cuflash.unpack(packed, np.array([0, 1, 3]), 2)[..., 0]
    array([[1., 0.],
           [2., 3.]])
    """
    xp = namespace_of("packed", packed)
    if packed.ndim < 1:
        raise ArgumentValueError("packed", "no axis", "(total, ...)")
    _check_integers("cu_seqlens", cu_seqlens, xp, None)
    if not cu_seqlens.size:
        raise ArgumentValueError("cu_seqlens", "shape (0,)", "one offset or more")
    rows, total = _rows("seqlen", seqlen, None), packed.shape[0]
    offsets = _clipped(xp, cu_seqlens, total)
    begins, ends = offsets[:-1, None], offsets[1:, None]
    place = begins + xp.arange(rows)
    if not total:
        return xp.zeros((*place.shape, *packed.shape[1:]), packed.dtype)
    return _shown(xp, packed[xp.clip(place, 0, total - 1)], place < ends)


def cu_seqlens_of(segment_ids: Any, sequences: int) -> Any:
    """Offsets of packed sequences from the sequence number of each row.

    Parameters
    ----------
    segment_ids : array of integers, (total,)
        An array of NumPy, CuPy or JAX; numbers of 0 or more in ascending order. Rows with a number
        of ``sequences`` or more lie after the last sequence.
    sequences : int
        The number of sequences; a sequence without rows is empty.

    Returns
    -------
    array of int32, (sequences + 1,)

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cuflash.cu_seqlens_of(np.array([0, 0, 2]), 3)
    array([0, 2, 2, 3], dtype=int32)
    """
    xp = namespace_of("segment_ids", segment_ids)
    _check_integers("segment_ids", segment_ids, xp, None)
    if xp is np and (np.diff(segment_ids) < 0).any():
        raise ArgumentValueError("segment_ids", "decreasing numbers", "sorted numbers")
    if xp is np and (segment_ids < 0).any():
        raise ArgumentValueError("segment_ids", f"{segment_ids.min()}", "0 or more")
    numbers = xp.arange(_rows("sequences", sequences, None) + 1)
    return xp.searchsorted(segment_ids, numbers, side="left").astype("int32")


def _check_integers(name: str, array: Any, xp: Any, shape: tuple[int, ...] | None) -> None:
    if namespace_of(name, array) is not xp:
        raise ArgumentTypeError(name, shown(array), f"an array of {xp.__name__}, as the other")
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(name, f"dtype {array.dtype}", "integers")
    got = tuple(array.shape)
    if got != shape if shape is not None else len(got) != 1:
        raise ArgumentValueError(name, f"shape {got}", f"{shape or 'one axis'}")


def _rows(name: str, given: Any, lengths: Any) -> int:
    """The given number of rows, or the sum of all lengths."""
    if given is None and lengths is not None:
        return int(lengths.sum())
    if isinstance(given, (bool, np.bool_)) or not isinstance(given, (int, np.integer)):
        raise ArgumentTypeError(name, shown(given), "a number of rows, known without the device")
    if given < 0:
        raise ArgumentValueError(name, str(given), "0 or more")
    return int(given)


def _clipped(xp: Any, numbers: Any, most: int) -> Any:
    """Numbers clipped to 0 and ``most``, as int32: narrow integers could not hold their sums."""
    largest = int(np.iinfo(np.dtype(str(numbers.dtype))).max)
    return xp.clip(numbers, 0, min(most, largest)).astype("int32")


def _shown(xp: Any, rows: Any, known: Any) -> Any:
    """The known rows, with zeros in place of all others, whatever those hold."""
    axes = (1,) * (rows.ndim - known.ndim)
    return xp.where(known.reshape(*known.shape, *axes), rows, xp.zeros((), rows.dtype))
