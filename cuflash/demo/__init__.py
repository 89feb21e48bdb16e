"""A byte-level transformer that learns English through cuflash: ``python -m cuflash demo``.

Forward and backward passes are written out, without an autograd library;
attention and its gradient are :func:`cuflash.attention` and
:func:`cuflash.attention_backward`.
"""

from __future__ import annotations

from .main import plans, run
from .options import PRESETS, Options

__all__ = ["PRESETS", "Options", "plans", "run"]
