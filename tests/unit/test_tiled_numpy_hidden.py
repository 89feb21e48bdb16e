"""Hidden values and other heads do not leak through shortcuts of the NumPy backend."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import cuflash
from cuflash.tiled_numpy import blas, threads

CPU: dict[str, Any] = {"backend": "numpy"}


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(
    ("dtype", "score", "small"), [(np.float32, -46, 1e-36), (np.float64, -390, 1e-240)]
)
def test_a_small_value_that_is_seen_alone_stays(
    dtype: Any, score: float, small: float, algorithm: Any
) -> None:
    """The other values are larger, but the mask hides them, so the small one is the output."""
    q, k = np.zeros((2, 512, 4), dtype)
    q[:, 0] = 1
    k[0, 0] = score
    v = np.ones((512, 4), dtype)
    v[0] = small
    options: dict[str, Any] = {**CPU, "layout": "sd", "causal": True, "algorithm": algorithm}
    out = cuflash.attention(q, k, v, scale=0.5, **options)
    np.testing.assert_allclose(out[0], small, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_queries_of_zero_find_what_is_not_finite(wrong: float, algorithm: Any) -> None:
    q, k, v = np.zeros((512, 16)), np.zeros((512, 16)), np.ones((512, 16))
    k[100, 0] = wrong
    options: dict[str, Any] = {**CPU, "layout": "sd", "causal": True, "algorithm": algorithm}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert np.isnan(out[100:]).all()
    assert np.isnan(lse[100:]).all()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_an_infinity_in_one_head_changes_no_bit_of_another(algorithm: Any) -> None:
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((2, 64, 4, 16)).astype(np.float32) for _ in range(4))
    k[..., 0], q[..., 0] = 3000, 8

    def computed() -> list[np.ndarray]:
        out, pullback = cuflash.attention_vjp(q, k, v, algorithm=algorithm, **CPU)
        return [out, *pullback(dout)]

    before = computed()
    q[0, 5, 2, 3] = np.inf
    for one, other in zip(before, computed(), strict=True):
        assert np.delete(one, 2, axis=2).tobytes() == np.delete(other, 2, axis=2).tobytes()


def _threads_of_blas() -> list[int]:
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


@pytest.mark.parametrize("at", range(4))
def test_blas_has_its_threads_again_wherever_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    before, seen, plain = _threads_of_blas(), [0], blas._Setting._set

    def interrupted(self: Any, numbers: list[int]) -> None:
        seen[0] += 1
        if seen[0] == at:
            raise KeyboardInterrupt
        plain(self, numbers)
        if seen[0] == at + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(blas._Setting, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt), blas.one_blas_thread():
        raise KeyboardInterrupt
    monkeypatch.undo()
    with blas.one_blas_thread():
        pass
    assert _threads_of_blas() == before
    assert not blas._setting._calls


def test_without_another_thread_the_caller_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    helpers = threads._Helpers()
    monkeypatch.setattr(threads, "_helpers", helpers)
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    for _ in range(3):
        threads.run_tasks([lambda: done.append(1)] * 4, 3)
    assert len(done) == 12
    assert helpers._queue.empty()


def test_the_dtype_of_the_output_is_checked_beside_a_residual() -> None:
    for dtype, out_dtype in (("float32", "float16"), ("float16", "bfloat16")):
        q = np.ones((1, 3, 1, 4), dtype)
        with pytest.raises(cuflash.ArgumentTypeError, match=r"^out_dtype: "):
            cuflash.attention_vjp(q, q, q, out_dtype=out_dtype, residual_dtype="float32", **CPU)
