"""Every pair of features, with every algorithm and pass of the CUDA backend, runs or is refused.

The matrix follows from the table of features, see ``tests/unit/pairs_case.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.planning.kernel import KernelConfig

from ..unit.pairs_case import OPERATIONS, PAIRS, call_of, in_float64, refusal_of, run
from ..unit.wrt_case import GivenCall
from .build import begin, compiler, emulate
from .host_cupy import HostCupy, host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Storage, tile and head_dim of every algorithm, and the largest difference from float64.
KINDS: dict[str, tuple[str, tuple[int, int] | None, int, float]] = {
    "fa1": ("float32", (16, 32), 64, 2e-5),
    "fa2": ("float16", (32, 32), 64, 4e-3),
    "fa3": ("float16", None, 64, 4e-3),
}


def _call(pair: tuple[str, ...], algorithm: str) -> GivenCall:
    dtype, blocks, head_dim, _ = KINDS[algorithm]
    return call_of(pair, dtype, head_dim, algorithm=algorithm, blocks=blocks)


@contextlib.contextmanager
def _device(make: Callable[[KernelConfig], Any] = emulate) -> Iterator[HostCupy]:
    with host_cupy(num_sms=1, make=make) as host:
        yield host


def _configs(pair: tuple[str, ...], algorithm: str) -> set[KernelConfig]:
    """The configurations that a call of the pair compiles; none if it is refused."""
    found: set[KernelConfig] = set()

    def make(config: KernelConfig) -> Any:
        found.add(config)
        return lambda *_: None

    with _device(make) as host, contextlib.suppress(cuflash.UnsupportedError):
        run(_call(pair, algorithm), "backward", host.array, host.call)
    return found


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile all kernels before the first test: tests run in children of this process."""
    asked = (item.callspec.params for item in request.session.items if item.path == request.path)
    calls = dict.fromkeys((params["pair"], params["algorithm"]) for params in asked)
    configs = dict.fromkeys(config for call in calls for config in _configs(*call))
    for library in [begin(config) for config in configs]:
        library.result()


@pytest.mark.in_turns(by="pair", days=6)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("algorithm", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_pair_runs_or_is_refused(
    pair: tuple[str, str], algorithm: str, operation: str, compiled: None
) -> None:
    call = _call(pair, algorithm)
    dtype, *_, tolerance = KINDS[algorithm]
    refusal = refusal_of((*pair, algorithm, operation, "cuda", dtype))
    with _device() as host:
        if refusal is not None:
            with pytest.raises(cuflash.UnsupportedError) as caught:
                run(call, operation, host.array, host.call)
            assert refusal.first in str(caught.value)
            assert refusal.second in str(caught.value)
            return
        results = run(call, operation, host.array, host.call)
        got = [array.peek() for array in results]
    for one, expected in zip(got, run(in_float64(call), operation), strict=True):
        size = np.abs(expected).max()
        np.testing.assert_allclose(one.astype(np.float64), expected, rtol=0, atol=tolerance * size)
