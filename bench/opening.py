"""The opening of README and of the results: all points of the grid, beside the best peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

from . import documents, flash3_table
from .drawing import Drawing, label_ends
from .markdown import table
from .stored import Row, gpu_rows, label, of_set

__all__ = ["CHART", "drawings", "render"]

CHART = "opening.svg"
OURS = "cuflash fa3"
SETS = ("fa3", "fa3-backward")
#: Ratios nearer to one than this are even.
EVEN = 0.005
NAMES = {OURS: "cuflash", "torch cudnn": "cuDNN", "flash-attn-4": "FlashAttention-4"}


def _rows(stored: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by pass; empty if a pass has no rows, or only rows of ours."""
    by_op = {}
    for name in SETS:
        rows = [row for row in of_set(name, stored) if row["protocol"] == "turns"]
        if len({label(row) for row in rows}) > 1:
            by_op[rows[0]["op"]] = rows
    return by_op if len(by_op) == len(SETS) else {}


def render() -> str:
    """The block: a sentence, the chart, the table; empty without rows."""
    stored = gpu_rows()
    by_op = _rows(stored)
    if not by_op:
        return ""
    first, peers = by_op["forward"][0], _peers(by_op)
    names = " and ".join(_name(peer) for peer in peers)
    cells = sum(label(row) == OURS for rows in by_op.values() for row in rows)
    head = (
        f"On an {first['gpu']}, {first['dtype']}, beside {names}, at {cells} "
        f"points (seqlen 512 to 16384, full and causal):\n"
    )
    chart = f"![TFLOP/s of cuflash, {names}]({documents.CHARTS}/{CHART})\n"
    return "\n".join([head, chart, _table(by_op, peers), _by_hand(stored)])


def _peers(by_op: dict[str, list[Row]]) -> list[str]:
    found = dict.fromkeys(label(row) for rows in by_op.values() for row in rows)
    return [name for name in found if name != OURS]


def _name(implementation: str) -> str:
    return NAMES.get(implementation, implementation)


def _with_flash3(row: Row, flash3: Mapping[flash3_table.Point, float]) -> Row:
    """One of our rows, whose ratio also counts FlashAttention-3 if that was timed."""
    beside = flash3.get(flash3_table.point_of(row))
    return row if beside is None else {**row, "ratio": min(row["ratio"], beside)}


def _table(by_op: dict[str, list[Row]], peers: Sequence[str]) -> str:
    flash3 = flash3_table.ratios()
    body = [
        _line(op, dim, [row for row in rows if row["head_dim"] == dim], peers, flash3)
        for op, rows in by_op.items()
        for dim in sorted({row["head_dim"] for row in rows})
    ]
    header = ["pass", "head_dim", *map(_name, [OURS, *peers]), "ratio to the best of them"]
    header += ["worst", "best", "ahead, even, behind"]
    header[2 + 1 + len(peers) : 2 + 1 + len(peers)] = ["to FlashAttention-3"] * bool(flash3)
    told = (
        "TFLOP/s and ratios are geometric means over the points; even is within "
        f"{100 * EVEN:.1f} %."
    )
    if flash3:
        told += (
            " Only JAX can call FlashAttention-3's own kernels, so both were called under "
            "`jax.jit` in runs of their own: the column has the ratio of speeds there, and at each "
            "point the least ratio to a peer counts."
        )
    return table(header, body) + f"\n{told}\n"


def _line(
    op: str,
    dim: int,
    rows: Sequence[Row],
    peers: Sequence[str],
    flash3: Mapping[flash3_table.Point, float],
) -> list[str]:
    ours = [_with_flash3(row, flash3) for row in rows if label(row) == OURS]
    ratios = [row["ratio"] for row in ours]

    def rate(name: str) -> str:
        found = [row["tflops"] for row in rows if label(row) == name]
        return f"{geometric_mean(found):.0f}" if len(found) == len(ours) else ""

    def cell(row: Row) -> str:
        mask = "causal" if row["causal"] else "full"
        return f"{row['ratio']:.2f} ({row['seqlen_q']} {mask})"

    by_ratio = sorted(ours, key=lambda row: row["ratio"])
    ahead = sum(ratio >= 1 + EVEN for ratio in ratios)
    behind = sum(ratio <= 1 - EVEN for ratio in ratios)
    counted = f"{ahead}, {len(ratios) - ahead - behind}, {behind}"
    mean = f"**{geometric_mean(ratios):.2f}**"
    rates = [rate(name) for name in (OURS, *peers)]
    if flash3:
        beside = [flash3[point] for point in map(flash3_table.point_of, ours) if point in flash3]
        rates.append(f"{geometric_mean(beside):.2f}" if len(beside) == len(ours) else "")
    return [op, str(dim), *rates, mean, cell(by_ratio[0]), cell(by_ratio[-1]), counted]


