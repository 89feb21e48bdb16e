"""The charts on the papers' claims, from stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..drawing import Drawing, label_ends
from ..stored import Row
from .device import datasheet
from .speed import STANDARD
from .stored import name_of, of_part

__all__ = ["FILES", "drawings"]

FILES = {
    "speed": ("story-speed-forward.svg", "story-speed-backward.svg"),
    "memory": ("story-memory.svg",),
    "io": ("story-io.svg",),
    "share": ("story-share.svg",),
}
COLORS = {
    STANDARD: "C7",
    "cuflash fa1": "C1",
    "cuflash fa1, filled": "C1",
    "cuflash fa2": "C2",
    "cuflash fa3": "C3",
    "torch cudnn": "0.35",
    "flash-attn-4": "C0",
}

Lines = dict[str, list[list[float]]]


def drawings() -> list[Drawing]:
    """The charts of the parts that have rows."""
    found = []
    for part, make in (("speed", _speed), ("memory", _memory), ("io", _io), ("share", _share)):
        rows = of_part(part)
        found += make(rows) if rows else []
    return found


def _color(name: str) -> str:
    return COLORS.get(name, "C4")


def _lines(rows: Sequence[Row], x: str, y: str) -> Lines:
    found: Lines = {}
    for row in rows:
        if row[y] is not None:
            found.setdefault(name_of(row), []).append([row[x], row[y]])
    return {name: sorted(points) for name, points in found.items()}


def _plot(axis: Any, lines: Lines, **more: Any) -> dict[str, tuple[float, str]]:
    """Draw lines; return the height and the color of each one's end."""
    for name, points in lines.items():
        width = 2.2 if name.startswith("cuflash") else 1.2
        style = "--" if name.endswith("filled") else "-"
        x, y = zip(*points, strict=True)
        axis.plot(x, y, style, marker="o", markersize=4, lw=width, color=_color(name), **more)
    return {name: (points[-1][1], _color(name)) for name, points in lines.items()}


def _lengths(axis: Any, lines: Lines) -> None:
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("seqlen")
    axis.grid(alpha=0.3)


def _speed(rows: Sequence[Row]) -> list[Drawing]:
    found = []
    for file, op in zip(FILES["speed"], ("forward", "backward"), strict=True):
        of_op = [row for row in rows if row["op"] == op]
        places = sorted({(row["head_dim"], row["causal"]) for row in of_op})
        panels = [
            (
                f"{op}, head_dim {dim}, {'causal' if causal else 'full'}",
                _lines(
                    [r for r in of_op if (r["head_dim"], r["causal"]) == (dim, causal)],
                    "seqlen",
                    "tflops",
                ),
            )
            for dim, causal in places
        ]
        panels = [(title, lines) for title, lines in panels if lines]
        if panels:
            first, peak = of_op[0], datasheet(of_op[0]["gpu"])
            title = f"TFLOP/s, {first['dtype']}, {first['gpu']}, {first['date']}"
            found.append(
                Drawing(
                    file,
                    [title, peak, panels],
                    partial(_paint_speed, title=title, peak=peak, panels=panels),
                )
            )
    return found


def _paint_speed(
    pyplot: Any, title: str, peak: float | None, panels: Sequence[tuple[str, Lines]]
) -> Any:
    height = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(
        height, 2, figsize=(12, 3.6 * height + 0.4), squeeze=False, layout="constrained"
    )
    for axis, (name, lines) in zip(axes.flat, panels, strict=False):
        ends = _plot(axis, lines)
        _lengths(axis, lines)
        top = max(rate for points in lines.values() for _, rate in points)
        axis.set_ylim(0, 1.1 * top)
        axis.set(title=name, ylabel="TFLOP/s")
        if peak:
            for share in (0.25, 0.5, 0.75):
                if share * peak < 1.1 * top:
                    axis.axhline(share * peak, color="0.8", lw=0.8, zorder=0)
                    text = f"{100 * share:.0f} % of {peak:.0f}"
                    place = (0.01, share * peak)
                    where = axis.get_yaxis_transform()
                    axis.text(*place, text, transform=where, fontsize="x-small", color="0.5")
        label_ends(axis, ends)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize="medium")
    return figure


