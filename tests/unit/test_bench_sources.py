"""A stored row is as old as the oldest kernel that it timed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

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


def test_a_comment_changes_no_digest_and_a_number_does(tmp_path: Path) -> None:
    root = tmp_path / "cuda_src"
    shutil.copytree(find_sources(), root)
    mask = root / "tile" / "mask.cuh"
    before = {which: digest(root, *which) for which in KERNELS}
    mask.write_text("// Another word.\n" + mask.read_text().replace("\n\n", "\n/* and\n one */\n"))
    assert {which: digest(root, *which) for which in KERNELS} == before
    mask.write_text(mask.read_text().replace("q_offset + 1", "q_offset + 2"))
    after = {which: digest(root, *which) for which in KERNELS}
    of_masks = {which for which in KERNELS if which[0] != "steps"}
    assert {which for which in KERNELS if after[which] != before[which]} == of_masks
