"""The stored rows, and the selection of the rows of a set of cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import run
from .case import CAP
from .cases import CASES, Case
from .lengths import equal_entries

__all__ = [
    "Row",
    "gpu_files",
    "gpu_rows",
    "has_extras",
    "has_feature",
    "implementations",
    "kind",
    "label",
    "latest",
    "load",
    "of_set",
    "problem",
]

Row = dict[str, Any]

#: Columns that describe the problem.
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


#: Options of extras that a call has or lacks.
_GIVEN = ("alibi", "bias", "dbias", "sinks", "dropout_p", "block_mask", "score_mod", "kvcache")

#: Kinds of calls, each with the option that all its rows have; the first match counts.
_KINDS = {
    "deterministic": "deterministic",
    "sinks": "sinks",
    "soft caps": "softcap",
    "ALiBi": "alibi",
    "bias with its gradient": "dbias",
    "bias": "bias",
    "masks": "mask",
    "dropout": "dropout_p",
    "block masks": "block_mask",
    "score modifications": "score_mod",
    "windows": "window_size",
    "packed sequences": "lengths",
    "few queries": "rotated",
}

#: Endings of the names of files whose results are not device times of calls on CuPy arrays.
_OTHER_KINDS = (
    *("-latency", "-story", "-jit", "-jitted"),
    *("-cold", "-residual", "-flash3", "-tiles", "-training-step"),
)


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
    """The rows of the GPU that the tables show."""
    return load("nvidia-h200.json")


def problem(row: Row) -> tuple[Any, ...]:
    """The problem of a row; equal for all implementations that were timed together."""
    return (*(row[name] for name in _PROBLEM), *_asked(row["options"]))


def _problem_of(case: Case) -> tuple[Any, ...]:
    return (*(getattr(case, name) for name in _PROBLEM), *_asked(case.options))


def _asked(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options that change the problem."""
    window = options.get("window_size")
    sides = None if window is None else tuple(window)
    given = (bool(options.get(name)) for name in _GIVEN)
    cached = options.get("page_size"), bool(options.get("float8"))
    extras = options.get("softcap"), *given, options.get("mask"), *cached
    how = bool(options.get("rotated")), bool(options.get("deterministic"))
    return *how, sides, (*extras, options.get("lengths"))


def kind(row: Row) -> str:
    """The kind of a row; summaries have a mean for each kind. Empty for the plain call."""
    return next((name for name, option in _KINDS.items() if row["options"].get(option)), "")


def has_extras(row: Row) -> bool:
    """Whether a row belongs to a call that is compared with the call without its features.

    A soft cap of ``CAP`` is no extra: the score modification is compared with it.
    """
    *_, (softcap, *others, lengths) = _asked(row["options"])
    return any(others) or softcap not in (None, CAP) or equal_entries(lengths) > 0


def has_feature(row: Row) -> bool:
    """Whether a row belongs to a call with windows or extras."""
    return kind(row) not in ("", "deterministic")


def latest(rows: list[Row]) -> list[Row]:
    """The rows of the last run."""
    last = max((row["run"] for row in rows), default=None)
    return [row for row in rows if row["run"] == last]


def label(row: Row) -> str:
    """The name of a row's implementation in a table."""
    algorithm = row["options"].get("algorithm")
    words = [str(row["impl"]), *([algorithm] if algorithm else [])]
    named = ("softcap", "alibi", "bias", "mask", "sinks", "dropout_p", "block_mask")
    named = (*named, "score_mod", "lengths", "kvcache", "float8")
    more = [name for name in named if row["options"].get(name)]
    extras = [f", {name.removesuffix('_p')}" for name in more]
    pages = row["options"].get("page_size")
    extras += [f", pages of {pages}"] if pages else []
    return " ".join(words) + "".join(extras if algorithm else [])


def of_set(name: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of a set of cases from one run: the last of the runs that cover the most cases.

    A run may cover several sets, or only some cases of a set; a table never mixes runs. For a set
    of features, a run with only the plain calls of the comparison does not count.
    """
    cases = CASES[name]()
    options: dict[tuple[Any, ...], list[Any]] = {}
    for case in cases:
        for one in (case, *case.companions):
            options.setdefault(_problem_of(one), []).append(_loaded(one.options))
    found: dict[str, list[Row]] = {}
    for row in rows:
        ours = row["impl"] == "cuflash"
        wanted = options.get(problem(row))
        if wanted is not None and (not ours or _loaded(row["options"]) in wanted):
            found.setdefault(row["run"], []).append(row)
    if any(case.features for case in cases):
        found = {run: some for run, some in found.items() if any(map(has_feature, some))}
    covered = {run: _covered(cases, matches) for run, matches in found.items()}
    best = max(covered, key=lambda run: (covered[run], run), default="")
    return found[best] if covered.get(best) else []


def _loaded(options: Any) -> Any:
    """Options as they come back from a file, which has lists in place of tuples."""
    return json.loads(json.dumps(options))


def _covered(cases: Sequence[Case], rows: list[Row]) -> int:
    """The number of cases of a set that were timed, with all their companions."""
    ours = {(problem(row), row["options"]["algorithm"]) for row in rows if row["sources"]}
    return sum(
        all((_problem_of(one), one.algorithm) in ours for one in (case, *case.companions))
        for case in cases
    )


def implementations(rows: Sequence[Row]) -> list[str]:
    """Labels of the rows: ours first, the newest generation before older ones."""
    labels = {label(row): row for row in rows}
    mine = [name for name, row in labels.items() if row["sources"]]
    ours = sorted(mine, key=lambda name: (has_extras(labels[name]), name), reverse=True)
    return ours + [name for name in labels if name not in ours]
