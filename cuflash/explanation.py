"""Explains what a call would run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .arrays.spec import LayoutName
from .block_mask import BlockMask, split_block_mask
from .given import add_given
from .html_table import html_table
from .options import (
    AlgorithmChoice,
    BackendChoice,
    Differentiable,
    WindowSize,
    check_flag,
    check_options,
    seed_of,
)
from .pipeline import CallPlan, choose_device, plan_call
from .planning.device import DeviceLimits, HostLimits
from .planning.kernel import KernelLaunch
from .planning.plan import Algorithm, Backend
from .planning.problem import AttentionProblem, Operation
from .score_mod import ScoreMod, with_arrays
from .signature import signature_of
from .tensors import QKV

__all__ = ["Explanation", "KernelReport", "explain"]


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
        The problem of the call.
    backend, algorithm
        The chosen backend and algorithm.
    reason
        The reason for the tile.
    not_taken
        Better algorithms and why each was not chosen.
    block_q, block_kv
        The tile: query rows and key rows.
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
    algorithm: Algorithm
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
        return [
            ("problem", str(self.problem)),
            ("runs", f"{self.algorithm} on {self.backend} ({self.device})"),
            ("tile", f"{self.block_q} queries x {self.block_kv} keys: {self.reason}"),
            *(("kernel", str(kernel)) for kernel in self.kernels),
            ("workspace", f"{self.workspace_bytes:,} bytes"),
            ("copies", ", ".join(self.copies) or "none"),
            *((f"not {name}", why) for name, why in self.not_taken),
        ]


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    operation: Operation = "forward",
    dtype: Any = None,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    block_mask: BlockMask | None = None,
    sinks: Any = None,
    dropout_p: float | None = None,
    dropout_seed: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    scale: float | None = None,
    q_offset: int | None = None,
    layout: LayoutName | None = None,
    out_dtype: Any = None,
    wrt: Sequence[Differentiable] = QKV,
    deterministic: bool = False,
    backend: BackendChoice = "auto",
    algorithm: AlgorithmChoice = "auto",
    blocks: tuple[int, int] | None = None,
    kv_chunk: int | None = None,
    compile: bool = False,  # noqa: A002  (what it says)
) -> Explanation:
    """Say what a call would run, without running it.

    Parameters
    ----------
    q, k, v : array or tuple of int
        The arrays of the call, or their shapes. Shapes need ``dtype``, and stand for
        contiguous arrays in the memory where the call would compute.
    operation : {"forward", "backward"}
        The pass.
    compile : bool
        Also compile, and report registers.
    alibi_slopes, bias, mask, block_mask, sinks, dropout_seed : optional
        As for :func:`prepare`.
    seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv : optional
        As for :func:`prepare`.
    dtype, causal, window_size, softcap, score_mod, dropout_p, scale, q_offset, layout, out_dtype
        As for :func:`attention`, :func:`attention_backward` and :func:`prepare`.
    wrt, deterministic, backend, algorithm, blocks, kv_chunk
        As for :func:`attention`, :func:`attention_backward` and :func:`prepare`.

    Returns
    -------
    Explanation
        A frozen record that prints itself.

    Raises
    ------
    CuflashError
        What the call itself would raise.

    Examples
    --------
    >>> import cuflash
    >>> shape = (1, 128, 8, 64)
    >>> said = cuflash.explain(shape, shape, shape, dtype="float32", backend="numpy")
    >>> said.algorithm, said.backend, said.workspace_bytes
    ('fa2', 'numpy', 0)
    """
    block, shown = split_block_mask(block_mask)
    seed, seeds = seed_of(dropout_seed)
    score, of_score = with_arrays(score_mod)
    options = check_options(
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        score_mod=score,
        block_mask=block,
        dropout_p=dropout_p,
        dropout_seed=seed,
        scale=scale,
        q_offset=q_offset,
        layout=layout,
        out_dtype=out_dtype,
        wrt=wrt,
        deterministic=deterministic,
        backend=backend,
        algorithm=algorithm,
        blocks=blocks,
        kv_chunk=kv_chunk,
    )
    compiled = check_flag("compile", compile)
    arrays = {"q": q, "k": k, "v": v}
    lengths = seqused_q, seqused_kv, cu_seqlens_q, cu_seqlens_kv
    add_given(arrays, (alibi_slopes, bias, mask, shown, sinks, seeds, *lengths), of_score)
    given = signature_of(operation, arrays, dtype, options, choose_device(None, options))
    device = choose_device(given[0][1].device, options)
    return _report(plan_call(operation, given, options, device), compiled)


def _report(planned: CallPlan, compiled: bool) -> Explanation:
    plan = planned.plan
    kernels = [_kernel_report(launch) for launch in plan.launches]
    if compiled and planned.device is not None:
        made = iter(planned.launcher.kernels)
        kernels = [
            replace(report, registers=kernel.registers, local_bytes=kernel.local_bytes)
            for report, kernel in zip((k for k in kernels if k.grid), made, strict=True)
        ]
    return Explanation(
        problem=plan.problem,
        backend=plan.backend,
        algorithm=plan.algorithm,
        reason=plan.reason,
        not_taken=plan.rejected,
        block_q=plan.tile.block_q,
        block_kv=plan.tile.block_kv,
        kernels=tuple(kernels),
        workspace_bytes=planned.workspace_bytes,
        copies=planned.copied,
        device=_device_text(planned.device),
    )


def _kernel_report(launch: KernelLaunch) -> KernelReport:
    config = launch.config
    return KernelReport(
        name=f"{config.generation}/{config.kernel}",
        architecture=config.architecture,
        grid=launch.grid,
        threads=config.threads,
        shared_bytes=config.shared_bytes,
    )


def _device_text(device: int | None) -> str:
    if device is None:
        return f"CPU, {HostLimits.query().cache:,} bytes of cache a core"
    limits = DeviceLimits.query(device)
    return f"{limits.name}, {limits.architecture}, {limits.num_sms} multiprocessors"
