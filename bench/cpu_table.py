"""The table of the CPU, from stored rows."""

from __future__ import annotations

from typing import Any

from .markdown import table
from .stored import Row, load

__all__ = ["render_cpu"]

_PROBLEM = ("kind", "dtype", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "causal", "op")
#: The most cores that other processes may use in a run that counts as alone.
_QUIET = 0.2
_PEERS = ("whole matrix", "torch", "jax.nn jit")


def render_cpu() -> str:
    """A line for each case and condition, from its last run; empty without rows."""
    rows = [row for row in load("cpu.json") if "condition" in row]
    if not rows:
        return ""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["run"])):
        key = (*(row[name] for name in _PROBLEM), row["condition"])
        if row["impl"] == "cuflash":
            groups[key] = {}  # a later run replaces earlier ones
        groups.setdefault(key, {})[row["impl"]] = row
    newest = [row for found in groups.values() for row in found.values()]
    first = newest[0]
    versions = sorted({row["version"] for row in newest if row["impl"] in _PEERS})
    dates = sorted({row["date"] for row in newest})
    caption = (
        f"{first['cpu']}, {first['cores']} cores, {first['blas']}, {', '.join(versions)}, head_dim "
        f"{first['head_dim']}, {' and '.join(dates)}; a column of a peer says how many times as "
        "fast the library is (jax.nn is compared with the library under jit), as the median over "
        "rounds; others: cores that other processes used meanwhile (loaded: one process for each "
        "core computes products; shared: others ran in a run that was meant to be alone)\n\n"
    )
    header = ["heads", "seqlen", "dtype", "mask", "pass", "cores", "others", "cuflash"]
    header += ["NumPy", "PyTorch", "jax.nn", "memory", "of NumPy's"]
    return caption + table(header, [_line(found) for found in groups.values()])


def _line(found: dict[str, Row]) -> list[str]:
    ours, whole = found["cuflash"], found.get("whole matrix")
    heads = [ours["heads_q"], ours["heads_kv"]]
    lengths = [ours["seqlen_q"], ours["seqlen_kv"]]
    part = ours["peak_mib"] / whole["peak_mib"] if whole else None
    return [
        "/".join(map(str, dict.fromkeys(heads))),
        " x ".join(map(str, dict.fromkeys(lengths))),
        ours["dtype"],
        "causal" if ours["causal"] else "full",
        ours["op"],
        _condition(ours),
        "" if ours["others"] is None else f"{ours['others']:.1f}",
        f"{ours['ms']:.3g} ms" if ours["ms"] < 100 else f"{ours['ms']:.0f} ms",
        *(f"{found[peer]['ratio']:.2f}" if peer in found else "" for peer in _PEERS),
        f"{ours['peak_mib']:.1f} MiB",
        f"{part:.3f}" if part else "",
    ]


def _condition(row: Row) -> str:
    """The requested condition; ``shared`` for a run ``alone`` in which other processes ran."""
    shared = row["condition"] == "alone" and (row["others"] or 0) > _QUIET
    return "shared" if shared else str(row["condition"])
