"""The stored rows, and which of them are of a set of cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import run
from .cases import CASES, Case

__all__ = [
    "Row",
    "gpu_files",
    "gpu_rows",
    "implementations",
    "label",
    "latest",
    "load",
    "of_set",
    "problem",
]

Row = dict[str, Any]

#: Columns that say what is computed.
_PROBLEM = (
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
)


#: How the names of files of another kind than device times end.
_OTHER_KINDS = ("-latency", "-story", "-jit", "-cold", "-residual")


def load(name: str) -> list[Row]:
    """The rows of a file of results; none if there is no file."""
    path = run.RESULTS / name
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def gpu_files() -> list[Path]:
    """Files of device times, one for each GPU."""
    found = sorted(run.RESULTS.glob("nvidia-*.json"))
    return [path for path in found if not path.stem.endswith(_OTHER_KINDS)]


def gpu_rows() -> list[Row]:
    """The rows of the GPU that the README's tables are of."""
    return load("nvidia-h200.json")


def problem(row: Row) -> tuple[Any, ...]:
    """What a row computed; alike for all implementations that were timed together."""
    deterministic = bool(row["options"].get("deterministic", False))
    return (*(row[name] for name in _PROBLEM), deterministic)


def _problem_of(case: Case) -> tuple[Any, ...]:
    return (*(getattr(case, name) for name in _PROBLEM), case.deterministic)


def latest(rows: list[Row]) -> list[Row]:
    """The rows of the last run."""
    last = max((row["run"] for row in rows), default=None)
    return [row for row in rows if row["run"] == last]


def label(row: Row) -> str:
    """What a table calls the implementation of a row."""
    algorithm = row["options"].get("algorithm")
    return f"{row['impl']} {algorithm}" if algorithm else str(row["impl"])


def of_set(name: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of a set of cases, of one run: the last of those that cover most of it.

    A run may hold several sets, and a set only a part; a table never mixes runs.
    """
    cases = CASES[name]()
    options = {_problem_of(case): _options(case) for case in cases}
    found: dict[str, list[Row]] = {}
    for row in rows:
        ours = row["impl"] == "cuflash"
        wanted = options.get(problem(row))
        if wanted is not None and (not ours or row["options"] in wanted):
            found.setdefault(row["run"], []).append(row)
    covered = {run: _covered(cases, matches) for run, matches in found.items()}
    best = max(covered, key=lambda run: (covered[run], run), default="")
    return found[best] if covered.get(best) else []


def _options(case: Case) -> list[dict[str, Any]]:
    """Of our own rows of a case."""
    return [case.options] + [{**case.options, "algorithm": name} for name in case.beside]


def _covered(cases: Sequence[Case], rows: list[Row]) -> int:
    """How many cases of a set were timed, with all that they have beside them."""
    ours = {(problem(row), row["options"]["algorithm"]) for row in rows if row["sources"]}
    return sum(
        all((_problem_of(case), name) in ours for name in (case.algorithm, *case.beside))
        for case in cases
    )


def implementations(rows: Sequence[Row]) -> list[str]:
    """Labels of the rows: ours first, the newest generation before older ones."""
    labels = {label(row): row for row in rows}
    ours = sorted((name for name, row in labels.items() if row["sources"]), reverse=True)
    return ours + [name for name in labels if name not in ours]
