"""Arrays of dual numbers: values and their derivatives by the scores, as NumPy arrays.

Forward mode of automatic differentiation (Griewank and Walther, "Evaluating Derivatives", 2008,
chapter 3) for the ufuncs that a score function may use. It mirrors ``cuda_src/tile/dual.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["DualArray"]

#: A function of a value x and its result y that returns the derivative.
_Derivative = Callable[[Any, Any], Any]

_OF_ONE: dict[np.ufunc, _Derivative] = {
    np.negative: lambda x, y: -1.0,
    np.positive: lambda x, y: 1.0,
    np.exp: lambda x, y: y,
    np.exp2: lambda x, y: math.log(2) * y,
    np.log: lambda x, y: 1 / x,
    np.log2: lambda x, y: 1 / (math.log(2) * x),
    np.tanh: lambda x, y: 1 / np.cosh(x) ** 2,
    np.sqrt: lambda x, y: 0.5 / y,
    np.square: lambda x, y: 2 * x,
    np.reciprocal: lambda x, y: -y * y,
    np.sin: lambda x, y: np.cos(x),
    np.cos: lambda x, y: -np.sin(x),
    np.absolute: lambda x, y: np.where(x < 0, -1.0, 1.0),
    np.fabs: lambda x, y: np.where(x < 0, -1.0, 1.0),
    np.sign: lambda x, y: 0.0,
}

#: A function of two values and their result that returns both derivatives.
_Derivatives = Callable[[Any, Any, Any], tuple[Any, Any]]

_OF_TWO: dict[np.ufunc, _Derivatives] = {
    np.add: lambda a, b, y: (1.0, 1.0),
    np.subtract: lambda a, b, y: (1.0, -1.0),
    np.multiply: lambda a, b, y: (b, a),
    np.true_divide: lambda a, b, y: (1 / b, -y / b),
    np.power: lambda a, b, y: (b * np.power(a, b - 1.0), np.log(a) * y),
    np.minimum: lambda a, b, y: (~(b < a) * 1.0, (b < a) * 1.0),
    np.maximum: lambda a, b, y: (~(a < b) * 1.0, (a < b) * 1.0),
    np.fmin: lambda a, b, y: (~(b < a) * 1.0, (b < a) * 1.0),
    np.fmax: lambda a, b, y: (~(a < b) * 1.0, (a < b) * 1.0),
}

_COMPARISONS = frozenset(
    getattr(np, name)
    for name in (
        *("less", "greater", "less_equal", "greater_equal", "equal", "not_equal"),
        *("isfinite", "isnan", "isinf"),
    )
)


class DualArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Numbers that are functions of the scores, and their derivatives.

    Attributes
    ----------
    value, slope
        Arrays that broadcast against each other.
    """

    __slots__ = ("slope", "value")

    def __init__(self, value: Any, slope: Any) -> None:
        self.value, self.slope = value, slope

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return np.asarray(self.value).dtype

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply a ufunc to the values, and the chain rule to the slopes."""
        into = kwargs.pop("out", (None,))[0]
        if method != "__call__" or kwargs or not isinstance(into, (DualArray, type(None))):
            return NotImplemented
        result = self._of(ufunc, inputs)
        if into is None or not isinstance(result, DualArray):
            return result
        into.value, into.slope = result.value, result.slope
        return into

    def copy(self) -> DualArray:
        """A copy of these numbers."""
        return DualArray(np.copy(self.value), np.copy(self.slope))

    @staticmethod
    def _of(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> Any:
        values = [x.value if isinstance(x, DualArray) else x for x in inputs]
        result = ufunc(*values)
        if ufunc in _COMPARISONS:
            return result
        if ufunc in _OF_ONE:
            return DualArray(result, _OF_ONE[ufunc](values[0], result) * inputs[0].slope)
        if ufunc not in _OF_TWO:
            return NotImplemented
        a, b = values
        by_each = _OF_TWO[ufunc](a, b, result)
        parts = (
            derivative * x.slope
            for derivative, x in zip(by_each, inputs, strict=True)
            if isinstance(x, DualArray)
        )
        return DualArray(result, sum(parts))

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``numpy.where`` with one condition for values and slopes, and ``numpy.clip``."""
        del types
        if function is np.clip and not kwargs and len(args) == 3:
            x, least, most = args
            return np.minimum(np.maximum(x, least), most)
        if function is not np.where or kwargs or len(args) != 3:
            return NotImplemented
        condition, a, b = args
        value = np.where(condition, *(x.value if isinstance(x, DualArray) else x for x in (a, b)))
        slope = np.where(condition, *(x.slope if isinstance(x, DualArray) else 0.0 for x in (a, b)))
        return DualArray(value, slope)
