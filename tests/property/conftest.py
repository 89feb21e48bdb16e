"""Compiles the kernels of the properties, in parallel, before the first of them on a GPU.

With several processes (``--part``) this does not happen, because each would compile the kernels of
all. There a test compiles its own kernels, and other tests find them in CuPy's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

import cuflash

from ..kit.filled import filled
from ..kit.runners import RUNNERS
from .sweep import BLOCKS, DTYPES, HEAD_DIMS

PASSES = ("forward", "backward")
#: The number of tests that compile their own kernels.
FEW = 20


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> None:
    gpu = [item for item in request.session.items if item.get_closest_marker("gpu") is not None]
    algorithms = [
        runner.algorithm
        for name, runner in RUNNERS.items()
        if runner.backend == "cuda" and any("-".join(name) in item.name for item in gpu)
    ]
    part = request.config.getoption("--part")
    if len(gpu) > FEW and not part and cuflash.is_available():
        with filled(), ThreadPoolExecutor() as pool:
            list(pool.map(lambda call: _prepare(**call), _calls(algorithms)))


def _calls(algorithms: list[str]) -> Iterator[dict[str, Any]]:
    for algorithm, operation, dtype, gap in product(algorithms, PASSES, DTYPES, (0, 1)):
        shared = {"algorithm": algorithm, "operation": operation, "dtype": dtype, "gap": gap}
        for dims, causal in product(HEAD_DIMS, (False, True)):
            yield {**shared, "dims": dims, "causal": causal}
        if algorithm == "fa2" and operation == "backward":  # deterministic gradients
            for dims in ((40, 40), (64, 64)):
                yield {**shared, "dims": dims, "causal": True, "deterministic": True}
        if dtype in ("float16", "float32"):
            for blocks in BLOCKS:
                yield {**shared, "dims": (40, 40), "causal": True, "blocks": blocks}


def _prepare(dims: tuple[int, int], gap: int, dtype: str, **options: Any) -> None:
    """Compile for contiguous rows, or for rows an odd number of elements apart."""
    import cupy
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, v = (cupy.empty((1, 2, 1, d + gap), kind)[..., :d] for d in dims)
    with suppress(cuflash.UnsupportedError):  # the tests themselves skip it, with the reason
        cuflash.prepare(q, q, v, **options)