def _by_hand(stored: Sequence[Row]) -> str:
    rates = [row["tflops"] for row in of_set("fa1", stored) if row["impl"] == "cupy by hand"]
    if not rates:
        return ""
    return (
        "Written by hand in CuPy, forward in float16, `softmax(q @ k.T) @ v` runs at "
        f"{min(rates):.1f} to {max(rates):.1f} TFLOP/s.\n"
    )


def drawings() -> list[Drawing]:
    """The chart; none without rows."""
    by_op = _rows(gpu_rows())
    if not by_op:
        return []
    first = by_op["forward"][0]
    title = f"TFLOP/s, {first['dtype']}, {first['gpu']}"
    panels = [
        (op, dim, _lines([row for row in rows if row["head_dim"] == dim]))
        for op, rows in by_op.items()
        for dim in sorted({row["head_dim"] for row in rows})
    ]
    return [Drawing(CHART, [title, panels], partial(_paint, title=title, panels=panels))]


def _lines(rows: Sequence[Row]) -> dict[str, list[list[Any]]]:
    """[seqlen, causal, TFLOP/s] of every implementation; ours is last, so that it is on top."""
    found: dict[str, list[list[Any]]] = {}
    for row in sorted(rows, key=lambda row: (label(row) == OURS, row["causal"], row["seqlen_q"])):
        point = [row["seqlen_q"], row["causal"], row["tflops"]]
        found.setdefault(_name(label(row)), []).append(point)
    return found


def _paint(pyplot: Any, title: str, panels: Sequence[tuple[str, int, Any]]) -> Any:
    columns = len({dim for _, dim, _ in panels})
    figure, axes = pyplot.subplots(
        len(panels) // columns,
        columns,
        figsize=(12, 6),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    names = list(dict.fromkeys(name for _, _, lines in panels for name in lines))
    colors = dict(zip(names, ("C7", "C0", "C3"), strict=False))
    colors[_name(OURS)] = "C3"
    for axis, (op, dim, lines) in zip(axes.flat, panels, strict=True):
        _paint_panel(axis, f"{op}, head_dim {dim}", lines, colors)
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("seqlen")
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
        lines = row[-1].get_lines()
        ends = {line.get_label(): line for line in lines if not line.get_label().startswith("_")}
        label_ends(
            row[-1], {name: (line.get_ydata()[-1], line.get_color()) for name, line in ends.items()}
        )
    figure.suptitle(title, fontsize="medium")
    return figure


def _paint_panel(axis: Any, title: str, lines: Any, colors: dict[str, str]) -> None:
    """Draw the lengths without a mask on the left, and those with a causal mask on the right."""
    lengths = sorted({length for points in lines.values() for length, _, _ in points})
    for name, points in lines.items():
        width = 2.5 if name == _name(OURS) else 1.3
        for causal in (False, True):
            some = [(length, rate) for length, masked, rate in points if masked == causal]
            if not some:
                continue
            x = [lengths.index(length) + causal * (len(lengths) + 0.5) for length, _ in some]
            axis.plot(
                x,
                [rate for _, rate in some],
                marker="o",
                markersize=4,
                lw=width,
                color=colors[name],
                label=name if causal else "_",
            )
    places = [i + causal * (len(lengths) + 0.5) for causal in (0, 1) for i in range(len(lengths))]
    axis.set_xticks(places, 2 * [_short(length) for length in lengths], fontsize="small")
    for place, text in enumerate(("full", "causal")):
        middle = (len(lengths) - 1) / 2 + place * (len(lengths) + 0.5)
        axis.text(
            middle, 0.03, text, transform=axis.get_xaxis_transform(), ha="center", color="0.4"
        )
    axis.set_title(title, fontsize="medium")
    axis.grid(alpha=0.3)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)
