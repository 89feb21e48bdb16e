"""The number of cores that this process may use."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_cores"]

#: The variables that set the threads of BLAS libraries. OpenMP allows a list, whose first number
#: is that of the outer level.
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores(root: Path = Path("/")) -> int:
    """Return the least of affinity, cgroup quota and the user's thread variables; 1 or more.

    The affinity and the variables are read at every call, the quota once.

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are mounted.
    """
    return max(1, min([_in_affinity(), *_in_quota(root), *_in_environment()]))


def _in_affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS and Windows
        return os.cpu_count() or 1


def _in_environment() -> Iterator[int]:
    for name in _VARIABLES:
        first = os.environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            yield int(first)


@functools.cache
def _in_quota(root: Path) -> tuple[int, ...]:
    """Return the whole cores of every quota on this process: of its group and the parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return ()
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mounted, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        for folder in _with_parents(mounted, path):
            try:
                share = read(folder)
            except (OSError, ValueError, ZeroDivisionError):
                continue
            if share is not None:
                limits.append(max(1, int(share)))
    return tuple(limits)


def _with_parents(mounted: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a group and of its parents, up to the mount.

    Inside a container the mount is often the group itself, while the path is the
    host's: folders that do not exist have no limit to read.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield mounted.joinpath(*parts[:count])


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    period = int((folder / "cpu.cfs_period_us").read_text())
    return None if quota < 0 else quota / period
