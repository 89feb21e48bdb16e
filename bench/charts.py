"""TFLOP/s over the sequence length, drawn from stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import documents
from .drawing import Drawing
from .stored import Row, has_feature, implementations, label

__all__ = ["CHARTS", "Chart", "charts_of", "drawing_of", "lines_of", "panels_of"]

CHARTS = Path(__file__).parent.parent / documents.CHARTS
#: A curve needs this many lengths.
FEWEST_LENGTHS = 3


@dataclass(frozen=True)
class Chart:
    """One pass of one set: a panel for each head_dim and mask."""

    file: str
    title: str
    rows: list[Row]


def charts_of(name: str, rows: Sequence[Row]) -> list[Chart]:
    """The charts of a set of cases: one per pass, if the rows have enough lengths.

    If the name of a set ends with its pass, a chart's name has the pass only once. Sets of features
    and sets of mixed shapes have no charts: their problems differ in more than the length.
    """
    charts: list[Chart] = []
    if any(map(has_feature, rows)) or name.startswith(("models", "off-grid")):
        return charts
    for op in ("forward", "backward"):
        of_op = [row for row in rows if row["op"] == op]
        if len({row["seqlen_q"] for row in of_op}) >= FEWEST_LENGTHS:
            of_set = name.removesuffix(f"-{op}")
            title = f"{of_set}, {op}, {of_op[0]['dtype']}, {of_op[0]['gpu']}, {of_op[0]['date']}"
            charts.append(Chart(f"{of_set}-{op}.svg", title, of_op))
    return charts


def panels_of(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Title and rows of every panel."""
    places = sorted({(row["head_dim"], row["causal"]) for row in rows})
    return [
        (
            f"head_dim {dim}, {'causal' if causal else 'full'}",
            [row for row in rows if (row["head_dim"], row["causal"]) == (dim, causal)],
        )
        for dim, causal in places
    ]


def lines_of(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """The points of every line of a panel, by the name of its implementation.

    If a length occurs with several numbers of heads, each number has its own line and is in the
    line's name.
    """
    heads: dict[int, set[int]] = {}
    for row in rows:
        heads.setdefault(row["seqlen_q"], set()).add(row["batch"] * row["heads_q"])
    several = any(len(counts) > 1 for counts in heads.values())
    lines: dict[str, list[tuple[int, float]]] = {}
    for name in implementations(rows):
        for row in rows:
            if label(row) == name:
                line = f"{name}, {row['batch'] * row['heads_q']} heads" if several else name
                lines.setdefault(line, []).append((row["seqlen_q"], row["tflops"]))
    return {line: sorted(points) for line, points in lines.items()}


def drawing_of(chart: Chart) -> Drawing:
    """The drawing of a chart."""
    panels = [(title, lines_of(rows)) for title, rows in panels_of(chart.rows)]
    columns = len({row["causal"] for row in chart.rows})
    content = [chart.title, columns, panels]
    paint = partial(_paint, title=chart.title, columns=columns, panels=panels)
    return Drawing(chart.file, content, paint)


def _paint(
    pyplot: Any,
    title: str,
    columns: int,
    panels: Sequence[tuple[str, dict[str, list[tuple[int, float]]]]],
) -> Any:
    names = list(dict.fromkeys(name for _, lines in panels for name in lines))
    colors = {name: f"C{place % 10}" for place, name in enumerate(names)}
    height = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        height,
        columns,
        figsize=(5 * columns, 3 * height + 1),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for axis, (panel, lines) in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, lines, colors)
    for axis in axes[:, 0]:  # the axes of a row share their limits
        axis.set_ylim(bottom=0)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize="medium")
    handles = {a.get_label(): a for axis in axes.flat for a in axis.get_lines()}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    return figure


def _draw_panel(
    axis: Any, title: str, lines: dict[str, list[tuple[int, float]]], colors: dict[str, str]
) -> None:
    for name, points in lines.items():
        width = 2.5 if name.startswith("cuflash") else 1.2
        axis.plot(*zip(*points, strict=True), marker="o", lw=width, color=colors[name], label=name)
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.set(title=title, xlabel="seqlen", ylabel="TFLOP/s")
    axis.grid(alpha=0.3)
