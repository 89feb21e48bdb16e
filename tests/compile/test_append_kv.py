"""The compiler over the kernel that appends to caches, for every type of elements."""

from __future__ import annotations

from itertools import product

import pytest

from cuflash.planning.append_step import AppendProblem, append_plan
from cuflash.planning.problem import DTYPES, DTypeName

from ..architectures import LIMITS
from .nvrtc import build

_KERNELS = [x for x in product(("75", "80", "90"), DTYPES) if x != ("75", "bfloat16")]


@pytest.mark.parametrize(("architecture", "dtype"), _KERNELS)
def test_it_is_compiled_without_a_warning_or_a_spill(architecture: str, dtype: DTypeName) -> None:
    shape = (2, 4, 2, 1, 1, 64, 64)
    problem = AppendProblem("forward", *shape, dtype, dtype, "full", 1.0, 0, entries=2, slots=16)
    (launch,) = append_plan(problem, LIMITS[architecture], ()).launches
    built = build(launch.config)
    assert not built.warns, built.log
    assert built.local == 0
    assert built.registers <= 64
    assert "mma.sync" not in built.ptx
