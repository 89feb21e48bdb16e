"""Times the cases and stores the results."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import Case, select
from .inputs import make_inputs
from .measure import PROTOCOLS, LeftOutError, measure
from .peers import Peer, importable, select_peers

__all__ = ["RESULTS", "common_columns", "results_file", "run", "store"]

RESULTS = Path(__file__).parent / "results"


def run(
    names: str, protocols: str, output: Path | None = None, peers: str | None = None
) -> list[dict[str, Any]]:
    """Time the sets of cases, print a line for each row, and append the rows to the GPU's file."""
    from cuflash.cuda.available import require_device

    cases, asked, timed = select(names), select_peers(peers), select_protocols(protocols)
    require_device()
    common = common_columns()
    found = importable(asked, _say)
    rows: list[dict[str, Any]] = []
    try:
        for case in cases:
            rows += [{**common, **row} for row in _measured(case, found, timed)]
            _free()
    finally:  # keeps what was measured before an error
        if rows:
            store(output or results_file(common["gpu"]), rows)
    if not rows:
        raise SystemExit("nothing was measured")
    return rows


def common_columns() -> dict[str, str]:
    """The columns that all rows of a run share: the time, and the GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "run": now.strftime("%Y%m%d-%H%M%S"),
        "date": now.date().isoformat(),
        "gpu": properties["name"].decode(),
    }


def results_file(gpu: str, kind: str = "") -> Path:
    """The file with the rows of a GPU: its device times, or results of another kind."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower())
    return RESULTS / f"{name}{kind}.json"


def select_protocols(names: str) -> list[str]:
    """The protocols in a comma-separated list."""
    unknown = [name for name in names.split(",") if name not in PROTOCOLS]
    if unknown:
        raise SystemExit(
            f"--protocol: no protocol {unknown[0]!r}; there are {', '.join(PROTOCOLS)}"
        )
    return names.split(",")


def store(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a results file, one row a line; the file is complete at every moment."""
    known = json.loads(path.read_text()) if path.exists() else []
    text = "[\n" + ",\n".join(json.dumps(row) for row in known + rows) + "\n]\n"
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text)
    partial.replace(path)


def _measured(case: Case, peers: Sequence[Peer], protocols: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a case, printed; prints a line if the library cannot do it."""
    import cupy

    try:
        rows = measure(case, peers, protocols, make_inputs(case, cupy), _say)
    except LeftOutError as reason:
        _say(f"left out: {case}: {reason}")
        return []
    for row in rows:
        _say(_line(case, row))
    return rows


def _say(line: str) -> None:
    print(line, flush=True)


def _free() -> None:
    """Return the memory in the pools of CuPy and PyTorch, so that either can use it."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _line(case: Case, row: dict[str, Any]) -> str:
    ratio = ""
    if row["ratio"]:
        ratio = f"  {row['ratio']:.2f} of the best other (at least {row['ratio_low']:.2f})"
    memory = f"  {row['gb_per_s']:>5.0f} GB/s" if "gb_per_s" in row else ""
    return (
        f"{case!s:<52} {row['protocol']:<7} {row['impl']:<15} {row['ms']:>9.3f} ms "
        f"{row['tflops']:>7.1f} TFLOP/s{memory}  error {row['worst_ratio']:.2f}{ratio}"
    )
