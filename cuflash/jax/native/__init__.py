"""Calls from compiled computations to the kernels, without Python between them.

``registration`` makes XLA know the handler; ``handler`` is what XLA calls,
compiled by Numba when it is first needed, with ``launching`` and ``said`` its
parts; ``table`` writes what it launches, in the words of ``layout``;
``registry`` is where it finds tables. ``frame`` says where XLA's structures
hold what, ``machine`` reads and writes memory by its address, ``driver`` asks
CUDA for addresses.
"""

from __future__ import annotations

from .registration import TARGET, is_ready, tables
from .stamp import number_of
from .table import DevicePart, LaunchTable

__all__ = ["TARGET", "DevicePart", "LaunchTable", "is_ready", "number_of", "tables"]
