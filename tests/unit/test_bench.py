"""The README's tables are the stored results, and stored rows say what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report
from bench.cases import CASES, select
from bench.run import RESULTS, store
from bench.timing import median_ratio

#: What every row of a GPU's results has.
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


def test_the_readme_shows_the_stored_results() -> None:
    text = report.README.read_text()
    assert report.names(text) == ["fa1", "cpu"]
    assert report.check(text) == []


@pytest.mark.parametrize("name", ["fa1", "cpu"])
def test_a_changed_figure_is_noticed(name: str) -> None:
    table = report.render(name)
    assert table.count("\n") > 4
    last = table.rstrip().splitlines()[-1]
    changed = report.README.read_text().replace(last, last.replace("| ", "| 9", 1))
    assert report.check(changed) == [name]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("nvidia-*.json")), ids=lambda p: p.name)
def test_stored_rows_are_whole(path: Path) -> None:
    rows = json.loads(path.read_text())
    assert rows
    for row in rows:
        assert list(row) == ["run", "date", "gpu", *KEYS[3:]]
        assert row["ms"] > 0
        if row["impl"] == "cuflash":
            assert 0 < row["worst_ratio"] <= (1 if row["op"] == "forward" else 2)


def test_storing_appends_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "gpu.json"
    store(path, [{"a": 1}])
    store(path, [{"b": 2}, {"c": 3}])
    assert json.loads(path.read_text()) == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert len(path.read_text().splitlines()) == 5
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


def test_sets_of_cases() -> None:
    assert len(select("fa1")) == 24
    assert len({str(case) for case in select(",".join(CASES))}) == len(select(",".join(CASES)))
    with pytest.raises(SystemExit, match="no set 'fa9'; there are fa1"):
        select("fa1,fa9")


def test_the_ratio_is_of_paired_rounds() -> None:
    ours, theirs = [1.0, 2.0, 4.0] * 7, [2.0, 4.0, 8.0] * 7
    assert median_ratio(ours, theirs) == (2.0, 2.0)
    theirs[:3] = [0.1, 0.1, 0.1]
    assert median_ratio(ours, theirs)[0] == 2.0
