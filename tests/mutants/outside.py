"""Bugs chosen by a reviewer who had read the code and none of the tests.

``outside.json`` says which test, run without a GPU, fails with each of them.
To add a bug, plant it in a copy of the tree (``tree.plant``), run the tests there that could see
it, and write down which failed. If none fails, a test is missing.
"""

from __future__ import annotations

from pathlib import Path

from .outside_cpu import JAX, NUMPY
from .outside_device import FA3, SHARED
from .outside_host import HOST, PLANNING

__all__ = ["OUTSIDE", "OUTSIDE_RECORD"]

OUTSIDE = (*HOST, *PLANNING, *SHARED, *FA3, *NUMPY, *JAX)
#: "killed" holds the test that fails with a bug, "needs_gpu" why none can fail without a GPU.
OUTSIDE_RECORD = Path(__file__).with_name("outside.json")
