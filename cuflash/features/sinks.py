"""Attention sinks: a learned logit of every query head that takes part in the softmax.

For every row of head h, ``lse = log(sum_j exp(z_j) + exp(sinks[h]))`` and ``out = sum_j exp(z_j -
lse) v_j``: the sink has weight and no value.
"""

from __future__ import annotations

import numpy as np

from .device import DevicePart
from .feature import ArrayRule, Feature, Request
from .use import Use

__all__ = ["SINKS"]


#: Kernels that change; in a backward pass, those that need the dead rows.
_KERNELS = frozenset(
    (
        *(("fa1", "forward"), ("fa2", "forward"), ("fa3", "forward")),
        *(("fa1", "backward"), ("steps", "statistics"), ("steps", "sink_gradient")),
        *(("steps", "bias_gradient"), ("steps", "merge")),
    )
)
_DEVICE = DevicePart(
    kernels=_KERNELS,
    struct="SinksParams",
    block=np.dtype([("sinks", np.uint64)], align=True),
    seams=(("Rows", "Sinks<{sinks_dtype}>"),),
    header="features/sinks.cuh",
)


def _use(request: Request) -> Use | None:
    operand = request.operands.get("sinks")
    if operand is None:
        return None
    return Use("sinks", _DEVICE, compiled=(("sinks_dtype", operand.dtype),), operands=(operand,))


SINKS = Feature(
    "sinks",
    _use,
    _DEVICE,
    arrays={"sinks": ArrayRule(("heads_q",), ("storage", "compute"), differentiable=True)},
)
