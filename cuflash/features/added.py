"""The unit of terms that add a number to scores."""

from __future__ import annotations

import numpy as np

from ..errors import ArgumentValueError
from .feature import Request

__all__ = ["INVERSE_UNIT", "inverse_unit"]

#: Fields of a device block that convert a number in natural units to the unit of scores.
INVERSE_UNIT: tuple[tuple[str, type], ...] = (
    ("inverse_unit", np.float64),
    ("inverse_unit_single", np.float32),
)

#: Bounds within which ``1 / unit``, times an added number, is far from the limits of float32.
_LEAST_UNIT, _MOST_UNIT = 2.0**-60, 2.0**60


def inverse_unit(request: Request, name: str) -> tuple[tuple[str, float], ...]:
    """Values of these fields for an argument that is added to the scores of a request.

    Raises
    ------
    ArgumentValueError
        If the unit of scores, the softcap or the scale, is too large or too small.
    """
    problem = request.problem
    if problem.compute == "float32" and not _LEAST_UNIT <= problem.unit <= _MOST_UNIT:
        source = "softcap" if "softcap" in problem.features else "scale"
        raise ArgumentValueError(
            source, f"{problem.unit!r} with {name}", f"{_LEAST_UNIT:.3g} to {_MOST_UNIT:.3g}"
        )
    return tuple((field, 1 / problem.unit) for field, _ in INVERSE_UNIT)
