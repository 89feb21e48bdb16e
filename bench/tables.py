"""The README's tables, from stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from . import flash3_table as flash3
from . import opening
from . import residual_table as residual
from .cases import mask_text
from .charts import charts_of
from .cpu_table import render_cpu
from .markdown import table
from .stored import Row, gpu_rows, implementations, kind, label, latest, load, of_set, problem
from .story import tables as story

__all__ = ["COLD", "FLASH3", "JIT", "LATENCY", "RESIDUAL", "SETS", "grid", "render"]

#: Sets of cases that have a table like one another; the tile sets have none.
SETS = (
    "fa3",
    "fa3-float16",
    "fa3-shapes",
    "fa3-backward",
    "fa3-backward-shapes",
    "windows",
    "windows-backward",
    "sinks",
    "sinks-backward",
    "fa2",
    "fa2-float16",
    "fa2-single",
    "fa2-double",
    "fa2-deterministic",
    "generations",
)


#: The block of the host time of a call.
LATENCY = "latency"
#: That of first calls.
COLD = "cold"
#: And that of gradients under ``jax.jit``.
JIT = "jit"
#: And that of FlashAttention-3, which JAX alone can call.
FLASH3 = "flash3"
#: And that of errors and times with a float32 residual.
RESIDUAL = "residual"


def render(name: str) -> str:
    """The table of a block of the README; empty without rows."""
    if name == "cpu":
        return render_cpu()
    if name == "opening":
        return opening.render()
    if name in story.BLOCKS:
        return story.render(name)
    if name == LATENCY:
        return _latency()
    if name == JIT:
        return _jit()
    if name == FLASH3:
        return flash3.render()
    if name == COLD:
        return _cold()
    if name == RESIDUAL:
        return residual.render()
    rows = of_set(name, gpu_rows())
    return _fa1(rows) if name == "fa1" else grid(name, rows)


def grid(name: str, rows: Sequence[Row]) -> str:
    """TFLOP/s of every implementation, our ratio to the best other one, and a summary.

    All of it is of the protocol ``turns`` if that was run: the same clock for all.
    """
    turns = [row for row in rows if row["protocol"] == "turns"]
    rows = turns or list(rows)
    if not rows:
        return ""
    first = rows[0]
    how = "taking turns" if turns else "each after a rest"
    parts = [f"{first['gpu']}, {first['dtype']}, TFLOP/s, {how}, {first['date']}\n"]
    for op in ("forward", "backward"):
        of_op = [row for row in rows if row["op"] == op]
        if of_op:
            parts += [_summary(op, of_op) + "\n", _grid_table(of_op)]
    parts += [f"![{chart.title}](bench/charts/{chart.file})\n" for chart in charts_of(name, rows)]
    return "\n".join(parts)


#: What a column is called that compares a call with the one without its extra.
_BESIDE = {"sinks": "of the call without sinks", "soft caps": "of the call without a cap"}


def _grid_table(rows: list[Row]) -> str:
    names = implementations(rows)
    deterministic = any(row["options"].get("deterministic") for row in rows)
    beside = next((_BESIDE[kind(row)] for row in rows if kind(row) in _BESIDE), None)
    body = []
    for same in _problems(rows):
        cells = {
            label(row): f"{row['tflops']:.{0 if row['tflops'] >= 99.5 else 1}f}" for row in same
        }
        ours = _main(same)
        body.append(
            [
                *_place(same[0]),
                *([_yes(same[0]["options"].get("deterministic"))] if deterministic else []),
                *(cells.get(name, "") for name in names),
                f"{ours['ratio']:.2f}" if ours["ratio"] else "",
                f"{ours['ratio_low']:.2f}" if ours["ratio"] else "",
                *([_of_the_plain_call(same)] if beside else []),
            ]
        )
    header = ["head_dim", "batch · heads", "seqlen", "mask"]
    header += ["deterministic"] if deterministic else []
    header += [*names, "ratio to the best other", "at least"]
    return table([*header, *([beside] if beside else [])], body)


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _of_the_plain_call(same: list[Row]) -> str:
    """The speed with an extra over that without, whose own ratio is the other way round."""
    extras = [any(row["options"].get(name) for name in ("softcap", "sinks")) for row in same]
    ours = [row for row, extra in zip(same, extras, strict=True) if row["sources"] and not extra]
    plain = [row["ratio"] for row in ours]
    return f"{1 / plain[0]:.3f}" if plain and plain[0] else ""


def _place(row: Row) -> list[str]:
    """Where in a grid of problems a row stands."""
    return [
        _pair(row["head_dim"], row["head_dim_v"]),
        _pair(row["batch"] * row["heads_q"], row["batch"] * row["heads_kv"]),
        str(row["seqlen_q"]),
        mask_text(row["causal"], row["options"].get("window_size")),
    ]


def _pair(of_q: int, of_kv: int) -> str:
    """A number of the queries, and that of the keys or values where it is another one."""
    return f"{of_q}" if of_q == of_kv else f"{of_q}/{of_kv}"


def _problems(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of every problem that ours was timed on, in the order they were stored.

    A call with an extra and the one without are of one line.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        *apart, _ = problem(row)
        groups.setdefault(tuple(apart), []).append(row)
    return [same for same in groups.values() if any(row["sources"] for row in same)]


def _main(rows: list[Row]) -> Row:
    """Our row of a problem: the newest generation's, with its extra if there is one."""
    return max((row for row in rows if row["sources"]), key=label)


