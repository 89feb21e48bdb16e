"""The table of a training step under ``jax.jit``."""

from __future__ import annotations

from .markdown import table
from .stored import latest, load

__all__ = ["render"]


def render() -> str:
    """A line for each implementation of each model of the last run; empty without rows."""
    rows = latest(load("nvidia-h200-training-step.json"))
    if not rows:
        return ""
    first = rows[0]
    caption = (
        f"{first['gpu']}, {first['version']}, {first['layers']} layers, width {first['width']}, "
        f"{first['heads']} heads, weights in float32, arithmetic in bfloat16, {first['date']}"
    )
    body = [
        [
            *(str(row["batch"]), str(row["seqlen"]), row["impl"], f"{row['ms']:.1f}"),
            *(f"{row['tokens_per_s']:,}", f"{row['ratio']:.2f}"),
        ]
        for row in rows
    ]
    header = ["batch", "seqlen", "attention", "ms a step", "tokens a second"]
    return f"{caption}\n\n{table([*header, 'times as fast with cuflash'], body)}"
