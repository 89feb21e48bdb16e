"""The tables on the pages match the stored results, and stored rows are complete."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench_main
from bench import report
from bench.__main__ import ended_as_by_an_error
from bench.cases import CASES, Case, select
from bench.documents import PAGES
from bench.run import select_protocols, store
from bench.stored import gpu_files
from bench.story.tables import BLOCKS as STORY
from bench.tables import (
    COLD,
    FLASH3,
    FLASH3_GRID,
    FLASH3_MODELS,
    FLASH3_PACKED,
    JIT,
    JITTED,
    LATENCY,
    RESIDUAL,
    SETS,
    TRAINING_STEP,
)
from cuflash import BackendUnavailableError

#: Columns of every row of a GPU's results.
KEYS = [
    "run",
    "date",
    "gpu",
    "sources",
    "impl",
    "version",
    "op",
    "dtype",
    "batch",
    "heads_q",
    "heads_kv",
    "head_dim",
    "head_dim_v",
    "seqlen_q",
    "seqlen_kv",
    "causal",
    "options",
    "plan",
    "protocol",
    "ms",
    "spread",
    "tflops",
    "ratio",
    "ratio_low",
    "worst_ratio",
]

#: Rows that are timed on rotated copies have a column of bytes per second after this one.
RATE = KEYS.index("tflops")


def test_the_pages_show_the_stored_results() -> None:
    assert report.faults() == []
    assert report.wrong_charts() == []


def test_every_block_of_results_has_a_page() -> None:
    single = ("fa1", "cpu", LATENCY, COLD, JIT, JITTED, RESIDUAL)
    of_flash3 = (FLASH3, FLASH3_GRID, FLASH3_MODELS, FLASH3_PACKED)
    every = {"opening", *SETS, *single, *of_flash3, TRAINING_STEP, *STORY}
    listed = [name for blocks in PAGES.values() for name in blocks]
    assert set(listed) == every
    assert sorted(listed) == sorted([*every, "opening"])  # README and a page show "opening"


@pytest.mark.parametrize(
    ("page", "name"),
    [("docs/results/earlier-generations.md", "fa1"), ("docs/results/host-and-cpu.md", "cpu")],
)
def test_a_changed_figure_is_noticed(page: str, name: str) -> None:
    table = report.render(name)
    assert table.count("\n") > 4
    last = table.rstrip().splitlines()[-1]
    text = (report.ROOT / page).read_text("utf-8")
    assert report.check(page, text) == []
    changed = text.replace(last, last.replace("| ", "| 9", 1))
    assert report.check(page, changed) == [name]


@pytest.mark.parametrize("path", gpu_files(), ids=lambda p: p.name)
def test_stored_rows_are_whole(path: Path) -> None:
    rows = json.loads(path.read_text())
    assert rows
    for row in rows:
        more = ["gb_per_s"] if row["options"].get("rotated") else []
        assert list(row) == [*KEYS[: RATE + 1], *more, *KEYS[RATE + 1 :]]
        assert row["ms"] > 0
        if row["impl"] == "cuflash":
            assert 0 < row["worst_ratio"] <= _most(row)


def _most(row: dict[str, Any]) -> float:
    """The largest allowed ``worst_ratio``: in 16 bits, the limit of the tests.

    It is larger in float32 and float64, because the ratio does not count sums of 4096 terms.
    """
    if row["dtype"] in ("float32", "float64"):
        return 25
    return 1 if row["op"] == "forward" else 2


def test_storing_appends_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "gpu.json"
    store(path, [{"a": 1}])
    store(path, [{"b": 2}, {"c": 3}])
    assert json.loads(path.read_text()) == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert len(path.read_text().splitlines()) == 5
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


SIZES = {
    "fa1": 24,
    "fa1-tiles": 15,
    "fa2": 48,
    "fa2-float16": 48,
    "fa2-single": 4,
    "fa2-double": 4,
    "fa2-deterministic": 16,
    "generations": 40,
    "fa3": 24,
    "fa3-float16": 24,
    "fa3-shapes": 7,
    "fa3-backward": 24,
    "fa3-backward-shapes": 7,
    "models": 10,
    "models-backward": 10,
    "off-grid": 8,
    "off-grid-backward": 8,
    "windows": 5,
    "windows-backward": 6,
    "sinks": 2,
    "sinks-backward": 2,
    "softcap": 3,
    "softcap-backward": 3,
    "alibi": 2,
    "alibi-backward": 2,
    "bias": 4,
    "bias-backward": 8,
    "mask": 8,
    "mask-backward": 8,
    "dropout": 10,
    "dropout-backward": 10,
    "block-mask": 2,
    "block-mask-backward": 2,
    "score-mod": 4,
    "score-mod-backward": 4,
    "packed": 5,
    "packed-backward": 5,
    "decode": 10,
    "decode-float8": 10,
    "batches": 40,
    "drafts": 4,
    "pages": 4,
    "few": 4,
    "features-elsewhere": 15,
    "features-elsewhere-backward": 15,
}


def test_a_run_that_is_told_to_end_keeps_what_it_has() -> None:
    """A time limit sends SIGTERM, which would end Python before the rows are stored."""
    before = signal.getsignal(signal.SIGTERM)
    kept = []

    def run() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            kept.append("rows")

    with pytest.raises(SystemExit) as ended, ended_as_by_an_error():
        run()
    assert ended.value.code == 128 + signal.SIGTERM
    assert kept
    assert signal.getsignal(signal.SIGTERM) == before


def test_sets_of_cases() -> None:
    assert {name: len(select(name)) for name in CASES} == SIZES
    for name in CASES:
        assert len({str(case) for case in select(name)}) == SIZES[name]
    with pytest.raises(SystemExit, match="no set 'fa9'; there are fa1"):
        select("fa1,fa9")


def test_a_case_of_two_sets_is_timed_once() -> None:
    assert len(select("fa2,fa2-deterministic")) == 48 + 8
    assert len(select("fa1,fa1")) == 24


def test_the_grid_has_as_many_tokens_and_as_wide_a_layer_everywhere() -> None:
    for case in select("fa2,fa2-float16"):
        assert case.batch * case.seqlen_q == 16384
        assert case.heads_q * case.head_dim == 2048
        assert case.algorithm == "fa2"
    assert {case.dtype for case in select("fa2")} == {"bfloat16"}
    assert {case.dtype for case in select("fa2-float16")} == {"float16"}
    grid = {(c.op, c.head_dim, c.seqlen_q, c.causal) for c in select("fa2")}
    assert len(grid) == 2 * 3 * 4 * 2


def test_the_third_generation_has_the_grid_of_the_second() -> None:
    """Both generations have the same cases for these passes, so that figures can be compared."""
    for ours, theirs, op, widths in (
        ("fa3", "fa2", "forward", {64, 128, 256}),
        ("fa3-float16", "fa2-float16", "forward", {64, 128, 256}),
        ("fa3-backward", "fa2", "backward", {64, 128, 256}),
    ):
        served = (c for c in select(theirs) if c.op == op and c.head_dim in widths)
        assert set(select(ours)) == {replace(c, algorithm="fa3") for c in served}


def test_a_case_prints_heads_and_widths_that_differ() -> None:
    names = [str(case) for case in select("fa3-shapes")]
    assert "fa3 forward bfloat16 2x8192x16x192/128 causal" in names
    assert "fa3 forward bfloat16 2x8192x32/8x128 causal" in names


@pytest.mark.parametrize(("name", "dtype"), [("fa2-single", "float32"), ("fa2-double", "float64")])
def test_the_wide_types_have_one_shape(name: str, dtype: str) -> None:
    cases = select(name)
    assert {(c.batch, c.seqlen_q, c.heads_q, c.causal) for c in cases} == {(1, 4096, 16, False)}
    assert {(c.op, c.head_dim) for c in cases} == {
        (op, dim) for op in ("forward", "backward") for dim in (64, 128)
    }
    assert {c.dtype for c in cases} == {dtype}


def test_the_deterministic_pass_has_its_like_without() -> None:
    cases = select("fa2-deterministic")
    assert {c.op for c in cases} == {"backward"}
    for case in cases:
        assert replace(case, deterministic=not case.deterministic) in cases
        assert case.options.get("deterministic", False) is case.deterministic


def test_generations_are_of_one_problem() -> None:
    cases = select("generations")
    assert {(c.algorithm, c.beside, c.dtype) for c in cases} == {("fa2", ("fa1",), "float16")}
    assert {c.batch * c.heads_q for c in cases} == {8, 64, 256}
    assert {c.seqlen_q for c in cases} == {512, 2048, 8192, 16384}
    assert {c.head_dim for c in cases} == {64, 128}


def test_operations_are_counted_as_the_papers_count_them() -> None:
    case = Case("forward", "float16", 2, 3, 3, 64, 32, 10, 20, False, "fa2")
    assert case.scores == 1200
    assert case.flops == 2 * 1200 * 96
    assert replace(case, op="backward", causal=True).flops == 1.25 * case.flops


def test_an_unknown_protocol_is_named() -> None:
    assert select_protocols("turns,rested") == ["turns", "rested"]
    with pytest.raises(SystemExit, match="no protocol 'sprint'; there are rested, turns"):
        select_protocols("sprint")


@pytest.mark.parametrize("command", ["run", "tune"])
def test_without_a_gpu_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def none() -> int:
        raise BackendUnavailableError("there is no device")

    monkeypatch.setattr("cuflash.cuda.available.require_device", none)
    monkeypatch.setattr(sys, "argv", ["bench", command, "--cases", "fa3"])
    assert bench_main.main() == 2
    assert capsys.readouterr().err == f"python -m bench {command}: there is no device\n"
