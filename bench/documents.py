"""Which page shows which block of stored results."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath

__all__ = ["CHARTS", "PAGES", "relocated"]

#: The folder of the charts, relative to the root of the repository, as links in blocks name it.
CHARTS = "docs/charts"

#: The blocks of every page, in their order. Several pages may have the same block.
PAGES: Mapping[str, tuple[str, ...]] = {
    "README.md": ("opening",),
    "docs/guide/jax.md": ("training-step",),
    "docs/results/index.md": ("opening",),
    "docs/results/hopper.md": (
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
        "few",
        "flash3-grid",
        "flash3-models",
        "flash3",
    ),
    "docs/results/earlier-generations.md": (
        "fa2",
        "fa2-float16",
        "fa2-single",
        "fa2-double",
        "fa2-deterministic",
        "fa1",
        "generations",
    ),
    "docs/results/features.md": (
        "sinks",
        "sinks-backward",
        "alibi",
        "alibi-backward",
        "bias",
        "bias-backward",
        "mask",
        "mask-backward",
        "block-mask",
        "block-mask-backward",
        "dropout",
        "dropout-backward",
        "score-mod",
        "score-mod-backward",
        "features-elsewhere",
        "features-elsewhere-backward",
        "residual",
    ),
    "docs/results/sequences-and-caches.md": (
        "packed",
        "packed-backward",
        "flash3-packed",
        "decode",
        "decode-float8",
        "pages",
    ),
    "docs/results/host-and-cpu.md": ("jitted", "jit", "latency", "cold", "cpu"),
    "docs/results/claims.md": ("story-speed", "story-memory", "story-io", "story-share"),
}


def relocated(text: str, page: str) -> str:
    """A block whose links to charts are relative to the page instead of the root."""
    folder = os.path.relpath(CHARTS, PurePosixPath(page).parent)
    return text.replace(f"]({CHARTS}/", f"]({folder}/")
