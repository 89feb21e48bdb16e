"""Tables, summaries and charts of made-up rows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as commands
from bench import charts, report, run
from bench.cases import select
from bench.documents import relocated
from bench.stored import implementations, of_set
from bench.tables import SETS, grid, render

from .bench_rows import row, rows_of

Store = Callable[..., None]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A function that stores rows where the pages read their results."""
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(charts, "CHARTS", tmp_path / "charts")

    def put(*rows: dict[str, Any]) -> None:
        (tmp_path / "nvidia-h200.json").write_text(json.dumps(rows))

    return put


def _lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("name", SETS)
def test_a_set_without_rows_has_no_table(stored: Store, name: str) -> None:
    stored()
    assert render(name) == ""


@pytest.mark.parametrize("name", SETS)
def test_every_case_of_a_set_is_a_line_of_its_table(stored: Store, name: str) -> None:
    stored(*rows_of(name, "torch flash"))
    body = [line for line in _lines(render(name), "| ") if not line.startswith("| head_dim")]
    assert len(body) == len(select(name))
    assert len(set(body)) >= len(body) // 2  # each pass has its own table


def test_a_table_has_a_column_for_each_implementation(stored: Store) -> None:
    stored(*rows_of("fa2", "torch flash", "torch cudnn", tflops=123.4, ratio_low=0.456))
    headers = _lines(render("fa2"), "| head_dim")
    assert headers == 2 * [
        "| head_dim | batch · heads | seqlen | mask | cuflash fa2 | torch flash | torch cudnn "
        "| ratio to the best other | at least |"
    ]
    assert "| 64 | 1024 | 512 | full | 123 | 123 | 123 | 0.50 | 0.46 |" in render("fa2")


def test_an_implementation_that_lacks_a_case_leaves_a_gap(stored: Store) -> None:
    rows = rows_of("fa2-single", "torch math", tflops=12.34)
    gone = next(r for r in rows if r["impl"] == "torch math")
    stored(*(r for r in rows if r is not gone))
    assert "| 64 | 16 | 4096 | full | 12.3 |  | 0.50 | 0.40 |" in render("fa2-single")


def test_the_deterministic_pass_stands_beside_the_other(stored: Store) -> None:
    stored(*rows_of("fa2-deterministic", "torch flash"))
    text = render("fa2-deterministic")
    assert "| mask | deterministic | cuflash fa2 |" in text
    assert "| 64 | 256 | 2048 | full | no | 100 | 200 | 0.50 | 0.40 |" in text
    assert "| 64 | 256 | 2048 | full | yes | 100 | 200 | 0.50 | 0.40 |" in text
    plain, deterministic = text.split(" **Deterministic**: ")
    assert "**Backward**: cuflash fa2 is 0.50 times" in plain
    assert "(geometric mean of 8)" in plain
    assert "(geometric mean of 8)" in deterministic


def test_rows_of_tiles_are_found_again_in_a_file(stored: Store) -> None:
    stored(*rows_of("fa1-tiles"))
    from bench.stored import gpu_rows

    assert len(of_set("fa1-tiles", gpu_rows())) == len(select("fa1-tiles"))


def test_generations_stand_side_by_side(stored: Store) -> None:
    stored(*rows_of("generations", ratio=2.0))
    text = render("generations")
    assert "| mask | cuflash fa2 | cuflash fa1 | ratio" in text
    assert "| 64 | 8 | 512 | full | 100 | 50.0 | 2.00 | 0.40 |" in text
    assert "cuflash fa2 is 2.00 times as fast" in text


def test_the_summary_has_the_mean_and_the_worst_cell() -> None:
    cases = select("fa2")[:2]  # forward at head_dim 64, full, seqlen 512 and 2048
    rows = [row(cases[0], "cuflash", 1.0, ratio=0.5), row(cases[1], "cuflash", 1.0, ratio=2.0)]
    (line,) = _lines(grid("fa2", rows), "**")
    assert line == (
        "**Forward**: cuflash fa2 is 1.00 times as fast as the best other (geometric mean of 2); "
        "worst 0.50 at head_dim 64, batch · heads 1024, seqlen 512, full."
    )
    alone = [row(cases[0], "cuflash", 1.0, ratio=None, ratio_low=None)]
    assert "nothing else was timed" in grid("fa2", alone)


