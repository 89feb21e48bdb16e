"""``explain`` describes the plan of a call, and the call runs that plan."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.planning.plan import Plan
from cuflash.planning.problem import MAX_SEQLEN


def _arrays(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 50, 4, 16)).astype(dtype)
    k, v = (rng.standard_normal((2, 70, 2, 16)).astype(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2"])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_what_is_explained_is_what_runs(algorithm: str, operation: str) -> None:
    q, k, v = _arrays()
    said = cuflash.explain(
        q, k, v, causal=True, operation=operation, algorithm=algorithm, backend="numpy"
    )
    ran: list[Plan] = []
    with dispatch.observe(ran.append):
        _, pullback = cuflash.attention_vjp(
            q, k, v, causal=True, algorithm=algorithm, backend="numpy"
        )
        pullback(q)
    plan = next(p for p in ran if p.problem.operation == operation)
    assert said.algorithm == plan.algorithm == ("fa2" if algorithm == "auto" else algorithm)
    assert (said.block_q, said.block_kv) == (plan.tile.block_q, plan.tile.block_kv)
    assert said.problem == plan.problem
    assert said.backend == "numpy"


def test_shapes_explain_like_arrays() -> None:
    arrays = _arrays()
    shapes = [a.shape for a in arrays]
    by_array = cuflash.explain(*arrays, backend="numpy")
    assert cuflash.explain(*shapes, dtype="float32", backend="numpy") == by_array
    with pytest.raises(cuflash.ArgumentTypeError, match="dtype: got None"):
        cuflash.explain(*shapes, backend="numpy")
    with pytest.raises(cuflash.ArgumentValueError, match="non-negative integers"):
        cuflash.explain((2, -1, 4, 16), *shapes[1:], dtype="float32", backend="numpy")


def test_the_compile_flag_and_sizes_are_checked() -> None:
    arrays = _arrays()
    for nearly in (1, "yes", None):
        with pytest.raises(cuflash.ArgumentTypeError, match="compile: got"):
            cuflash.explain(*arrays, backend="numpy", compile=nearly)  # type: ignore[arg-type]
    with pytest.raises(cuflash.ArgumentValueError, match="non-negative integers"):
        cuflash.explain(
            (True, 50, 4, 16), *(a.shape for a in arrays[1:]), dtype="float32", backend="numpy"
        )


def test_numpy_has_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """So CuPy is not needed."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    said = [cuflash.explain(*_arrays(), backend="numpy", compile=flag) for flag in (False, True)]
    assert said[0] == said[1]
    assert said[1].kernels == ()


def test_another_cache_gives_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 4096, 8, 64)
    seen = set()
    for cache in (1 << 16, 1 << 22):
        monkeypatch.setenv("CUFLASH_CPU_CACHE", str(cache))
        said = cuflash.explain(shape, shape, shape, dtype="float32", backend="numpy")
        assert f"{cache:,} bytes" in said.reason
        seen.add((said.block_q, said.block_kv))
    assert len(seen) == 2


@pytest.mark.parametrize("seqlen", [1, 7, MAX_SEQLEN])
def test_the_offset_keeps_what_every_query_sees_within_32_bits(seqlen: int) -> None:
    shape = (1, seqlen, 1, 8)

    def bounds(given: int | None) -> tuple[str, int]:
        said = cuflash.explain(
            *[shape] * 3, dtype="float16", causal=True, q_offset=given, backend="numpy"
        )
        return said.problem.mask, said.problem.q_offset

    assert bounds(None) == bounds(0) == (("causal", 0) if seqlen > 1 else ("full", 0))
    for large in (seqlen - 1, seqlen, 2**31, 2**70):
        assert bounds(large) == ("full", 0)
    for small in (-seqlen, -seqlen - 1, -(2**70)):
        assert bounds(small) == ("causal", -seqlen)


