"""The opening of the README shows the stored rows, whether cuflash is faster or slower."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import charts, drawing, opening, report, run
from bench.cases import select
from bench.drawing import Drawing

from .bench_rows import row, rows_of

PEERS = ("torch cudnn", "flash-attn-4")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that stores rows where the pages read their results."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(charts, "CHARTS", tmp_path / "charts")

    def put(*rows: dict[str, Any]) -> None:
        (tmp_path / "nvidia-h200.json").write_text(json.dumps(rows))

    return put


def _both(**more: Any) -> list[dict[str, Any]]:
    return [r for name in opening.SETS for r in rows_of(name, *PEERS, **more)]


def test_a_line_for_each_pass_and_width(stored: Any) -> None:
    rows = _both(ratio=1.1)
    at = {"op": "forward", "head_dim": 64, "impl": "cuflash"}
    ours = [r for r in rows if at.items() <= r.items()]
    assert len(ours) == 8
    ratios = (0.5, 0.996, 1.004, 1.0, 0.995, 1.005, 2.0, 1.1)
    for one, ratio in zip(ours, ratios, strict=True):
        one["ratio"] = ratio
    ours[0]["tflops"] = 400.0
    stored(*rows)
    lines = [line for line in opening.render().splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| pass | head_dim | cuflash | cuDNN | FlashAttention-4 | ratio")
    assert lines[1] == (
        "| forward | 64 | 119 | 200 | 200 | **1.01** | 0.50 (512 full) | 2.00 (8192 causal) "
        "| 3, 3, 2 |"
    )
    assert [line.split(" | ")[:2] for line in lines[1:]] == [
        [f"| {op}", str(dim)] for op in ("forward", "backward") for dim in (64, 128, 256)
    ]
    assert "at 48 points" in opening.render()
    assert "by hand" not in opening.render()


def test_the_ratio_to_flash_attention_3_counts(stored: Any, tmp_path: Path) -> None:
    stored(*_both(ratio=1.1))
    beside = [
        {**row(case, "cuflash", 100.0), "ratio": 0.9 if case.seqlen_q == 512 else 1.3}
        for name in opening.SETS
        for case in select(name)
    ]
    (tmp_path / "nvidia-h200-flash3.json").write_text(json.dumps(beside))
    lines = [line for line in opening.render().splitlines() if line.startswith("| ")]
    assert " | FlashAttention-4 | to FlashAttention-3 | ratio" in lines[0]
    for line in lines[1:]:
        assert "| 1.19 | **1.05** | 0.90 (512 full) | 1.10 " in line
        assert line.endswith("| 6, 0, 2 |")


def test_attention_by_hand_is_told(stored: Any) -> None:
    case = next(case for case in select("fa1") if case.op == "forward" and not case.causal)
    by_hand = [row(case, "cuflash", 150.0), row(case, "cupy by hand", 6.54)]
    stored(*_both(), *by_hand)
    assert "runs at 6.5 to 6.5 TFLOP/s" in opening.render()


@pytest.mark.parametrize("gone", ["backward", "peers"])
def test_without_peers_or_a_pass_there_is_none(stored: Any, gone: str) -> None:
    kept = [r for r in _both() if (r["op"] != gone if gone == "backward" else r["sources"])]
    stored(*kept)
    assert opening.render() == ""
    assert opening.drawings() == []


def test_a_readme_without_it_gets_it(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(*_both())
    monkeypatch.setattr(report, "PAGES", {"README.md": ("opening",)})
    path = tmp_path / "README.md"
    path.write_text("# name\n")
    assert report.check("README.md", path.read_text()) == ["opening"]
    report.write(tmp_path)
    text = path.read_text()
    assert text.startswith("# name\n\n<!-- results: opening -->\nOn an NVIDIA")
    assert report.check("README.md", text) == []
    changed = text.replace("| forward | 64 | 100", "| forward | 64 | 900")
    assert report.check("README.md", changed) == ["opening"]


def test_its_chart_shows_every_point(stored: Any, tmp_path: Path) -> None:
    stored(*_both())
    (chart,) = opening.drawings()
    title, panels = chart.content
    assert title == "TFLOP/s, bfloat16, NVIDIA Abacus"
    assert len(panels) == 6
    lines = panels[0][2]
    assert list(lines) == ["cuDNN", "FlashAttention-4", "cuflash"]
    assert lines["cuflash"] == [
        [n, causal, 100.0] for causal in (False, True) for n in (512, 2048, 8192, 16384)
    ]
    if importlib.util.find_spec("matplotlib") is None:
        return
    text = drawing.draw(chart, tmp_path).read_text()
    for said in ("FlashAttention-4", "backward, head_dim 256", "causal", "16k"):
        assert said in text


def test_a_drawing_says_what_it_shows(tmp_path: Path) -> None:
    one, other = (Drawing("a.svg", ["t", rate], lambda pyplot: None) for rate in (1.0, 2.0))
    assert drawing.fault(one, tmp_path) == "is not drawn"
    (tmp_path / "a.svg").write_text(f"<svg>{one.mark}</svg>")
    assert drawing.fault(one, tmp_path) is None
    assert drawing.fault(other, tmp_path) == "shows other numbers than the results"


def test_names_at_the_ends_of_lines_do_not_cover_one_another() -> None:
    assert drawing.spread({"a": 0.1, "b": 0.9}, 0.1) == {"a": 0.1, "b": 0.9}
    near = drawing.spread({"c": 0.52, "a": 0.5, "b": 0.51, "d": 0.62}, 0.1)
    assert list(near) == ["a", "b", "c", "d"]
    heights = list(near.values())
    assert [round(b - a, 9) for a, b in pairwise(heights)] == 3 * [0.1]
    assert sum(heights) / 4 == pytest.approx((0.5 + 0.51 + 0.52 + 0.62) / 4)
