"""Calls from compiled computations to the kernels, without Python between them.

``registration`` registers the handler with XLA. ``handler`` is the function that XLA
calls, compiled by Numba when it is first needed; it uses ``launching`` and ``said``.
``table`` writes launch tables, whose fields are in ``layout``, and the handler finds
them in ``registry``. ``frame`` has the offsets of fields in XLA's structures,
``machine`` reads and writes memory by its address, ``driver`` asks CUDA for addresses.
"""

from __future__ import annotations

from .registration import TARGET, is_ready, tables
from .stamp import number_of
from .table import DevicePart, LaunchTable

__all__ = ["TARGET", "DevicePart", "LaunchTable", "is_ready", "number_of", "tables"]
