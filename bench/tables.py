"""The tables of the pages, from stored rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from . import decode_table as decode
from . import elsewhere_table as elsewhere
from . import flash3_table as flash3
from . import float8_table as float8
from . import jitted_table as jitted
from . import opening
from . import pages_table as pages
from . import residual_table as residual
from . import training_step_table as training_step
from .charts import charts_of
from .cpu_table import render_cpu
from .documents import CHARTS
from .lines import main_row, of_the_plain_call, of_turns, place, problems, timed_how
from .markdown import table
from .stored import Row, gpu_rows, implementations, kind, label, latest, load, of_set, problem
from .story import tables as story

__all__ = [
    "COLD",
    "FLASH3",
    "FLASH3_PACKED",
    "JIT",
    "JITTED",
    "LATENCY",
    "RESIDUAL",
    "SETS",
    "TRAINING_STEP",
    "grid",
    "render",
]

#: Sets of cases with tables of the same form; the tile sets have none.
SETS = (
    "fa3",
    "fa3-float16",
    "fa3-shapes",
    "fa3-backward",
    "fa3-backward-shapes",
    "models",
    "models-backward",
    "off-grid-backward",
    "windows",
    "windows-backward",
    "sinks",
    "sinks-backward",
    "alibi",
    "alibi-backward",
    "bias",
    "bias-backward",
    "mask",
    "mask-backward",
    *("dropout", "dropout-backward"),
    *("block-mask", "block-mask-backward"),
    "score-mod",
    "score-mod-backward",
    "packed",
    "packed-backward",
    *decode.SETS,
    *float8.SETS,
    *pages.SETS,
    "few",
    *elsewhere.SETS,
    "fa2",
    "fa2-float16",
    "fa2-single",
    "fa2-double",
    "fa2-deterministic",
    "generations",
)


#: The blocks of the host time of a call, and of first calls.
LATENCY, COLD = "latency", "cold"
#: The blocks of gradients and of programs under ``jax.jit``, and of a training step.
JIT, JITTED, TRAINING_STEP = "jit", "jitted", "training-step"
#: The blocks of FlashAttention-3, which only JAX can call.
FLASH3, FLASH3_PACKED = "flash3", "flash3-packed"
FLASH3_GRID, FLASH3_MODELS = "flash3-grid", "flash3-models"
#: The block of errors and times with a float32 residual.
RESIDUAL = "residual"


def render(name: str) -> str:
    """The table of a block; empty without rows."""
    if name in _ALONE:
        return _ALONE[name]()
    if name in story.BLOCKS:
        return story.render(name)
    rows = of_set(name, gpu_rows())
    for kind_of_table in (elsewhere, decode, float8, pages):
        if name in kind_of_table.SETS:
            return kind_of_table.render(rows)
    return _fa1(rows) if name == "fa1" else grid(name, rows)


def grid(name: str, rows: Sequence[Row]) -> str:
    """TFLOP/s of every implementation, our ratio to the best other one, and a summary.

    If the protocol ``turns`` was run, all rows come from it: there all had the same clock.
    """
    rows = of_turns(rows)
    if not rows:
        return ""
    first = rows[0]
    how = timed_how(first["protocol"])
    parts = [f"{first['gpu']}, {first['dtype']}, TFLOP/s, {how}, {first['date']}\n"]
    for op in ("forward", "backward"):
        of_op = [row for row in rows if row["op"] == op]
        if of_op:
            parts += [_summary(op, of_op) + "\n", _grid_table(of_op)]
    parts += [f"![{chart.title}]({CHARTS}/{chart.file})\n" for chart in charts_of(name, rows)]
    return "\n".join(parts)


#: The name of the column that compares a call with the call without its extra.
_BESIDE = {
    "sinks": "of the call without sinks",
    "soft caps": "of the call without a cap",
    "ALiBi": "of the call without slopes",
    "bias": "of the call without a bias",
    "bias with its gradient": "of the call without a bias",
    "masks": "of the call without an array",
    "dropout": "of the call without dropout",
    "block masks": "of the dense call",
    "score modifications": "of the call with softcap",
}
#: Options that get a column of their own if any row has them.
_ASKED = {"deterministic": "deterministic", "dbias": "gradient of the bias"}


def _grid_table(rows: list[Row]) -> str:
    names = implementations(rows)
    asked = [option for option in _ASKED if any(row["options"].get(option) for row in rows)]
    beside = next((_BESIDE[kind(row)] for row in rows if kind(row) in _BESIDE), None)
    body = []
    for same in problems(rows):
        cells = {
            label(row): f"{row['tflops']:.{0 if row['tflops'] >= 99.5 else 1}f}" for row in same
        }
        ours = main_row(same)
        body.append(
            [
                *place(same[0]),
                *(_yes(ours["options"].get(option)) for option in asked),
                *(cells.get(name, "") for name in names),
                f"{ours['ratio']:.2f}" if ours["ratio"] else "",
                f"{ours['ratio_low']:.2f}" if ours["ratio"] else "",
                *([of_the_plain_call(same)] if beside else []),
            ]
        )
    header = ["head_dim", "batch · heads", "seqlen", "mask"]
    header += [_ASKED[option] for option in asked]
    header += [*names, "ratio to the best other", "at least"]
    return table([*header, *([beside] if beside else [])], body)


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _summary(op: str, rows: list[Row]) -> str:
    """The geometric mean and the worst of our ratios for each kind of call."""
    mains = [main for main in map(main_row, problems(rows)) if main["ratio"]]
    if not mains:
        return f"**{op.capitalize()}**: nothing else was timed."
    kinds: dict[str, list[Row]] = {}
    for main in mains:
        kinds.setdefault(kind(main) or op, []).append(main)
    return " ".join(
        f"**{name[0].upper()}{name[1:]}**: {_mean_and_worst(alike)}"
        for name, alike in kinds.items()
    )


def _mean_and_worst(mains: list[Row]) -> str:
    mean = geometric_mean(row["ratio"] for row in mains)
    worst = min(mains, key=lambda row: row["ratio"])
    dim, heads, seqlen, mask = place(worst)
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
                *place(row),
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


#: Blocks that belong to no set of cases.
_ALONE: Mapping[str, Callable[[], str]] = {
    "cpu": render_cpu,
    "opening": opening.render,
    LATENCY: _latency,
    COLD: _cold,
    JIT: _jit,
    JITTED: jitted.render,
    TRAINING_STEP: training_step.render,
    FLASH3: flash3.render,
    FLASH3_PACKED: lambda: flash3.render(packed=True),
    FLASH3_GRID: lambda: flash3.render_sets(flash3.GRID),
    FLASH3_MODELS: lambda: flash3.render_sets(flash3.MODELS),
    RESIDUAL: residual.render,
}
