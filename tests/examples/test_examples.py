"""Every program of ``examples`` runs, on the CPU and at size on a GPU, and its result is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Result = dict[str, Any]


def _run(name: str, *arguments: str) -> Result:
    """What ``main`` of an example returns."""
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
    """The cache chooses what a pass over the whole text chooses, for every text."""
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


#: What is asserted of the result of each program that takes ``--arrays``.
CHECKS: dict[str, Callable[[Result], None]] = {
    "transformer_block": _learned,
    "paged_generation": _same_tokens,
    "replace_softmax": _near_by_hand,
    "packed_documents": _near_each_document,
}


@pytest.mark.parametrize("name", CHECKS)
def test_it_runs_on_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    CHECKS[name](_run(name, "--arrays", "numpy"))
    assert capsys.readouterr().out.strip()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs_at_size_on_a_gpu(name: str) -> None:
    CHECKS[name](_run(name, "--arrays", "cupy"))