def test_tables_take_turns_where_they_were_run() -> None:
    (case, *_) = select("fa2")
    rows = [
        row(case, "cuflash", 222.0, protocol="turns"),
        row(case, "cuflash", 111.0, protocol="rested"),
    ]
    assert "222" in grid("fa2", rows)
    assert "111" not in grid("fa2", rows)
    assert "111" in grid("fa2", rows[1:])


def test_a_table_is_of_the_last_run_that_covers_most_of_the_set() -> None:
    whole = rows_of("fa2", "torch flash", run="1")
    again = rows_of("fa2", "torch flash", run="2")
    part = [r for r in rows_of("fa2", "torch flash", run="3") if r["causal"]]
    other = rows_of("fa2-float16", "torch flash", run="4")
    assert of_set("fa2", [*whole, *again, *part, *other]) == again
    assert of_set("fa2", [*part, *other]) == part
    assert of_set("fa2", other) == []


def test_peers_of_another_set_do_not_make_a_run_of_this_one() -> None:
    ours = rows_of("fa1", run="1")
    tiles = rows_of("fa1-tiles", "cupy by hand", run="2")
    assert of_set("fa1", [*ours, *tiles]) == ours


def test_ours_come_first_and_the_newest_before_the_older() -> None:
    rows = rows_of("generations") + rows_of("fa2", "torch flash", "by hand")
    random_order = sorted(rows, key=lambda r: r["impl"], reverse=True)
    assert implementations(random_order)[:2] == ["cuflash fa2", "cuflash fa1"]


def test_a_block_that_is_missing_is_named_and_written(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(*rows_of("fa2-float16", "torch flash", gpu=r"one \g of two"))
    monkeypatch.setattr(report, "PAGES", {"docs/a.md": ("fa1", "fa2-float16", "cpu")})
    path = tmp_path / "docs" / "a.md"
    path.parent.mkdir()
    path.write_text(
        "a\n<!-- results: fa1 -->\n<!-- end of results -->\n\nb\n\n"
        "<!-- results: cpu -->\n<!-- end of results -->\nend \\1\n"
    )
    said = ["docs/a.md: the block 'fa2-float16' differs from the results"]
    assert report.faults(tmp_path) == said
    report.write(tmp_path)
    text = path.read_text()
    assert report.names(text) == ["fa1", "fa2-float16", "cpu"]
    assert report.faults(tmp_path) == []
    assert "](charts/fa2-float16-forward.svg)" in text
    assert text.startswith("a\n<!-- results: fa1 -->\n<!-- end of results -->\n\n<!-- results: fa2")
    assert text.endswith("\nend \\1\n")
    assert text.count("\nb\n") == 1
    report.write(tmp_path)
    assert path.read_text() == text


def test_a_block_of_another_page_is_named(stored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    monkeypatch.setattr(report, "PAGES", {"README.md": (), "docs/a.md": ("fa1",)})
    text = "<!-- results: fa1 -->\n<!-- end of results -->\n"
    assert report.check("docs/a.md", text) == []
    assert report.check("README.md", text) == ["fa1"]


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("README.md", "docs/charts/a.svg"),
        ("docs/a.md", "charts/a.svg"),
        ("docs/results/a.md", "../charts/a.svg"),
    ],
)
def test_links_to_charts_start_at_the_page(page: str, link: str) -> None:
    assert relocated("![a](docs/charts/a.svg)\n", page) == f"![a]({link})\n"


