"""Bugs chosen by a reviewer who had read the code and none of the tests.

``outside.json`` says which test, run without a GPU, fails with each of them.
A new bug is planted in a copy of the tree (``tree.plant``), the tests that
could see it are run there, and what failed is written down; where nothing
does, a test is missing.
"""

from __future__ import annotations

from pathlib import Path

from .outside_cpu import JAX, NUMPY
from .outside_device import FA3, SHARED
from .outside_host import HOST, PLANNING

__all__ = ["OUTSIDE", "OUTSIDE_RECORD"]

OUTSIDE = (*HOST, *PLANNING, *SHARED, *FA3, *NUMPY, *JAX)
#: Under "killed" the test that fails with a bug; under "needs_gpu" why none can without one.
OUTSIDE_RECORD = Path(__file__).with_name("outside.json")
