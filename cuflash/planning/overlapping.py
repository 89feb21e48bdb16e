"""Kernels of a pass that begin before the kernel before them has ended.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". Such a kernel may
be launched as soon as all blocks of the one before have ended. It waits itself until what they have
written can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .kernel import KernelLaunch

__all__ = ["overlapping"]


def overlapping(launches: Sequence[KernelLaunch]) -> tuple[KernelLaunch, ...]:
    """Let each kernel but the first begin early, and wait before it reads or writes anything.

    The first one begins as usual, when all earlier work of the stream has ended. Each of the others
    waits for the one before it, and so for all of them.
    """
    first, *others = launches
    return first, *(
        replace(one, config=replace(one.config, waits=True), overlaps=True) for one in others
    )