def _memory(rows: Sequence[Row]) -> list[Drawing]:
    done = "forward and backward"
    lines = _lines([row for row in rows if row["pass"] == done], "seqlen", "extra_bytes")
    lines = {n: [[x, y / 2**20] for x, y in points if y] for n, points in lines.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return []
    first = rows[0]
    title = f"Extra memory, {done}, {first['heads']} heads of {first['head_dim']}, {first['gpu']}"
    paint = partial(_paint_memory, title=title, lines=lines)
    return [Drawing(FILES["memory"][0], [title, lines], paint)]


def _paint_memory(pyplot: Any, title: str, lines: Lines) -> Any:
    figure, axis = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
    ends = _plot(axis, lines)
    _lengths(axis, lines)
    axis.set_yscale("log")
    axis.set(title=title, ylabel="MiB")
    axis.title.set_fontsize("medium")
    label_ends(axis, ends)
    return figure


def _io(rows: Sequence[Row]) -> list[Drawing]:
    counted = [r for r in rows if r["skipped"] is None and r["dram_read"] is not None]
    some = [r for r in counted if (r["head_dim"], r["seqlen"]) == (64, 16384)]
    fa1 = [r for r in some if r["label"] == "cuflash fa1"]
    if not fa1:
        return []

    def points(x: str, budgets: bool, *ways: str) -> list[list[float]]:
        return sorted(
            [r["blocks"][1] if x == "blocks" else r[x] / 1024, _per_head(r, *ways)]
            for r in fa1
            if (r["budget"] is not None) == budgets and all(r[way] is not None for way in ways)
        )

    panels = [
        [what, {name: points(x, budgets, *ways) for name, ways in _MOVED.items()}]
        for what, x, budgets in (
            ("keys of a block", "blocks", False),
            ("shared memory of a thread block, KiB", "budget", True),
        )
    ]
    others = {
        r["label"]: _per_head(r, "dram_read", "dram_write")
        for r in some
        if r["label"] != "cuflash fa1"
    }
    title = f"FlashAttention-1: GB per head, seqlen 16384, head_dim 64, {fa1[0]['gpu']}"
    paint = partial(_paint_io, title=title, panels=panels, others=others)
    return [Drawing(FILES["io"][0], [title, panels, others], paint)]


_MOVED = {
    "counted": ("count_read", "count_write"),
    "device memory": ("dram_read", "dram_write"),
    "read": ("dram_read",),
    "written": ("dram_write",),
}


def _per_head(row: Row, *ways: str) -> float:
    return round(float(sum(row[way] for way in ways)) / int(row["heads"]) / 1e9, 5)


def _paint_io(pyplot: Any, title: str, panels: Any, others: dict[str, float]) -> Any:
    styles = {"counted": ("0.6", "-", 5.0), "device memory": ("C1", "-", 1.8)}
    styles |= {"read": ("C0", "--", 1.2), "written": ("C4", "--", 1.2)}
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.2), sharey=True, layout="constrained")
    for axis, (what, lines) in zip(axes, panels, strict=True):
        ends = {name: (height, _color(name)) for name, height in others.items()}
        for name, points in lines.items():
            if points:
                color, style, width = styles[name]
                x, y = zip(*points, strict=True)
                axis.plot(x, y, style, marker="o", markersize=4, lw=width, color=color)
                ends[f"FA1, {name}"] = (y[-1], color)
        for name, height in others.items():
            axis.axhline(height, color=_color(name), lw=1.2, ls=":")
        axis.set_xscale("log", base=2)
        ticks = [x for x, _ in lines["counted"]]
        axis.set_xticks(ticks, [f"{x:.0f}" for x in ticks])
        axis.minorticks_off()
        axis.set_yscale("log")
        axis.set(xlabel=what, ylabel="GB per head")
        axis.grid(alpha=0.3)
        label_ends(axis, ends)
    figure.suptitle(title, fontsize="medium")
    return figure


def _share(rows: Sequence[Row]) -> list[Drawing]:
    units = {"tensor": "tensor cores", "exponentials": "exponentials", "fma": "FMA"}
    units |= {
        "issue": "issue slots",
        "shared": "shared memory",
        "l2": "L2",
        "dram": "device memory",
    }
    kernels = [row for row in rows if row.get("tensor") is not None]
    if not kernels:
        return []
    names = [f"{r['label'].split()[-1]} {r['op']} {r['head_dim']}" for r in kernels]
    columns = [[told, [row.get(unit) for row in kernels]] for unit, told in units.items()]
    title = f"Percent of each unit's peak, seqlen {kernels[0]['seqlen']}, {kernels[0]['gpu']}"
    paint = partial(_paint_share, title=title, names=names, columns=columns)
    return [Drawing(FILES["share"][0], [title, names, columns], paint)]


def _paint_share(pyplot: Any, title: str, names: Sequence[str], columns: Any) -> Any:
    figure, axes = pyplot.subplots(
        1, len(columns), figsize=(13, 0.3 * len(names) + 1), sharey=True, layout="constrained"
    )
    places = list(range(len(names)))
    colors = [_color(f"cuflash {name.split()[0]}") for name in names]
    for axis, (told, shares) in zip(axes, columns, strict=True):
        axis.barh(places, [share or 0 for share in shares], color=colors)
        for place, share in zip(places, shares, strict=True):
            text = "" if share is None else f"{share:.0f}"
            axis.text((share or 0) + 2, place, text, va="center", fontsize="x-small")
        axis.set(title=told, xlim=(0, 112))
        axis.title.set_fontsize("small")
        axis.set_xticks((0, 50, 100))
    axes[0].set_yticks(places, names, fontsize="small")
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize="medium")
    return figure
