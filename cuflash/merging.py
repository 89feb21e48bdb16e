"""Attention over parts of the keys merged into attention over all of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays.meaning import kind_of
from .arrays.spec import LAYOUTS, Layout, LayoutName
from .errors import ArgumentTypeError, ArgumentValueError, shown
from .namespace import namespace_of
from .options import names_of
from .planning.problem import DTYPES

__all__ = ["merge"]


def merge(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: LayoutName = "bshd"
) -> tuple[Any, Any]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    Parameters
    ----------
    outs : sequence of arrays, (batch, seqlen_q, heads_q, head_dim_v)
        The outputs of ``attention`` for each set of keys, in ``layout``. Arrays of
        NumPy, CuPy or JAX, all of one shape and dtype: float16, bfloat16, float32
        or float64.
    lses : sequence of arrays, (batch, heads_q, seqlen_q)
        The log-sum-exps that ``attention`` returns with ``return_lse=True``, without
        the axes that the layout lacks: (heads_q, total) for "shd". float32, or
        float64 for outs of float64.
    layout : {"bshd", "bhsd", "shd", "hsd", "sd"}
        Order of the axes of ``outs``.

    Returns
    -------
    out : array, as one of ``outs``
        ``sum_i exp(lse_i - lse) out_i``, in the order of the parts. Computed in
        the dtype of ``lses``, and rounded once to that of ``outs``.
    lse : array, as one of ``lses``
        ``log sum_i exp(lse_i)``.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument, ``outs[1]`` for instance, what it got and what is
        needed.

    Notes
    -----
    If the ``lse`` of a part is minus infinity in a row, the row saw no key in that
    part, and its ``out`` may hold anything. If this holds for all parts, out is 0 and
    lse minus infinity. Infinity and NaN of other parts are passed on. JAX
    differentiates both results, by both arguments.

    A key in several parts counts several times, and so does a sink: give sinks to
    one part. Weights are ``exp(lse_i - m) / sum_j exp(lse_j - m)`` with m the largest
    ``lse``, so they are as accurate for large numbers. With outs of float32
    (``out_dtype="float32"``), parts of a 16-bit call are not rounded before they
    are summed.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> outs = np.array([[[1.0]], [[3.0]]])  # layout "sd"
    >>> lses = np.log([[1.0], [3.0]])
    >>> out, lse = cuflash.merge(list(outs), list(lses), layout="sd")
    >>> out.round(6), np.exp(lse).round(6)
    (array([[2.5]]), array([4.]))
    """
    order = _checked_layout(layout)
    xp = _checked(outs, lses, order)
    with np.errstate(all="ignore"):
        lse, weights = _weights(xp, lses)
        terms = (_term(xp, *part, order) for part in zip(outs, lses, weights, strict=True))
        total = functools.reduce(operator.add, terms)
    return total.astype(outs[0].dtype), lse


def _weights(xp: Any, lses: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the log-sum-exp of all parts, and the weight of each part, 0 for a dead one.

    Numbers that are not finite are replaced before they are used. A ``where`` after
    their use would give NaN in JAX's gradient.
    """
    largest = functools.reduce(xp.maximum, lses)
    zero = xp.zeros((), lses[0].dtype)
    origin = xp.where(xp.isfinite(largest), largest, zero)
    parts = [xp.exp(lse - origin) for lse in lses]
    live = largest != -np.inf
    total = xp.where(live, functools.reduce(operator.add, parts), xp.ones_like(zero))
    whole = xp.where(live, xp.log(total) + origin, xp.full_like(zero, -np.inf))
    return whole, [part / total for part in parts]


def _term(xp: Any, out: Any, lse: Any, weight: Any, layout: Layout) -> Any:
    """Return the term of a part in the sum, in the dtype of the weights."""
    live = _beside_columns(lse != -np.inf, layout)
    counted = xp.where(live, out.astype(weight.dtype), xp.zeros((), weight.dtype))
    return _beside_columns(weight, layout) * counted


def _beside_columns(rows: Any, layout: Layout) -> Any:
    """Return numbers of rows, (batch, heads, rows) without absent axes, in a layout's order."""
    present = [axis for axis in "bhs" if axis in layout.name]
    return rows.transpose([present.index(axis) for axis in layout.name if axis != "d"])[..., None]


def _checked_layout(layout: Any) -> Layout:
    if not isinstance(layout, str):
        raise ArgumentTypeError("layout", shown(layout), f"one of {names_of(LAYOUTS)}")
    if layout not in LAYOUTS:
        raise ArgumentValueError("layout", shown(layout), f"one of {names_of(LAYOUTS)}")
    return LAYOUTS[layout]


def _checked(outs: Any, lses: Any, layout: Layout) -> Any:
    """Return the namespace of the arrays, after checking that they are of one kind and fit.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As for :func:`merge`.
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
            raise ArgumentTypeError(name, kind_of(given), "a sequence of arrays, as a list")
    if not outs:
        raise ArgumentValueError("outs", "no arrays", "one or more")
    if len(lses) != len(outs):
        raise ArgumentValueError("lses", f"{len(lses)} arrays", f"{len(outs)}, as many as outs")
    xp, out = namespace_of("outs[0]", outs[0]), outs[0]
    if str(out.dtype) not in DTYPES:
        raise ArgumentTypeError("outs[0]", f"dtype {out.dtype}", f"one of {names_of(DTYPES)}")
    if len(out.shape) != len(layout.name):
        expected = f"{len(layout.name)} axes, as layout {layout.name!r} has"
        raise ArgumentValueError("outs[0]", f"shape {tuple(out.shape)}", expected)
    batch, seqlen, heads, _ = layout.canonical(out.shape, 1)
    rows = layout.rows_shape(batch, heads, seqlen)
    compute = DTYPES[str(out.dtype)].compute
    for i, lse in enumerate(lses):
        _check_like(f"outs[{i}]", outs[i], xp, str(out.dtype), tuple(out.shape), "as outs[0]")
        _check_like(f"lses[{i}]", lse, xp, compute, rows, f"to go with outs of {out.dtype}")
    return xp


def _check_like(
    name: str, array: Any, xp: Any, dtype: str, shape: tuple[int, ...], why: str
) -> None:
    if namespace_of(name, array) is not xp:
        raise ArgumentTypeError(name, kind_of(array), f"an array of {xp.__name__}, as outs[0]")
    if str(array.dtype) != dtype:
        raise ArgumentTypeError(name, f"dtype {array.dtype}", f"{dtype}, {why}")
    if tuple(array.shape) != shape:
        raise ArgumentValueError(name, f"shape {tuple(array.shape)}", f"{shape}, {why}")
