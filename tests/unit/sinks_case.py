"""Problems with sinks for the tiled NumPy backend, and the checks of their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cuflash import tiled_numpy
from cuflash.planning.device import HostLimits
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from .tiled_case import DTYPES, GIVEN, LIMITS, Answer, Array, check, destinations, draw

#: Allowed errors, relative to the largest number of the array.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def arrays_of(p: AttentionProblem, seed: int = 0, spread: float = 2.0, dtype: Any = None) -> Any:
    arrays = draw(p, seed)
    sinks = spread * np.random.default_rng(seed + 99).standard_normal(p.heads_q)
    return {**arrays, "sinks": sinks.astype(dtype or DTYPES[p.compute])}


def solve(
    p: AttentionProblem,
    arrays: dict[str, Array],
    wrt: str = "qkvs",
    limits: HostLimits = LIMITS,
    **choice: Any,
) -> dict[str, Array]:
    """The results of both passes; a gradient that ``wrt`` does not name gets no destination."""
    made = destinations(p)
    made["dsinks"] = np.full(p.heads_q, 77, arrays["sinks"].dtype)
    left_out = {"dq": "q", "dk": "k", "dv": "v", "dsinks": "s"}
    made = {name: array for name, array in made.items() if left_out.get(name, wrt) in wrt}
    q, k, v, dout, dlse = (arrays[name] for name in GIVEN)
    inputs = {"q": q, "k": k, "v": v, "sinks": arrays["sinks"]}
    forward = plan(p, limits, **choice)
    tiled_numpy.forward(forward, **inputs, out=made["out"], lse=made["lse"])
    backward = plan(replace(p, operation="backward"), limits, **choice)
    tiled_numpy.backward(backward, dout=dout, dlse=dlse, **inputs, **made)
    return made


def check_all(got: dict[str, Array], wanted: Answer, tolerance: float) -> None:
    check(Answer(**got), wanted, tolerance, least=1)
    dsinks = got["dsinks"].astype(np.float64)
    size = np.abs(wanted.dsinks).max(initial=1)
    assert np.abs(dsinks - wanted.dsinks).max(initial=0) <= tolerance * size


def bits(made: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in made.items()}