def test_charts_are_drawn_where_there_is_a_curve(stored: Store) -> None:
    sets = ("fa2-single", "generations", "fa3", "fa3-backward")
    stored(*rows_of("fa2", "torch flash"), *(row for name in sets for row in rows_of(name)))
    names = [
        f"{name}-{op}" for name in ("fa3", "fa2", "generations") for op in ("forward", "backward")
    ]
    assert report.wrong_charts() == [
        f"docs/charts/{name}.svg is not drawn" for name in ("opening", *names)
    ]
    assert "docs/charts/fa2-backward.svg)" in render("fa2")
    assert "docs/charts" not in render("fa2-single")


def test_a_chart_has_a_panel_for_each_width_and_mask(stored: Store) -> None:
    rows = [r for r in rows_of("fa2", "torch flash") if r["op"] == "forward"]
    panels = charts.panels_of(rows)
    assert [title for title, _ in panels] == [
        f"head_dim {dim}, {mask}" for dim in (64, 128, 256) for mask in ("full", "causal")
    ]
    assert charts.lines_of(panels[0][1]) == {
        "cuflash fa2": [(n, 100.0) for n in (512, 2048, 8192, 16384)],
        "torch flash": [(n, 200.0) for n in (512, 2048, 8192, 16384)],
    }


def test_lines_of_several_numbers_of_heads_say_so() -> None:
    rows = [r for r in rows_of("generations") if (r["op"], r["head_dim"]) == ("forward", 64)]
    lines = charts.lines_of(rows)
    assert list(lines) == [
        f"cuflash {name}, {heads} heads" for name in ("fa2", "fa1") for heads in (8, 64, 256)
    ]
    assert lines["cuflash fa1, 256 heads"] == [(512, 50.0), (2048, 50.0)]


def test_drawing(stored: Store) -> None:
    stored(*rows_of("fa2", "torch flash"))
    if importlib.util.find_spec("matplotlib") is None:  # it comes with the extra "bench"
        with pytest.raises(ModuleNotFoundError, match="matplotlib"):
            report.draw_charts()
        return
    forward, _ = report.draw_charts()
    text = forward.read_text()
    assert report.wrong_charts() == []
    for said in ("torch flash", "head_dim 256, causal", "TFLOP/s", "NVIDIA Abacus"):
        assert said in text
    report.draw_charts()
    assert forward.read_text() == text
    stored(*rows_of("fa2", "torch flash", tflops=99.0))
    assert report.wrong_charts() == [
        f"docs/charts/fa2-{op}.svg shows other numbers than the results"
        for op in ("forward", "backward")
    ]


def test_rows_older_than_the_sources_are_said(stored: Store) -> None:
    stored(*rows_of("fa1"))
    assert report.outdated() == [
        f"nvidia-h200.json: fa1: fa1 {op} changed since run 20300101-000000"
        for op in ("backward", "forward")
    ]
    unknown = rows_of("fa1")
    for r in unknown:
        r["options"] = {"algorithm": "fa1"}
        r["sources"] = _digest(r["op"])
    stored(*unknown)
    assert report.outdated() == []


def _digest(op: str) -> str:
    from bench.sources import digest
    from cuflash.cuda.source import find_sources

    return digest(find_sources(), "fa1", op)


def test_a_kernel_that_is_gone_is_said(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "params.cuh").touch()
    monkeypatch.setenv("CUFLASH_CUDA_SRC", str(tmp_path / "sources"))
    stored(*rows_of("fa2-double"))
    assert "nvidia-h200.json: fa2-double: fa2 forward is not in the sources" in report.outdated()


def test_the_command_says_what_is_wrong(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results: fa1 -->\nold\n<!-- end of results -->\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGES", {"README.md": ("fa1", "fa2")})
    stored()
    assert commands._report(write=False) == 1
    assert "the block 'fa1' differs" in capsys.readouterr().out
    stored(*rows_of("fa2"))
    readme.write_text("<!-- results: fa1 -->\n<!-- end of results -->\n" + "")
    assert commands._report(write=False) == 1
    said = capsys.readouterr().out
    assert "the block 'fa2' differs" in said
    assert "docs/charts/fa2-forward.svg is not drawn" in said
