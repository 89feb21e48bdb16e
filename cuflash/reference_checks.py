"""The checks of the reference, and the orders of axes that it takes.

The reference has its own checks, so that it shares no code with the library.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "check_arrays",
    "check_block_mask",
    "check_dropout",
    "check_options",
    "checked_function",
    "find_layout",
    "from_heads_first",
    "rows_from_heads_first",
    "to_heads_first",
]

_Array = NDArray[Any]

_LAYOUTS = ("bshd", "bhsd", "shd", "hsd", "sd")
#: The axes of every array: batch, row, head, dimension.
_AXES = {
    "q": ("batch", "seqlen_q", "heads_q", "head_dim"),
    "k": ("batch", "seqlen_kv", "heads_kv", "head_dim"),
    "v": ("batch", "seqlen_kv", "heads_kv", "head_dim_v"),
    "dout": ("batch", "seqlen_q", "heads_q", "head_dim_v"),
}
_LENGTHS = ("seqused_q", "seqused_kv")


def find_layout(q: Any, layout: Any) -> str:
    """The order of the axes: the given one, else the default for this number of axes.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming q or layout.
    """
    _check_array("q", q)
    found = {4: "bshd", 2: "sd"}.get(q.ndim) if layout is None else layout
    if not isinstance(found, str) or found not in _LAYOUTS or len(found) != q.ndim:
        raise ArgumentValueError(
            "layout",
            f"{layout!r} for q of {q.ndim} axes",
            "'bshd' or 'bhsd' for 4 axes, 'shd' or 'hsd' for 3, 'sd' for 2",
        )
    return found


def check_arrays(arrays: Mapping[str, Any], layout: str, **more: Any) -> None:
    """Check the shapes of q, k, v and dout against each other, and other arrays against them.

    Parameters
    ----------
    arrays : mapping
        q, k, v and possibly dout.
    layout : str
        Order of their axes.
    **more : ndarray or None
        dlse, alibi_slopes, bias, mask, sinks, seqused_q and seqused_kv.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the first array that does not fit the earlier ones.
    """
    known: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        _check_array(name, array)
        if array.ndim != len(layout):
            raise ArgumentValueError(
                name, f"{array.ndim} axes", f"{len(layout)}, as layout={layout!r} has"
            )
        for letter, axis in zip("bshd", _AXES[name], strict=True):
            if letter not in layout:
                continue
            size = array.shape[layout.index(letter)]
            expected, other = known.setdefault(axis, (size, name))
            if size != expected:
                raise ArgumentValueError(
                    name, f"{axis} {size}, shape {array.shape}", f"{expected}, as {other} has"
                )
    sizes = {axis: size for axis, (size, _) in known.items()}
    _check_sizes(sizes)
    rows = zip("bhs", ("batch", "heads_q", "seqlen_q"), strict=True)
    batch, heads_q = sizes.get("batch", 1), sizes.get("heads_q", 1)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "dlse": [tuple(sizes[axis] for letter, axis in rows if letter in layout)],
        "alibi_slopes": [(heads_q,), (batch, heads_q)],
        "sinks": [(heads_q,)],
        **{name: [(batch,)] for name in _LENGTHS},
    }
    for name, array in more.items():
        if array is None:
            continue
        _check_array(name, array, {"mask": "b", **dict.fromkeys(_LENGTHS, "iu")}.get(name, ""))
        if name in ("bias", "mask"):
            _check_broadcast(name, array, (batch, heads_q, sizes["seqlen_q"], sizes["seqlen_kv"]))
        elif array.shape not in shapes[name]:
            fitting = " or ".join(map(str, shapes[name]))
            raise ArgumentValueError(name, f"shape {array.shape}", fitting)


def _check_array(name: str, array: Any, kinds: str = "") -> None:
    """Check that it is an array of numbers, of one of the kinds "b", "i" and "u" if given."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise ArgumentTypeError(name, kind, "a NumPy array, without a mask")
    if not np.can_cast(array.dtype, np.longdouble, "same_kind"):
        raise ArgumentTypeError(name, f"dtype {array.dtype}", "real numbers")
    if kinds and array.dtype.kind not in kinds:
        raise ArgumentTypeError(
            name, f"dtype {array.dtype}", "bool" if kinds == "b" else "integers"
        )


def _check_broadcast(name: str, array: _Array, sizes: tuple[int, ...]) -> None:
    own = sizes[len(sizes) - array.ndim :]
    if array.ndim > len(sizes) or any(
        n not in (1, of) for n, of in zip(array.shape, own, strict=False)
    ):
        raise ArgumentValueError(name, f"shape {array.shape}", f"{sizes}, or 1 in place of any")


def _check_sizes(sizes: Mapping[str, int]) -> None:
    heads_q, heads_kv = sizes.get("heads_q", 1), sizes.get("heads_kv", 1)
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ArgumentValueError(
            "k", f"heads_kv={heads_kv} beside heads_q={heads_q}", "a number that divides heads_q"
        )
    if not sizes["head_dim"]:
        raise ArgumentValueError("q", "head_dim 0", "at least 1")


