"""The axes that decide a compilation; everything else about a problem is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

from ..kit.case import Case
from ..kit.runners import RUNNERS, ApiRunner

#: (head_dim, head_dim_v): rows that are not whole 16 bytes, a narrow and a wide bucket filled
#: and not, v narrower and wider than q and k.
HEAD_DIMS = ((5, 5), (8, 8), (40, 40), (64, 64), (128, 128), (192, 128), (100, 256))
#: Small and lopsided tiles, whose kernels are compiled ahead.
BLOCKS = ((16, 32), (64, 16), (64, 64))
DTYPES = ("float16", "bfloat16", "float32", "float64")

#: Parametrisations of a whole sweep for a runner.
SWEPT = len(HEAD_DIMS) * len(DTYPES) * 2

#: The fewest examples of a parametrisation, since there are many; ``AT_LEAST`` may raise them.
EXAMPLES = {"numpy": 6, "cuda": 4}
#: Examples of a property on the GPU, over all its parametrisations.
AT_LEAST = 200


def sweep(
    head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS, dtypes: tuple[str, ...] = DTYPES
) -> pytest.MarkDecorator:
    """Parametrise a test over ``runner``, ``dtype``, ``dims`` and ``causal``."""
    return pytest.mark.parametrize(
        ("runner", "dtype", "dims", "causal"), list(_params(head_dims, dtypes))
    )


def _params(head_dims: Any, dtypes: Any) -> Iterator[Any]:
    for runner, dtype, dims, causal in product(RUNNERS.values(), dtypes, head_dims, (False, True)):
        if runner.algorithm == "auto" and not _hopper_serves(dtype, dims):
            continue  # "auto" would run the kernels of the FlashAttention-2 runner again
        name = f"{runner.backend}-{runner.algorithm}-{dtype}-d{dims[0]}-dv{dims[1]}"
        yield pytest.param(
            runner,
            dtype,
            dims,
            causal,
            id=f"{name}-{'causal' if causal else 'full'}",
            marks=pytest.mark.gpu if runner.backend == "cuda" else (),
        )


def _hopper_serves(dtype: str, dims: tuple[int, int]) -> bool:
    """Whether FlashAttention-3 takes rows of this dtype and width, if their strides allow it."""
    return dtype in ("float16", "bfloat16") and all(d % 8 == 0 for d in dims)


def runners() -> list[Any]:
    """Parameters of a test that takes only the sweep's runner."""
    return [
        pytest.param(
            runner,
            id=f"{runner.backend}-{runner.algorithm}",
            marks=pytest.mark.gpu if runner.backend == "cuda" else (),
        )
        for runner in RUNNERS.values()
    ]


def ordered(runner: ApiRunner) -> ApiRunner:
    """The runner whose gradients have the same bits every time."""
    return replace(runner, options=(*runner.options, ("deterministic", True)))


def tiles(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool, operation: str
) -> tuple[int, int]:
    """The tile of the plan, for a length that does not affect it."""
    case = Case(
        seqlen_q=4096,
        seqlen_kv=4096,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        causal=causal,
    )
    return runner.tiles(case, operation)


def count(runner: ApiRunner, parametrisations: int) -> int:
    """Examples for each parametrisation of a property.

    The numbers hold for the profiles "ci" and "drawn" (50 examples); they change in proportion to
    the examples of the profile.
    """
    base = EXAMPLES[runner.backend]
    if runner.algorithm == "auto":  # a sweep has fewer parametrisations of it
        parametrisations = min(parametrisations, 20)
    if runner.backend == "cuda":
        base = max(base, -(-AT_LEAST // parametrisations))
    return max(1, base * settings.default.max_examples // 50)


def several_tiles(tile: tuple[int, int], dtype: str, dims: tuple[int, int], causal: bool) -> Case:
    """Two q tiles and three kv tiles, the last of each short; grouped heads."""
    return Case(
        batch=1,
        heads_q=2,
        heads_kv=1,
        seqlen_q=tile[0] + 9,
        seqlen_kv=3 * tile[1] - 3,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
        causal=causal,
        seed=1,
    )


def examples(
    runner: ApiRunner,
    strategy: st.SearchStrategy[Case],
    check: Callable[[Case], None],
    parametrisations: int = 40,
    first: Case | None = None,
) -> None:
    """Run a check over the backend's number of drawn cases; on a GPU also over ``first``.

    Few drawn cases have several tiles, and some bugs show nowhere else.
    """
    if first is not None and runner.backend == "cuda":
        check(first)

    @settings(max_examples=count(runner, parametrisations))
    @given(case=strategy)
    def run(case: Case) -> None:
        check(case)

    run()


def skip_unless_served(runner: ApiRunner, dtype: str, dims: tuple[int, int]) -> None:
    """Skip a problem that this device does not support, with the library's own reason."""
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
