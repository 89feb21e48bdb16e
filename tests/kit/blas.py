"""BLAS's number of threads, which threadpoolctl leaves to the thread that set it first."""

from __future__ import annotations

import threadpoolctl

__all__ = ["forget_control"]


def forget_control() -> None:
    """Let this thread set the number, whichever thread did before."""
    controller = getattr(threadpoolctl, "OpenBLASController", None)
    clear = getattr(controller, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)
