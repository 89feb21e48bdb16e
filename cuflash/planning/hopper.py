"""The compiler's target for kernels of Hopper."""

from __future__ import annotations

from dataclasses import replace

from .kernel import KernelLaunch

__all__ = ["ARCHITECTURE", "for_hopper"]

#: The architecture with all instructions of Hopper.
ARCHITECTURE = "sm_90a"


def for_hopper(launch: KernelLaunch) -> KernelLaunch:
    """Return the launch with the compile options of the main kernel.

    The options do not change the machine code of other kernels. But CuPy asks the compiler for its
    version once for each set of options, and the first call of a process waits for that.
    """
    return replace(launch, config=replace(launch.config, architecture=ARCHITECTURE))
