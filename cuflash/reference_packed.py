"""Packed sequences for :mod:`cuflash.reference`: a batch that gives each sequence its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentTypeError, ArgumentValueError

__all__ = ["packed_backward", "packed_forward"]

_Array = NDArray[Any]

#: The offsets, and the array whose rows each divides.
_OFFSETS = {"cu_seqlens_q": "q", "cu_seqlens_kv": "k"}
_OF_QUERIES, _OF_KEYS = ("q", "dout"), ("k", "v")
#: Arguments with numbers for all pairs, or with lengths.
_REFUSED = ("bias", "mask", "block_mask", "seqused_q", "seqused_kv")


def packed_forward(
    attention: Callable[..., tuple[_Array, _Array]], given: Mapping[str, Any]
) -> tuple[_Array, _Array]:
    """Out and lse of packed sequences.

    Parameters
    ----------
    attention
        The forward pass of a batch.
    given
        Every argument by name.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the offsets, or the argument that does not go with them.
    """
    rows, keys = _checked(given)
    out, lse = attention(**_padded(given, rows, keys))
    whole = np.full((given["q"].shape[1], len(given["q"])), -np.inf, lse.dtype)
    for b, at in enumerate(rows):
        whole[:, at] = lse[b, :, : at.stop - at.start]
    return _packed(out, rows, len(given["q"])), whole


def packed_backward(
    backward: Callable[..., tuple[_Array, ...]], given: Mapping[str, Any]
) -> tuple[_Array, ...]:
    """Gradients of packed sequences; the arguments are those of :func:`packed_forward`."""
    rows, keys = _checked(given)
    dq, dk, dv, *others = backward(**_padded(given, rows, keys))
    of_keys = (_packed(grad, keys, len(given["k"])) for grad in (dk, dv))
    return (_packed(dq, rows, len(given["q"])), *of_keys, *others)


def _checked(given: Mapping[str, Any]) -> tuple[list[slice], list[slice]]:
    """The rows of every sequence among the queries, and among the keys.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As for :func:`packed_forward`.
    """
    for name in _OFFSETS:
        at = given[name]
        if not isinstance(at, np.ndarray) or at.dtype.kind not in "iu":
            got = f"dtype {at.dtype}" if isinstance(at, np.ndarray) else type(at).__name__
            raise ArgumentTypeError(name, got, "a NumPy array of integers beside the other one")
        if at.ndim != 1 or not at.size or at.shape != given["cu_seqlens_q"].shape:
            raise ArgumentValueError(name, f"shape {at.shape}", "one axis, as many as the other")
    if given["layout"] != "shd" or any(given[x].ndim != 3 for x in (*_OFFSETS.values(), "v")):
        raise ArgumentValueError("layout", repr(given["layout"]), "'shd' and arrays of 3 axes")
    for name in _REFUSED:
        if given[name] is not None:
            raise ArgumentValueError(name, "an array", "None beside cu_seqlens_q")
    found = [_rows(given[name], len(given[of])) for name, of in _OFFSETS.items()]
    return found[0], found[1]


def _rows(offsets: _Array, total: int) -> list[slice]:
    """The rows of each sequence: each begins where the one before it ends."""
    found = []
    begin = 0
    for offset in offsets[1:]:
        end = max(begin, min(int(offset), total))
        found.append(slice(begin, end))
        begin = end
    return found


def _padded(given: Mapping[str, Any], rows: list[slice], keys: list[slice]) -> dict[str, Any]:
    """The same call as a batch, whose entries count the rows of the sequences."""
    call = {name: value for name, value in given.items() if name not in _OFFSETS}
    for names, places in ((_OF_QUERIES, rows), (_OF_KEYS, keys)):
        for name in names:
            if name in call:
                call[name] = _entries(call[name], places)
    if call.get("dlse") is not None:
        call["dlse"] = _entries(call["dlse"].T, rows).swapaxes(1, 2)
    lengths = (np.array([at.stop - at.start for at in of], np.int64) for of in (rows, keys))
    return call | dict(zip(("seqused_q", "seqused_kv"), lengths, strict=True)) | {"layout": "bshd"}


def _entries(array: _Array, places: list[slice]) -> _Array:
    """One entry for every sequence: its rows first, then zeros."""
    longest = max((at.stop - at.start for at in places), default=0)
    whole = np.zeros((len(places), longest, *array.shape[1:]), array.dtype)
    for b, at in enumerate(places):
        whole[b, : at.stop - at.start] = array[at]
    return whole


def _packed(entries: _Array, places: list[slice], total: int) -> _Array:
    """The rows of all entries at the places of their sequences, and zeros after them."""
    whole = np.zeros((total, *entries.shape[2:]), entries.dtype)
    for b, at in enumerate(places):
        whole[at] = entries[b, : at.stop - at.start]
    return whole
