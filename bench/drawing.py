"""Writes a drawing as SVG with a digest of its content, which shows whether the file is stale.

The same content and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Drawing", "draw", "fault", "label_ends"]


@dataclass(frozen=True)
class Drawing:
    """One file of ``docs/charts``.

    Attributes
    ----------
    file
        The name of the file.
    content
        The whole content of the drawing, as plain values.
    paint
        Makes the figure, given ``matplotlib.pyplot``.
    """

    file: str
    content: Any
    paint: Callable[[Any], Any]

    @property
    def mark(self) -> str:
        """The text in the file that identifies its content."""
        text = json.dumps(self.content, sort_keys=True)
        return f"shows {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def draw(drawing: Drawing, folder: Path) -> Path:
    """Write the file; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "none"}):
        figure = drawing.paint(pyplot)
        path = folder / drawing.file
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": drawing.mark})
        pyplot.close(figure)
    return path


def fault(drawing: Drawing, folder: Path) -> str | None:
    """What is wrong with the file, or None."""
    path = folder / drawing.file
    if not path.exists():
        return "is not drawn"
    return None if drawing.mark in path.read_text() else "shows other numbers than the results"


def label_ends(axis: Any, ends: Mapping[str, tuple[float, str]], gap: float = 0.065) -> None:
    """Write names beside the right ends of lines, moved apart where they would overlap.

    ``ends`` has the height and the color of every line; ``gap`` is a fraction of the axis. Call it
    when the limits of the axis are final.
    """
    places = spread(
        {
            name: float(axis.transAxes.inverted().transform(axis.transData.transform((1, y)))[1])
            for name, (y, _) in ends.items()
        },
        gap,
    )
    for name, place in places.items():
        axis.text(
            1.015,
            place,
            name,
            transform=axis.transAxes,
            color=ends[name][1],
            fontsize="small",
            va="center",
        )


def spread(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """The same positions in order, at least ``gap`` apart and moved as little as possible."""
    found: list[tuple[list[str], float]] = []  # groups of names that touch, and their middles
    for name in sorted(places, key=lambda one: places[one]):
        group, middle = [name], places[name]
        while found and middle - found[-1][1] < gap * (len(group) + len(found[-1][0])) / 2:
            below, _ = found.pop()
            group = below + group
            middle = sum(places[one] for one in group) / len(group)
        found.append((group, middle))
    return {
        name: middle + gap * (place - (len(group) - 1) / 2)
        for group, middle in found
        for place, name in enumerate(group)
    }
