"""The machine that a bench runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["cpu_name", "host_columns"]


def cpu_name() -> str:
    """The processor's name in the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration, IndexError):
        name = platform.processor() or platform.machine()
    return name


def host_columns() -> dict[str, object]:
    """Columns about the machine in CPU rows: cores, and the kernels that NumPy's BLAS chose."""
    import numpy as np
    from threadpoolctl import ThreadpoolController

    np.ones((2, 2)) @ np.ones((2, 2))
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    kernels = sorted(f"{one.internal_api} {getattr(one, 'architecture', '')}" for one in found)
    variables = (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "OPENBLAS_CORETYPE",
        "CUFLASH_CPU_CACHE",
    )
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "blas": ", ".join(kernels),
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }
