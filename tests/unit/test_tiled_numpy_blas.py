"""BLAS has one thread while calls run, and its own number afterwards, whichever thread calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from threadpoolctl import threadpool_limits

from cuflash.tiled_numpy import blas

from ..kit.blas import forget_control
from .test_tiled_numpy_threads import blas_threads


@pytest.mark.parametrize("last", ["first", "second"])
def test_the_last_call_to_end_restores_blas_in_any_thread(last: str) -> None:
    """The calls of two threads overlap; both threads outlive their calls."""
    forget_control()
    with ThreadPoolExecutor(1) as other, threadpool_limits(8, user_api="blas"):
        forget_control()  # of this thread's limit
        first, second = blas.one_blas_thread(), blas.one_blas_thread()
        other.submit(first.__enter__).result()
        second.__enter__()
        assert blas_threads() == {1}
        if last == "second":
            other.submit(first.__exit__, None, None, None).result()
            assert blas_threads() == {1}
        second.__exit__(None, None, None)
        if last == "first":
            assert blas_threads() == {1}
            other.submit(first.__exit__, None, None, None).result()
        assert blas_threads() == {8}
