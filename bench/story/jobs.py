"""The jobs that run under the hardware counters: a pass of ours, or attention by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

from ..cases import Case
from ..forced import launch_of
from ..inputs import Inputs
from . import standard

__all__ = ["Job", "compile_all", "plan_of", "prepare"]


@dataclass(frozen=True)
class Job:
    """One call.

    ``budget`` is the shared memory of a thread block that the plan may use, instead of the
    device's.
    """

    case: Case
    by_hand: bool = False
    budget: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The job as plain values."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Job:
        """The job from plain values."""
        case = dict(values["case"])
        blocks = case["blocks"]
        case |= {"blocks": None if blocks is None else tuple(blocks), "beside": ()}
        case |= {"pages": tuple(case["pages"])}
        return cls(Case(**case), values["by_hand"], values["budget"])


def _within(limits: Any, budget: int | None) -> Any:
    return limits if budget is None else replace(limits, shared_per_block=budget)


def plan_of(job: Job, limits: Any) -> Any:
    """The plan of contiguous arrays, made without a device.

    Raises
    ------
    CuflashError
        If the library cannot do the case, or cannot do it within the budget.
    """
    from cuflash.planning.plan import plan
    from cuflash.planning.problem import AttentionProblem

    case = job.case
    name: Any = case.dtype
    operation: Any = case.op
    algorithm: Any = case.algorithm
    problem = AttentionProblem(
        operation=operation,
        batch=case.batch,
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        seqlen_q=case.seqlen_q,
        seqlen_kv=case.seqlen_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        storage=name,
        output=name,
        mask="causal" if case.causal else "full",
        scale=case.head_dim**-0.5,
        q_offset=case.seqlen_kv - case.seqlen_q if case.causal else 0,
        alignment="tensor_map",
    )
    within = _within(limits, job.budget)
    return plan(problem, within, algorithm=algorithm, blocks=case.blocks)


def compile_all(jobs: Sequence[Job], say: Callable[[str], None]) -> None:
    """Compile the kernels of all jobs in parallel, so that no measurement waits for a compiler."""
    from cuflash.compile_ahead import compile_ahead
    from cuflash.errors import CuflashError
    from cuflash.planning.device import DeviceLimits

    limits = DeviceLimits.query(0)
    kernels: dict[Any, None] = {}
    for job in jobs:
        if job.by_hand:
            continue
        try:
            plan = plan_of(job, limits)
        except CuflashError:  # reported where it is measured
            continue
        kernels |= dict.fromkeys(launch.config for launch in plan.launches if launch.grid)
    done = compile_ahead(list(kernels), 0, lambda kernel: None)
    say(f"{done.kernels} kernels, {done.compiled} compiled in {done.seconds:.0f} s")


def prepare(job: Job, inputs: Inputs) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The compiled call of a job, and the facts of its plan that rows contain."""
    if job.by_hand:
        return standard.prepare(job.case, inputs), {}
    import cuflash
    from cuflash import pipeline
    from cuflash.planning.plan import plan

    def planned(problem: Any, limits: Any, **options: Any) -> Any:
        return plan(problem, _within(limits, job.budget), **options)

    case = job.case
    operation: Any = case.op
    # Bypasses the cache of plans, whose keys do not include the budget.
    decide = pipeline._decide.__wrapped__
    with mock.patch.multiple(pipeline, plan=planned, _decide=decide):
        prepared = cuflash.prepare(
            inputs.q, inputs.k, inputs.v, operation=operation, causal=case.causal, **case.options
        )
    return launch_of(case, prepared, inputs), facts_of(prepared.plan)


def facts_of(plan: Any) -> dict[str, Any]:
    """The blocks; and the threads and shared memory of the kernel with the most shared memory."""
    main = max((launch.config for launch in plan.launches), key=lambda one: one.shared_bytes)
    return {
        "blocks": [plan.tile.block_q, plan.tile.block_kv],
        "shared_bytes": main.shared_bytes,
        "threads": main.threads,
    }