def test_it_is_frozen_and_prints_itself() -> None:
    said = cuflash.explain(*_arrays("float16"), causal=True, q_offset=3, backend="numpy")
    with pytest.raises(dataclasses.FrozenInstanceError):
        said.algorithm = "fa1"  # type: ignore[misc]
    text = str(said)
    for part in (
        "forward float16 batch 2 heads 4/2 seqlen 50x70 head_dim 16 causal q_offset 3",
        "fa2 on numpy",
        "tile",
        "workspace    0 bytes",
        "copies       none",
    ):
        assert part in text


def test_it_raises_what_the_call_would() -> None:
    q, k, v = _arrays()
    with pytest.raises(cuflash.ArgumentValueError, match="seqlen_kv"):
        cuflash.explain(q, k, v[:, 1:], backend="numpy")
    with pytest.raises(cuflash.ArgumentValueError, match="operation: got 'sideways'"):
        cuflash.explain(q, k, v, operation="sideways", backend="numpy")  # type: ignore[arg-type]
    with pytest.raises(cuflash.UnsupportedError):
        cuflash.explain(q, k, v, algorithm="fa3", backend="numpy")


def test_explaining_runs_nothing() -> None:
    ran: list[Plan] = []
    with dispatch.observe(ran.append):
        cuflash.explain(*_arrays(), backend="numpy")
    assert not ran


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "cuda")
    if cuflash.is_available():
        assert cuflash.explain(*_arrays()).backend == "cuda"
    else:
        with pytest.raises(cuflash.BackendUnavailableError):
            cuflash.explain(*_arrays())
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    assert cuflash.explain(*_arrays()).backend == "numpy"


def test_info_says_what_a_bug_report_needs() -> None:
    text = str(cuflash.info())
    for part in (
        "python",
        "numpy",
        "ml_dtypes",
        "CUDA",
        "CUDA sources",
        "kernel cache",
        "CPU cache",
    ):
        assert part in text
    assert cuflash.info().sources.endswith("cuda_src")


def test_info_says_what_is_wrong_with_the_kernel_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    (tmp_path / "one.cubin").touch()
    assert cuflash.info().kernel_cache == f"{tmp_path} (1 binaries)"

    def refused(folder: Path) -> dict[str, int]:  # permissions do not stop the superuser
        raise PermissionError(13, "Permission denied", str(folder))

    # ``cuflash.info`` is the function, so the module is imported by its name.
    monkeypatch.setattr(importlib.import_module("cuflash.info"), "binaries", refused)
    assert "Permission denied" in cuflash.info().kernel_cache


def test_nothing_to_compute_runs_nothing() -> None:
    ran: list[Plan] = []
    with dispatch.observe(ran.append):
        empty = np.ones((0, 5, 2, 4), np.float32)
        assert cuflash.attention(empty, empty, empty, backend="numpy").shape == (0, 5, 2, 4)
        none = np.ones((1, 0, 2, 4), np.float32)
        some = np.ones((1, 3, 2, 4), np.float32)
        assert cuflash.attention(none, some, some, backend="numpy").shape == (1, 0, 2, 4)
    assert not ran


def test_no_keys_is_a_dead_row_for_everyone() -> None:
    q, none = np.ones((1, 3, 2, 4), np.float32), np.ones((1, 0, 2, 4), np.float32)
    out, lse = cuflash.attention(q, none, none, return_lse=True, backend="numpy")
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    dq, dk, dv = cuflash.attention_backward(q, q, none, none, out, lse, backend="numpy")
    assert (dq == 0).all()
    assert dk.shape == dv.shape == (1, 0, 2, 4)


def test_no_queries_still_gives_keys_their_zero_gradient() -> None:
    k, none = np.ones((1, 3, 2, 4), np.float32), np.ones((1, 0, 2, 4), np.float32)
    out, lse = cuflash.attention(none, k, k, return_lse=True, backend="numpy")
    dq, dk, dv = cuflash.attention_backward(none, none, k, k, out, lse, backend="numpy")
    assert dq.shape == (1, 0, 2, 4)
    assert (dk == 0).all()
    assert (dv == 0).all()
