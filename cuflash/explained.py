"""A report of what a plan would run, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .caches.device import AppendPlan
from .caches.planned import CachePlan
from .html_table import html_table
from .pipeline import CallPlan
from .planning.append_step import RowPlan
from .planning.device import DeviceLimits, HostLimits
from .planning.kernel import KernelLaunch
from .planning.plan import Algorithm, Backend
from .planning.problem import AttentionProblem

__all__ = ["Explanation", "KernelReport", "explained"]


@dataclass(frozen=True)
class KernelReport:
    """One kernel of a plan.

    ``registers`` and ``local_bytes`` (local memory of a thread) are known
    once it is compiled.
    """

    name: str
    architecture: str
    grid: int
    threads: int
    shared_bytes: int
    registers: int | None = None
    local_bytes: int | None = None

    def __str__(self) -> str:
        compiled = ""
        if self.registers is not None:
            compiled = f", {self.registers} registers, {self.local_bytes} bytes of local memory"
        return (
            f"{self.name} ({self.architecture}): {self.grid:,} blocks of {self.threads} threads, "
            f"{self.shared_bytes:,} bytes of shared memory{compiled}"
        )


@dataclass(frozen=True)
class Explanation:
    """A report of what a call would run; ``print`` it, or show it in a notebook.

    Attributes
    ----------
    problem
        The problem of the call; with caches that of attention, or of the append if it is alone.
    backend, algorithm
        The chosen backend and algorithm. An append alone has no algorithm.
    reason
        The reason for the tile.
    not_taken
        Better algorithms and why each was not chosen.
    block_q, block_kv
        The tile: query rows and key rows. For an append alone they are 1.
    kernels
        The launched kernels, in order; none in the NumPy backend.
    workspace_bytes
        Device memory besides inputs and outputs.
    copies
        Names of arrays that are copied before or after the kernels. It is assumed
        that lse and dlse are given, and that dout has q's dtype.
    device
        The device that the tile was chosen for.
    """

    problem: AttentionProblem
    backend: Backend
    algorithm: Algorithm | None
    reason: str
    not_taken: tuple[tuple[Algorithm, str], ...]
    block_q: int
    block_kv: int
    kernels: tuple[KernelReport, ...]
    workspace_bytes: int
    copies: tuple[str, ...]
    device: str

    def __str__(self) -> str:
        return "\n".join(f"{name:<13}{value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        runs, tile = str(self.backend), self.reason
        if self.algorithm is not None:
            runs = f"{self.algorithm} on {self.backend}"
            tile = f"{self.block_q} queries x {self.block_kv} keys: {self.reason}"
        return [
            ("problem", str(self.problem)),
            ("runs", f"{runs} ({self.device})"),
            ("tile", tile),
            *(("kernel", str(kernel)) for kernel in self.kernels),
            ("workspace", f"{self.workspace_bytes:,} bytes"),
            ("copies", ", ".join(self.copies) or "none"),
            *((f"not {name}", why) for name, why in self.not_taken),
        ]


def explained(planned: CallPlan | CachePlan, compiled: bool) -> Explanation:
    """Return the report of a plan.

    Parameters
    ----------
    planned
        The plan of a call.
    compiled
        Whether to compile the kernels and to report their registers.
    """
    plan = planned.plan
    parts = planned.parts if isinstance(planned, CachePlan) else (planned,)
    return Explanation(
        problem=plan.problem,
        backend=plan.backend,
        algorithm=None if isinstance(plan, RowPlan) else plan.algorithm,
        reason=plan.reason,
        not_taken=plan.rejected,
        block_q=plan.tile.block_q,
        block_kv=plan.tile.block_kv,
        kernels=tuple(report for part in parts for report in _kernels(part, compiled)),
        workspace_bytes=planned.workspace_bytes,
        copies=planned.copied,
        device=_device_text(planned.device),
    )


def _kernels(part: CallPlan | AppendPlan, compiled: bool) -> Iterator[KernelReport]:
    """Reports of the launches of a part of a call."""
    launches = [launch for launch in part.plan.launches if launch.grid]
    if not compiled or part.device is None:
        yield from map(_kernel_report, launches)
        return
    for launch, kernel in zip(launches, part.launcher.kernels, strict=True):
        yield _kernel_report(launch, kernel.registers, kernel.local_bytes)


def _kernel_report(
    launch: KernelLaunch, registers: int | None = None, local_bytes: int | None = None
) -> KernelReport:
    config = launch.config
    return KernelReport(
        name=f"{config.generation}/{config.kernel}",
        architecture=config.architecture,
        grid=launch.grid,
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        registers=registers,
        local_bytes=local_bytes,
    )


def _device_text(device: int | None) -> str:
    if device is None:
        return f"CPU, {HostLimits.query().cache:,} bytes of cache a core"
    limits = DeviceLimits.query(device)
    return f"{limits.name}, {limits.architecture}, {limits.num_sms} multiprocessors"
