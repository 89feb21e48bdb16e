"""The weights that a call drops."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays.adopt import adopt
from .errors import ArgumentTypeError, ArgumentValueError, shown
from .features.draws import draws, limit_of, stream_of
from .features.dropout import SEED_LENGTHS, check_both, check_probability, check_seed, words_of
from .options import seed_of
from .planning.problem import MAX_HEADS, MAX_SEQLEN

__all__ = ["dropout_mask"]


def dropout_mask(
    shape: Sequence[int], *, dropout_p: float, dropout_seed: Any = None
) -> npt.NDArray[np.bool_]:
    """The pairs of a query and a key whose weights a call with this seed keeps.

    It is meant for tests and for inspection. The result has seqlen_q * seqlen_kv elements, and
    making it takes several times as many bytes; no call of :func:`attention` ever holds such an
    array.

    Parameters
    ----------
    shape : (int, int, int, int)
        (batch, heads_q, seqlen_q, seqlen_kv).
    dropout_p, dropout_seed
        As for :func:`attention`; with a dropout_p above 0 a seed is needed.

    Returns
    -------
    ndarray of bool
        An array of that shape; True where a weight is kept, also for pairs that a mask hides.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, its value and what is needed.

    Examples
    --------
    >>> import cuflash
    >>> keep = cuflash.dropout_mask((1, 2, 64, 64), dropout_p=0.5, dropout_seed=3)
    >>> keep.shape, round(float(keep.mean()), 1)
    ((1, 2, 64, 64), 0.5)
    """
    batch, heads, rows, keys = _check_shape(shape)
    p = check_probability("dropout_p", dropout_p)
    seed, words = seed_of(dropout_seed)
    check_both(p, dropout_seed is not None)
    if not p:
        return np.ones((batch, heads, rows, keys), bool)
    if seed is None:
        words = _words("dropout_seed", words)
    else:
        words = words_of(check_seed("dropout_seed", seed))
    every = np.arange(batch * heads).reshape(batch, heads)
    kept: npt.NDArray[np.bool_] = draws(
        stream_of(words), every, slice(0, rows), slice(0, keys)
    ) < limit_of(p)
    return kept


def _check_shape(shape: Any) -> tuple[int, int, int, int]:
    expected = "(batch, heads_q, seqlen_q, seqlen_kv), four integers"
    if not isinstance(shape, (tuple, list)) or not all(
        isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in shape
    ):
        raise ArgumentTypeError("shape", shown(shape), expected)
    if len(shape) != 4:
        raise ArgumentValueError("shape", shown(shape), expected)
    batch, heads, rows, keys = map(int, shape)
    if min(batch, heads, rows, keys) < 0 or batch * heads > MAX_HEADS:
        raise ArgumentValueError("shape", shown(shape), f"{expected} from 0 on")
    if max(rows, keys) > MAX_SEQLEN:
        raise ArgumentValueError("shape", shown(shape), f"sequences of at most {MAX_SEQLEN}")
    return batch, heads, rows, keys


def _words(name: str, array: Any) -> list[int]:
    """The words of a seed that is an array, in host or device memory."""
    adopted = adopt(name, array)
    spec = adopted.spec
    if spec.dtype != "uint32":
        raise ArgumentTypeError(name, f"dtype {spec.dtype}", "uint32")
    if spec.shape not in [(length,) for length in SEED_LENGTHS]:
        fitting = " or ".join(f"({length},)" for length in SEED_LENGTHS)
        raise ArgumentValueError(name, f"shape {spec.shape}", fitting)
    native = adopted.native
    words = native if isinstance(native, np.ndarray) else native.get()
    return [int(word) for word in words]
