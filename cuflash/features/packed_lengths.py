"""Packed batches: the rows of several sequences follow one another in arrays of one length.

Rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q are sequence b, and its queries see only
the keys ``cu_seqlens_kv[b]`` to ``cu_seqlens_kv[b + 1]``, as in flash-attn's functions for variable
lengths (Dao 2023). The first offset is 0. Rows after the last offset belong to no sequence: their
output is 0, their log-sum-exp minus infinity, and their gradients are 0. Without ``q_offset`` the
last query of a sequence is at its last key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..arrays.spec import LayoutName, TensorSpec
from ..errors import ArgumentValueError, UnsupportedError
from ..planning.problem import MAX_SEQLEN
from .device import MAIN_KERNELS, DevicePart
from .feature import ArrayRule, Feature, Request
from .packed_queries import NAME as QUERY_OFFSETS
from .use import Use

__all__ = ["NAMES", "PACKED_LENGTHS", "sequences_of"]

#: Arrays, in the order of the queries and the keys.
NAMES = "cu_seqlens_q", "cu_seqlens_kv"

#: In a workspace every sequence begins at a multiple of this many rows: kAlignment of the device.
_ALIGNMENT = 128

_STEPS = ("statistics", "convert_dq", "sink_gradient")
_DEVICE = DevicePart(
    kernels=MAIN_KERNELS - {("steps", "bias_gradient")} | {("steps", name) for name in _STEPS},
    struct="PackedLengthsParams",
    block=np.dtype(
        [
            *((name, np.uint64) for name in ("q_begins", "kv_begins", "q_items", "kv_items")),
            ("entries", np.int32),
            ("bottom_right", np.int32),
        ],
        align=True,
    ),
    seams=(("Lengths", "PackedLengths<{before}>"),),
    header="features/packed_lengths.cuh",
)


def _use(request: Request) -> Use | None:
    given = [request.operands[name] for name in NAMES if name in request.operands]
    if not given:
        return None
    _check_offsets(request)
    problem = request.problem
    rows = max(problem.seqlen_q, problem.seqlen_kv) + problem.sequences * (_ALIGNMENT - 1)
    if rows > MAX_SEQLEN:
        got = f"{problem.sequences - 1:,} packed sequences of {problem.seqlen_q:,} queries"
        raise UnsupportedError(f"{got}: in whole tiles they are more rows than {MAX_SEQLEN:,}")
    numbers = (("entries", problem.sequences - 1), ("bottom_right", int(request.bottom_right)))
    return Use("packed_lengths", _DEVICE, numbers=numbers, operands=tuple(given), shown="packed")


def _check_offsets(request: Request) -> None:
    """Check that both arrays are given, equally long and not empty.

    Raises
    ------
    ArgumentValueError
        Naming the wrong one.
    """
    for name, other in (NAMES, NAMES[::-1]):
        if name not in request.operands:
            raise ArgumentValueError(name, f"None beside {other}", "both or neither")
    shapes = [request.operands[name].shape for name in NAMES]
    if shapes[0] != shapes[1]:
        expected = f"{shapes[0]}, as cu_seqlens_q has: an offset more than sequences"
        raise ArgumentValueError("cu_seqlens_kv", f"shape {shapes[1]}", expected)
    if 0 in shapes[0]:
        raise ArgumentValueError("cu_seqlens_q", f"shape {shapes[0]}", "one offset or more")


def sequences_of(specs: Mapping[str, TensorSpec], layout: LayoutName) -> int:
    """The number of packed sequences, with the rows after the last one as one more.

    It is 0 for a call without packed sequences.

    Raises
    ------
    ArgumentValueError
        If the arrays have a batch axis, or heads before rows.
    """
    if QUERY_OFFSETS in specs:  # packed queries over caches
        return math.prod(specs[QUERY_OFFSETS].shape)
    given = [name for name in NAMES if name in specs]
    if given and layout != "shd":
        got = f"one beside layout={layout!r}"
        raise ArgumentValueError(given[0], got, "layout='shd': rows, heads, width")
    return max((math.prod(specs[name].shape) for name in given), default=0)


PACKED_LENGTHS = Feature(
    "packed_lengths",
    _use,
    _DEVICE,
    arrays={name: ArrayRule((), ("int32",), most_axes=1) for name in NAMES},
)