def check_options(
    causal: Any, window_size: Any, softcap: Any, scale: Any, q_offset: Any, dtype: Any
) -> None:
    """Check every other argument separately.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.
    """
    if not isinstance(causal, (bool, np.bool_)):
        raise ArgumentTypeError("causal", repr(causal), "True or False")
    if window_size is not None and (
        not isinstance(window_size, (tuple, list)) or len(window_size) != 2
    ):
        raise ArgumentTypeError("window_size", repr(window_size), "(left, right), or None")
    for side in window_size or ():
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise ArgumentTypeError("window_size", repr(window_size), "two integers, each or None")
    if softcap is not None:
        expected = "a number, finite and not negative, or None"
        _check_number("softcap", softcap, numbers.Real, expected)
        if not 0 <= softcap < math.inf or softcap > np.finfo(np.float64).max:
            raise ArgumentValueError("softcap", repr(softcap), expected)
    if scale is not None:
        _check_number("scale", scale, numbers.Real, "a number, finite and positive, or None")
        if not 0 < scale < math.inf or scale > np.finfo(np.float64).max:
            raise ArgumentValueError("scale", repr(scale), "a number, finite and positive")
    if q_offset is not None:
        _check_number("q_offset", q_offset, numbers.Integral, "an integer or None")
    if dtype is np.floating or not (isinstance(dtype, type) and issubclass(dtype, np.floating)):
        raise ArgumentTypeError("dtype", repr(dtype), "numpy.float64 or numpy.longdouble")
    if softcap and not 0 < dtype(softcap) < math.inf:
        raise ArgumentValueError("softcap", repr(softcap), f"a number that {dtype.__name__} holds")


def checked_function(score_mod: Any, softcap: Any) -> Any:
    """The NumPy function of a ``ScoreMod`` and its arguments; None without one.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it has no such function, or there is a soft cap too.
    """
    if score_mod is None:
        return None
    function = getattr(score_mod, "numpy", None)
    if function is None:
        raise ArgumentTypeError("score_mod", repr(score_mod), "a ScoreMod with numpy=")
    if softcap:
        raise ArgumentValueError("score_mod", "one beside softcap", "one of the two")
    return function, score_mod.arguments


def check_dropout(p: Any, seed: Any) -> None:
    """Check the dropped share and its seed.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.
    """
    if p is not None:
        _check_number("dropout_p", p, numbers.Real, "a number, or None")
        if not 0 <= p < 1 or round((1 - p) * 2**14) == 0:
            raise ArgumentValueError("dropout_p", repr(p), "0 to below 1, of which some is kept")
    if (seed is not None) != bool(p):
        raise ArgumentValueError("dropout_seed", repr(seed), "one where dropout_p is above 0")
    if isinstance(seed, np.ndarray):
        if seed.dtype != np.uint32 or seed.shape not in ((2,), (4,)):
            got = f"{seed.dtype} of shape {seed.shape}"
            raise ArgumentTypeError("dropout_seed", got, "uint32 of shape (2,) or (4,)")
    elif seed is not None:
        _check_number("dropout_seed", seed, numbers.Integral, "an integer, or an array")
        if not 0 <= seed < 2**64:
            raise ArgumentValueError("dropout_seed", repr(seed), "0 to below 2^64")


def check_block_mask(mask: Any, q: _Array, k: _Array, layout: str) -> None:
    """Check a block mask against q and k, which are checked already.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming ``block_mask``.
    """
    if mask is None:
        return
    name, block = "block_mask", getattr(mask, "block", None)
    if block is None:
        raise ArgumentTypeError(name, repr(mask), "a BlockMask, or None")
    blocks: _Array = mask.blocks
    _check_array(name, blocks)
    if blocks.dtype not in (bool, np.uint8):
        raise ArgumentTypeError(name, f"dtype {blocks.dtype}", "bool or uint8")
    rows, keys = (to_heads_first(x, layout).shape for x in (q, k))
    sizes = (*rows[:2], -(-rows[2] // block[0]), -(-keys[2] // block[1]))
    _check_broadcast(name, blocks, sizes)


def _check_number(name: str, value: Any, kind: type, expected: str) -> None:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, kind):
        raise ArgumentTypeError(name, repr(value), expected)


def to_heads_first(x: _Array, layout: str) -> _Array:
    """A (batch, head, row, dim) view."""
    view = np.asarray(x).transpose([layout.index(axis) for axis in "bhsd" if axis in layout])
    return np.expand_dims(view, [i for i, axis in enumerate("bhsd") if axis not in layout])


def from_heads_first(x: _Array, layout: str) -> _Array:
    """The array in the layout again, C-contiguous."""
    absent = tuple(i for i, axis in enumerate("bhsd") if axis not in layout)
    present = [axis for axis in "bhsd" if axis in layout]
    return np.ascontiguousarray(x.squeeze(absent).transpose([present.index(a) for a in layout]))


def rows_from_heads_first(x: _Array, layout: str) -> _Array:
    """Numbers of rows, (batch, head, row), in the layout again."""
    return x.squeeze(tuple(i for i, axis in enumerate("bhs") if axis not in layout))
