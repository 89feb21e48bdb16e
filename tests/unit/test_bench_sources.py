"""A stored row is as old as the oldest kernel that it timed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sources import KERNELS, digest
from cuflash.cuda.source import find_sources
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS


@pytest.mark.parametrize("which", KERNELS)
def test_the_digest_is_of_every_kernel_of_the_plan(which: tuple[str, str]) -> None:
    algorithm, op = which
    wanted = AttentionProblem(op, 1, 2, 1, 64, 64, 64, 64, "float16", "float16", "full", 1.0, 0)
    wanted = replace(wanted, alignment="tensor_map")
    launches = plan(wanted, LIMITS["90"], algorithm=algorithm).launches
    assert {(x.config.generation, x.config.kernel) for x in launches} == set(KERNELS[which])


def test_digests_differ() -> None:
    every = [*KERNELS, *((name, "forward and backward") for name in ("fa1", "fa2", "fa3"))]
    assert len({digest(find_sources(), *which) for which in every}) == len(every)
