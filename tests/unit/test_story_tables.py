"""The blocks on the papers' claims, and their charts, from made-up rows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import charts, report, run
from bench.run import RESULTS
from bench.story import stored as of_story
from bench.story.charts import FILES, drawings
from bench.story.share import UNITS
from bench.story.tables import BLOCKS, render

from .story_rows import io_rows, memory_rows, share_rows, speed_rows

Store = Callable[..., None]
ROWS = {"speed": speed_rows, "memory": memory_rows, "io": io_rows, "share": share_rows}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A function that stores rows in place of the real ones."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(charts, "CHARTS", tmp_path / "charts")

    def put(*rows: dict[str, Any]) -> None:
        (tmp_path / of_story.FILE).write_text(json.dumps(rows))

    return put


def _every() -> list[dict[str, Any]]:
    return [row for make in ROWS.values() for row in make()]


def _line(block: str, start: str) -> str:
    (line,) = (line for line in render(block).splitlines() if line.startswith(start))
    return line


def test_there_is_a_block_for_each_part() -> None:
    assert tuple(f"story-{part}" for part in ROWS) == BLOCKS
    assert set(FILES) == set(ROWS)


@pytest.mark.parametrize("part", ROWS)
def test_a_part_without_rows_has_no_block(stored: Store, part: str) -> None:
    stored(*(row for row in _every() if row["part"] != part))
    assert render(f"story-{part}") == ""
    assert not {drawing.file for drawing in drawings()} & set(FILES[part])
    stored()
    assert drawings() == []


def test_speeds_and_what_the_papers_say(stored: Store) -> None:
    stored(*speed_rows())
    block = "story-speed"
    line = _line(block, "| forward | cuflash fa3")
    assert line == "| forward | cuflash fa3 | 300 | 300 | 300 | 300 | 30 % | 75 % on an H100 |"
    assert _line(block, "| backward | standard (CuPy)").endswith("| 10 | 10 | 10 | 10 | 1 % |  |")
    said = {name: _line("story-speed", f"| backward | cuflash {name} |") for name in ("fa2", "fa3")}
    assert said["fa2"].endswith("| up to 63 % on an A100 |")
    assert said["fa3"].endswith("| 30 % |  |")
    filled = "| forward | cuflash fa1, filled | 150 | 150 | 150 | 150 | 15 % |  |"
    assert _line(block, "| forward | cuflash fa1, filled") == filled
    assert "of the datasheet's 989" in render(block)
    names = [line.split(" | ")[1] for line in render(block).splitlines() if "| forward" in line]
    assert names[:3] == ["standard (CuPy)", "cuflash fa1", "cuflash fa1, filled"]
    assert names[-1] == "torch cudnn"


def test_what_was_skipped_is_told(stored: Store) -> None:
    rows = list(speed_rows())
    rows[0] |= {"skipped": "MemoryError: too large", "tflops": None}
    stored(*rows)
    assert "Not measured: standard (CuPy), forward, seqlen 512: MemoryError" in render(
        "story-speed"
    )
    memory = list(memory_rows())
    memory[0] |= {"skipped": "MemoryError: no", "extra_bytes": None}
    stored(*memory)
    assert "Not measured: standard (CuPy), forward, seqlen 1024: Mem" in render("story-memory")


def test_memory_grows_with_the_square_or_with_the_length(stored: Store) -> None:
    stored(*memory_rows())
    block = "story-memory"
    assert _line(block, "| standard (CuPy) | forward |") == (
        "| standard (CuPy) | forward | 8 | 32 | 128 | 4.0 times |"
    )
    assert _line(block, "| cuflash fa2 | forward and backward").endswith("| 3.1 | 2.0 times |")
    assert _line(block, "| cuflash fa3 | forward |") == "| cuflash fa3 | forward | 0 | 0 | 0 |  |"


def test_bytes_beside_their_counts(stored: Store) -> None:
    rows = list(io_rows())
    first = next(r for r in rows if r["label"] == "cuflash fa1" and r["head_dim"] == 64)
    first["dram_read"] = first["dram_read"] + round(
        0.2 * (first["dram_read"] + first["dram_write"])
    )
    stored(*rows)
    text = render("story-io")
    assert "FlashAttention-1 moves 1.00 to 1.20 times what its loops count, over 15 tiles." in text
    assert "FlashAttention-2 and 3 read 57.67 to 85.67 times what reading Q, K and V once" in text
    line = _line("story-io", "| cuflash fa1 | 64 | 16384 | 132 | 64x128 | 58 KiB of 64")
    assert "| 0.822 | 0.822 | 0.551 | 0.551 | 1.38 | 0.00845 | 1.00 |" in line
    tiles = [
        line.split(" | ")[4] for line in text.splitlines() if "| cuflash fa1 | 64 | 16384" in line
    ]
    assert tiles[:5] == ["64x16", "64x32", "64x64", "64x128", "64x256"]
    assert "| 5.93 | 5.93 | 4.85 | 4.85 | 2.16 |" in _line("story-io", "| standard (CuPy) | 64 |")


def test_a_range_of_one_figure_is_told_once(stored: Store) -> None:
    stored(*io_rows())
    told = "FlashAttention-1 moves 1.00 times what its loops count, over 15 tiles."
    assert told in render("story-io").splitlines()


def test_without_counters_the_blocks_say_why(stored: Store) -> None:
    io = [{**row, "skipped": "ncu is not installed"} for row in io_rows()]
    share = [
        {**{name: of for name, of in row.items() if name not in UNITS}, "no_counters": "no ncu"}
        for row in share_rows()
    ]
    stored(*io, *share)
    assert "Not measured: cuflash fa1, forward, seqlen 16384: ncu is not" in render("story-io")
    assert "Without counters: no ncu." in render("story-share")
    assert "![" not in render("story-share")
    assert drawings() == []


def test_shares_of_the_peak(stored: Store) -> None:
    rows = list(share_rows())
    rows[1] |= {"tflops": 494.7, "tensor": 61.4, "dram": None}
    stored(*rows)
    line = _line("story-share", "| cuflash fa1 | forward | 64")
    assert line.startswith("| cuflash fa1 | forward | 64 | 495 | 50 % | 71 % | 61 % | 50 % |")
    assert line.endswith("| 50 % |  |")
    assert "cuBLAS: 700 TFLOP/s" in render("story-share")


def test_the_run_that_measured_most_is_told(stored: Store) -> None:
    old = list(memory_rows())
    part = [{**row, "run": "20310101-000000", "extra_bytes": 0} for row in old[:5]]
    lost = [{**row, "run": "20320101-000000", "skipped": "no"} for row in old]
    stored(*old, *part, *lost)
    assert of_story.of_part("memory") == old
    again = [{**row, "run": "20330101-000000"} for row in old]
    stored(*old, *again)
    assert of_story.of_part("memory") == again


def test_charts_are_drawn_the_same_again(stored: Store, tmp_path: Path) -> None:
    stored(*_every())
    every = [file for part in ROWS for file in FILES[part]]
    assert [drawing.file for drawing in drawings()] == every
    assert report.wrong_charts() == [f"docs/charts/{file} is not drawn" for file in every]
    if importlib.util.find_spec("matplotlib") is None:
        return
    texts = [path.read_text() for path in report.draw_charts()]
    assert report.wrong_charts() == []
    assert [path.read_text() for path in report.draw_charts()] == texts
    said = ("cuflash fa1, filled", "torch cudnn", "forward and backward", "FA1, counted")
    for text, words in zip(texts, (*said, "exponentials"), strict=True):
        assert words in text


def test_a_page_gets_the_blocks_and_notices_a_changed_figure(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(*_every())
    page = "docs/results/claims.md"
    assert report.PAGES[page] == BLOCKS
    monkeypatch.setattr(report, "PAGES", {page: BLOCKS})
    path = tmp_path / page
    path.parent.mkdir(parents=True)
    path.write_text("# a\n")
    assert report.check(page, path.read_text()) == list(BLOCKS)
    report.write(tmp_path)
    text = path.read_text()
    assert report.check(page, text) == []
    assert report.names(text) == list(BLOCKS)
    assert report.check(page, text.replace("| 0.822 |", "| 0.823 |", 1)) == ["story-io"]
    report.write(tmp_path)
    assert path.read_text() == text


def test_rows_older_than_the_sources_are_said(stored: Store) -> None:
    stored(*speed_rows(), *memory_rows())
    said = [line for line in report.outdated() if "story" in line]
    assert len(said) == 12
    assert said[0] == (
        "nvidia-h200-story.json: speed: cuflash fa1 backward changed since run 20300101-000000"
    )
    assert said[7] == (
        "nvidia-h200-story.json: memory: cuflash fa1 forward and backward changed since run "
        "20300101-000000"
    )


@pytest.mark.parametrize("part", ["io", "share"])
def test_every_part_knows_its_sources(stored: Store, part: str) -> None:
    rows = list(ROWS[part]())
    stored(*rows)
    assert not [line for line in report.outdated() if "story" in line]
    old = [{**row, "sources": row["sources"] and "0" * 16} for row in rows]
    stored(*old)
    said = [line for line in report.outdated() if "story" in line]
    assert len(said) == {"io": 3, "share": 6}[part]
    assert f"{part}: cuflash fa1 forward changed" in " ".join(said)


def test_stored_rows_are_whole() -> None:
    for path in RESULTS.glob("*-story.json"):
        for row in json.loads(path.read_text()):
            assert row["part"] in ROWS
            assert {"run", "date", "gpu", "sources"} <= set(row)
            assert not [name for name in row if name.startswith(("count_", "paper_", "once_"))]
            if row["part"] == "speed" and row["skipped"] is None and row["sources"]:
                assert 0 < row["worst_ratio"] <= (1 if row["op"] == "forward" else 2)
