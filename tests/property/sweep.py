"""The axes that decide a compilation; everything else about a problem is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch

from ..kit.case import Case
from ..kit.runners import RUNNERS, ApiRunner

#: (head_dim, head_dim_v): rows that are not whole 16 bytes, a narrow and a wide bucket filled
#: and not, v narrower and wider than q and k.
HEAD_DIMS = ((5, 5), (8, 8), (40, 40), (64, 64), (128, 128), (192, 128), (100, 256))
DTYPES = ("float16", "bfloat16", "float32", "float64")

#: Examples of a parametrisation. On the CPU few, since there are many; on the GPU more.
EXAMPLES = {"numpy": 6, "cuda": 12}


def sweep(
    head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS, dtypes: tuple[str, ...] = DTYPES
) -> pytest.MarkDecorator:
    """Parametrise a test over ``runner``, ``dtype``, ``dims`` and ``causal``."""
    return pytest.mark.parametrize(
        ("runner", "dtype", "dims", "causal"), list(_params(head_dims, dtypes))
    )


def _params(head_dims: Any, dtypes: Any) -> Iterator[Any]:
    for runner, dtype, dims, causal in product(RUNNERS.values(), dtypes, head_dims, (False, True)):
        name = f"{runner.backend}-{runner.algorithm}-{dtype}-d{dims[0]}-dv{dims[1]}"
        yield pytest.param(
            runner,
            dtype,
            dims,
            causal,
            id=f"{name}-{'causal' if causal else 'full'}",
            marks=pytest.mark.gpu if runner.backend == "cuda" else (),
        )


def tiles(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool, operation: str
) -> tuple[int, int]:
    """The tile of the plan, at a length where the length does not decide it."""
    case = Case(
        seqlen_q=4096,
        seqlen_kv=4096,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        causal=causal,
    )
    return runner.tiles(case, operation)


def examples(
    runner: ApiRunner, strategy: st.SearchStrategy[Case], check: Callable[[Case], None]
) -> None:
    """Run a check over as many drawn cases as the backend is given."""

    @settings(max_examples=EXAMPLES[runner.backend])
    @given(case=strategy)
    def run(case: Case) -> None:
        with only(runner):
            check(case)

    run()


@contextmanager
def only(runner: ApiRunner) -> Iterator[None]:
    """Fail if anything but the runner's backend and algorithm runs inside the block."""
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        yield
    for plan in ran:
        assert (plan.backend, plan.algorithm) == (runner.backend, runner.algorithm), str(plan)


def skip_unless_served(runner: ApiRunner, dtype: str, dims: tuple[int, int]) -> None:
    """Skip what this device cannot do, with the library's own reason."""
    shape = (1, 1, 1, dims[0])
    try:
        cuflash.explain(
            shape,
            shape,
            (1, 1, 1, dims[1]),
            dtype=dtype,
            backend=runner.backend,
            algorithm=runner.algorithm,
        )
    except cuflash.UnsupportedError as error:
        pytest.skip(f"not on this device: {error}")
