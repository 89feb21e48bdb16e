"""Every program of ``examples`` runs, on the CPU and at size on a GPU, and its result is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..conftest import LISTED_SKIPS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Result = dict[str, Any]


def _run(name: str, *arguments: str) -> Result:
    """The result of an example's ``main``."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: Result = module.main(list(arguments))
    return result


def _host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def _learned(result: Result) -> None:
    """The gradient is right, and the loss fell most of the way to the best that can be."""
    assert result["gradient_error"] < 1e-7
    losses, floor = result["losses"], result["floor"]
    assert all(np.isfinite(losses))
    assert losses[0] > np.log(32)
    assert np.mean(losses[-5:]) - floor < 0.2 * (losses[0] - floor)


def _same_tokens(result: Result) -> None:
    """For every text the cache chooses the same tokens as a pass over the whole text."""
    cached, recomputed = _host(result["cached"]), _host(result["recomputed"])
    assert np.array_equal(cached, recomputed)
    assert all(len(set(text)) > 5 for text in cached.tolist())
    assert result["free"] == []


def _near_by_hand(result: Result) -> None:
    """Outputs and gradients agree for every line, and the weights are not in memory."""
    assert len(result["differences"]) == 6
    for line, (out, dq, dk, dv) in result["differences"].items():
        assert max(out, dq, dk, dv) < 2e-5, line
    assert result["bytes"]["cuflash"] < result["bytes"]["by hand"] / 3


def _near_each_document(result: Result) -> None:
    """Packed documents are as each is alone, and one that changes changes no other."""
    assert result["far"] < 2e-5
    lengths = result["lengths"].tolist()
    changed = np.flatnonzero(_host(result["changed"]))
    assert np.array_equal(changed, lengths[0] + np.arange(lengths[1]))
    assert result["elsewhere"] == 0
    ends = _host(abs(result["out"]).sum(axis=(2, 3)) > 0).sum(axis=1)
    assert ends.tolist() == lengths


def _near_whole_scores(result: Result) -> None:
    """The gradients of attention, of the bias too, and of the layer around it."""
    assert result["gradient_error"] < 1e-7
    assert set(result["differences"]) == {"out", "dq", "dk", "dv", "dbias"}
    assert max(result["differences"].values()) < 2e-5


def _converged(result: Result) -> None:
    """Float64 goes on where float32 stops, and both find the direction."""
    assert result["gradient_error"] < 1e-5
    double, single = result["float64"], result["float32"]
    assert double["gradient"] < 1e-7
    assert double["gradient"] < single["gradient"] / 10
    assert double["error"] < 0.1 * result["before"]
    assert abs(single["error"] - double["error"]) < 0.01 * double["error"]
    assert min(double["aligned"], single["aligned"]) > 0.99


#: Assertions about the result of each program that takes ``--arrays``.
CHECKS: dict[str, Callable[[Result], None]] = {
    "transformer_block": _learned,
    "paged_generation": _same_tokens,
    "replace_softmax": _near_by_hand,
    "packed_documents": _near_each_document,
    "pair_bias": _near_whole_scores,
    "scipy_float64": _converged,
}


@pytest.fixture
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host arrays stay on the host where there is a GPU, too."""
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")


def _needs_scipy(name: str) -> None:
    if name == "scipy_float64":
        pytest.importorskip("scipy", reason="JAX is not installed, which brings SciPy")


@pytest.mark.usefixtures("_without_a_gpu")
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs_on_the_host(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _needs_scipy(name)
    CHECKS[name](_run(name, "--arrays", "numpy"))
    assert capsys.readouterr().out.strip()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs_at_size_on_a_gpu(name: str) -> None:
    _needs_scipy(name)
    CHECKS[name](_run(name, "--arrays", "cupy"))


def _flax(platform: str, apart: float) -> None:
    """Both curves fall, and are one to rounding."""
    pytest.importorskip("jax", reason="JAX is not installed")
    pytest.importorskip("flax", reason="Flax is not installed")
    result = _run("flax_attention", "--platform", platform)
    for losses in (result["before"], result["after"]):
        assert losses[0] > 5
        assert losses[-1] < 0.75 * losses[0]
    assert max(result["apart"]) < apart


def test_flax_learns_the_same_with_either_attention() -> None:
    _flax("cpu", 1e-5)


@pytest.mark.gpu
def test_flax_learns_the_same_on_a_gpu() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA backend here")
    _flax("cuda", 1e-2)


def _numba(arrays: str) -> None:
    """The output is right and is in the given array."""
    pytest.importorskip("numba", reason="Numba is not installed")
    result = _run("numba_arrays", "--arrays", arrays)
    assert result["error"] < 1e-5
    assert result["same"]


@pytest.mark.usefixtures("_without_a_gpu")
def test_numba_on_the_host() -> None:
    _numba("numpy")


@pytest.mark.gpu
def test_numba_on_a_gpu() -> None:
    try:
        _numba("cuda")
    except SystemExit as ended:  # the message says what is broken
        pytest.skip(str(ended))


def test_numba_without_its_cuda_target_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    numba_cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")

    def jit(signature: str) -> None:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setattr(numba_cuda, "is_available", lambda: True)
    monkeypatch.setattr(numba_cuda, "jit", jit)
    with pytest.raises(SystemExit) as ended:
        _run("numba_arrays", "--arrays", "cuda")
    said = ended.value.code
    assert isinstance(said, str)
    assert "\n" not in said
    assert "row_stack" in said
    assert any(listed in said for listed in LISTED_SKIPS)


def test_every_example_is_tested_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*CHECKS, "flax_attention", "numba_arrays"}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"]({name}.py)" in listed for name in names)
    assert all(f"]({path.name})" in listed for path in EXAMPLES.glob("*.ipynb"))
