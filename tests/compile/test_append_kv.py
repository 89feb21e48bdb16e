"""The kernels that append rows and merge states compile for every type of elements."""

from __future__ import annotations

from itertools import product

import pytest

from cuflash.planning.append_step import AppendProblem, MergeProblem, append_plan, merge_plan
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.problem import DTYPES, DTypeName

from ..architectures import LIMITS
from .nvrtc import build

_KERNELS = [x for x in product(("75", "80", "90"), DTYPES) if x != ("75", "bfloat16")]


@pytest.mark.parametrize(("architecture", "dtype"), _KERNELS)
def test_it_is_compiled_without_a_warning_or_a_spill(architecture: str, dtype: DTypeName) -> None:
    shape = (2, 4, 2, 1, 1, 64, 64)
    problem = AppendProblem("forward", *shape, dtype, dtype, "full", 1.0, 0, entries=2, slots=16)
    (launch,) = append_plan(problem, LIMITS[architecture], ()).launches
    _check(launch.config)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("architecture", ["75", "80", "90"])
def test_so_is_the_one_that_merges_states(architecture: str, dtype: DTypeName) -> None:
    problem = MergeProblem("forward", 2, 4, 4, 5, 0, 64, 64, dtype, dtype, "full", 1.0, 0)
    (launch,) = merge_plan(problem, LIMITS[architecture]).launches
    _check(launch.config)


def _check(config: KernelConfig) -> None:
    built = build(config)
    assert not built.warns, built.log
    assert built.local == 0
    assert built.registers <= 64
    assert "mma.sync" not in built.ptx
