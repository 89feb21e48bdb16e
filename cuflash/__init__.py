"""Exact attention for CuPy, NumPy and JAX users, without PyTorch.

``attention(q, k, v)`` computes ``softmax(scale * q k^T) v`` on the GPU where
the arrays are, or with tiled NumPy where there is none, and never holds the
square of the sequence length.
"""

from __future__ import annotations

from . import reference
from .api import Pullback, attention, attention_backward, attention_vjp, is_available
from .errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailableError,
    CompileError,
    CuflashError,
    JaxUnavailableError,
    LaunchError,
    ToolchainError,
    UnsupportedError,
)
from .explanation import Explanation, explain
from .info import info
from .prepared import Prepared, prepare

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendUnavailableError",
    "CompileError",
    "CuflashError",
    "Explanation",
    "JaxUnavailableError",
    "LaunchError",
    "Prepared",
    "Pullback",
    "ToolchainError",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_vjp",
    "explain",
    "info",
    "is_available",
    "prepare",
    "reference",
]
