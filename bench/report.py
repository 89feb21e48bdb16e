"""Turns stored results into the README's tables, and says which are older than the sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .run import RESULTS

__all__ = ["check", "render", "write"]

README = Path(__file__).parent.parent / "README.md"
_BLOCK = "<!-- results: {name} -->\n(.*?)<!-- end of results -->"


def render(name: str) -> str:
    """The table of a block of the README."""
    return {"fa1": _fa1, "cpu": _cpu}[name]()


def names(text: str) -> list[str]:
    """The blocks that a text has."""
    return re.findall(r"<!-- results: (\w+) -->", text)


def check(text: str) -> list[str]:
    """Names of the blocks of a text that differ from the stored results."""
    stale = []
    for name in names(text):
        found = re.search(_BLOCK.format(name=name), text, re.DOTALL)
        if not found or found[1] != render(name):
            stale.append(name)
    return stale


def write(path: Path = README) -> None:
    """Bring the blocks of the README up to date."""
    text = path.read_text()
    for name in names(text):
        block = f"<!-- results: {name} -->\n{render(name)}<!-- end of results -->"
        text = re.sub(_BLOCK.format(name=name), lambda _, b=block: b, text, flags=re.DOTALL)
    path.write_text(text)


def outdated() -> list[str]:
    """A line for every pass whose kernel has changed since its last stored run."""
    from cuflash.cuda.source import find_sources, source_digest

    root, lines = find_sources(), []
    for path in sorted(RESULTS.glob("*.json")):
        ours = [row for row in _load(path.name) if row.get("sources")]
        for algorithm, op in sorted({(row["options"]["algorithm"], row["op"]) for row in ours}):
            rows = [r for r in ours if (r["options"]["algorithm"], r["op"]) == (algorithm, op)]
            last = _latest(rows)[0]
            if last["sources"] != source_digest(root, algorithm, op):
                lines.append(f"{path.name}: {algorithm} {op} changed since run {last['run']}")
    return lines


def _load(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the last run."""
    last = max((row["run"] for row in rows), default=None)
    return [row for row in rows if row["run"] == last]


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cells) + " |" for cells in body]
    return "\n".join(lines) + "\n"


def _fa1() -> str:
    rows = [row for row in _load("nvidia-h200.json") if row["protocol"] == "rested"]
    whole = [row for row in rows if "blocks" not in row["options"]]
    rows = _latest([row for row in whole if row["options"].get("algorithm", "fa1") == "fa1"])
    body = []
    for row in rows:
        if row["impl"] != "cuflash" or row["op"] != "forward":
            continue
        same = [r for r in rows if _key(r) == _key(row)]
        backward = next(r for r in same if r["op"] == "backward" and r["impl"] == "cuflash")
        hand = [r for r in same if r["impl"] == "cupy by hand"]
        body.append(
            [
                str(row["head_dim"]),
                str(row["batch"] * row["heads_q"]),
                str(row["seqlen_q"]),
                "causal" if row["causal"] else "full",
                f"{row['tflops']:.0f}",
                f"{backward['tflops']:.0f}",
                f"{hand[0]['tflops']:.1f}" if hand else "",
                f"{row['tflops'] / hand[0]['tflops']:.1f}" if hand else "",
            ]
        )
    if not rows:
        return ""
    caption = f"{rows[0]['gpu']}, float16, TFLOP/s, {rows[0]['date']}\n\n"
    header = ["head_dim", "batch · heads", "seqlen", "mask", "forward", "backward"]
    return caption + _table([*header, "CuPy by hand, forward", "ratio"], body)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("batch", "heads_q", "head_dim", "seqlen_q", "causal", "protocol"))


def _cpu() -> str:
    rows = _latest(_load("cpu.json"))
    if not rows:
        return ""
    whole = {row["op"]: row for row in rows if row["impl"] == "whole matrix"}
    body = [
        [
            row["impl"],
            row["op"],
            f"{row['ms']:.0f} ms",
            f"{row['peak_mib']:.0f} MiB",
            f"{whole[row['op']]['ms'] / row['ms']:.1f}",
            f"{row['peak_mib'] / whole[row['op']]['peak_mib']:.3f}",
        ]
        for row in rows
    ]
    first = rows[0]
    caption = (
        f"{first['cpu']}, {first['version']}, float32, {first['heads']} heads, "
        f"head_dim {first['head_dim']}, seqlen {first['seqlen']}, {first['date']}\n\n"
    )
    header = ["", "pass", "time", "peak memory", "times as fast", "part of its memory"]
    return caption + _table(header, body)