def _summary(op: str, rows: list[Row]) -> str:
    """Geometric means of our ratios, and the worst of them; each kind of call apart."""
    mains = [main for main in map(_main, _problems(rows)) if main["ratio"]]
    if not mains:
        return f"**{op.capitalize()}**: nothing else was timed."
    kinds: dict[str, list[Row]] = {}
    for main in mains:
        kinds.setdefault(kind(main) or op, []).append(main)
    return " ".join(
        f"**{name.capitalize()}**: {_mean_and_worst(alike)}" for name, alike in kinds.items()
    )


def _mean_and_worst(mains: list[Row]) -> str:
    mean = geometric_mean(row["ratio"] for row in mains)
    worst = min(mains, key=lambda row: row["ratio"])
    dim, heads, seqlen, mask = _place(worst)
    return (
        f"{label(worst)} is {mean:.2f} times as fast as the best other "
        f"(geometric mean of {len(mains)}); worst {worst['ratio']:.2f} at head_dim {dim}, "
        f"batch · heads {heads}, seqlen {seqlen}, {mask}."
    )


def _fa1(rows: list[Row]) -> str:
    rows = [row for row in rows if row["protocol"] == "rested"]
    body = []
    for row in rows:
        if row["impl"] != "cuflash" or row["op"] != "forward":
            continue
        same = [r for r in rows if problem(r)[1:] == problem(row)[1:]]
        backward = [r for r in same if r["op"] == "backward" and r["impl"] == "cuflash"]
        hand = [r for r in same if r["op"] == "forward" and r["impl"] == "cupy by hand"]
        body.append(
            [
                *_place(row),
                f"{row['tflops']:.0f}",
                f"{backward[0]['tflops']:.0f}" if backward else "",
                f"{hand[0]['tflops']:.1f}" if hand else "",
                f"{row['tflops'] / hand[0]['tflops']:.1f}" if hand else "",
            ]
        )
    if not rows:
        return ""
    caption = f"{rows[0]['gpu']}, float16, TFLOP/s, rested, {rows[0]['date']}\n\n"
    header = ["head_dim", "batch · heads", "seqlen", "mask", "forward", "backward"]
    return caption + table([*header, "CuPy by hand, forward", "ratio"], body)


def _latency() -> str:
    rows = latest(load("nvidia-h200-latency.json"))
    if not rows:
        return ""
    kinds = [kind for kind in ("cycling", "repeating", "prepared") if _of_kind(rows, kind)]
    lines = dict.fromkeys((label(row), row["op"]) for row in rows)
    body = []
    for name, op in lines:
        mine = [row for row in rows if (label(row), row["op"]) == (name, op)]
        cells = [_of_kind(mine, kind) for kind in kinds]
        body.append([name, op, *(f"{found[0]['us']:.1f}" if found else "" for found in cells)])
    first = rows[0]
    caption = (
        f"{first['gpu']}, {first['cpu']}, Python {first['python']}, {first['dtype']}, "
        f"batch · heads {first['batch'] * first['heads_q']}, head_dim {first['head_dim']}, seqlen "
        f"{first['seqlen_q']}, µs of the host for a call, {first['date']}\n\n"
    )
    return caption + table(["", "pass", *kinds], body)


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["what"] == kind]


def _jit() -> str:
    rows = latest(load("nvidia-h200-jit.json"))
    if not rows:
        return ""
    body = [
        [
            row["impl"],
            "causal" if row["causal"] else "full",
            f"{row['ms']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f}",
        ]
        for row in rows
    ]
    first = rows[0]
    caption = (
        f"{first['gpu']}, {first['version']}, {first['dtype']}, batch {first['batch']}, "
        f"{first['heads_q']} heads, head_dim {first['head_dim']}, seqlen {first['seqlen_q']}, "
        f"{first['op']}, ms, {first['date']}\n\n"
    )
    return caption + table(["", "mask", "ms", "times as fast as the plain calls", "at least"], body)


def _cold() -> str:
    rows = latest(load("nvidia-h200-cold.json"))
    if not rows:
        return ""
    body = [
        [
            *(row["algorithm"], row["op"], str(row["head_dim"])),
            *(f"{row[name]:.0f}" for name in ("compiled_ms", "loaded_ms")),
        ]
        for row in rows
    ]
    first = rows[0]
    caption = (
        f"{first['gpu']}, {first['cpu']}, Python {first['python']}, {first['dtype']}, "
        f"the first call of a process, ms, {first['date']}\n\n"
    )
    return caption + table(["", "pass", "head_dim", "compiled", "from disk"], body)
