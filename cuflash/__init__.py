"""Exact attention for CuPy, NumPy and JAX users, without PyTorch.

``attention(q, k, v)`` computes ``softmax(scale * q k^T) v`` on the GPU that holds the arrays, or
with tiled NumPy where there is no GPU. Its memory never grows with the square of the sequence
length. ``cuflash.jax.attention`` does the same inside ``jax.jit``; the module is imported on first
use.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import reference
from .api import (
    Pullback,
    append_kv,
    attention,
    attention_backward,
    attention_vjp,
    attention_with_kvcache,
    is_available,
)
from .block_mask import BlockMask
from .dropout import dropout_mask
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
from .explained import Explanation
from .explanation import explain
from .info import Info, info
from .merging import merge
from .packing import cu_seqlens_of, pack, unpack
from .prepared import Prepared, prepare
from .score_mod import ScoreMod

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendUnavailableError",
    "BlockMask",
    "CompileError",
    "CuflashError",
    "Explanation",
    "Info",
    "JaxUnavailableError",
    "LaunchError",
    "Prepared",
    "Pullback",
    "ScoreMod",
    "ToolchainError",
    "UnsupportedError",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_vjp",
    "attention_with_kvcache",
    "cu_seqlens_of",
    "dropout_mask",
    "explain",
    "info",
    "is_available",
    "merge",
    "pack",
    "prepare",
    "reference",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """The module ``cuflash.jax``, which needs JAX.

    Raises
    ------
    JaxUnavailableError
        If JAX cannot be imported.
    """
    if name == "jax":
        return importlib.import_module(f"{__name__}.jax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names. ``jax`` is among them only once it is imported: listing needs no JAX."""
    special = [name for name in globals() if name.startswith("__")]
    return sorted([*special, *__all__, *(["jax"] if "jax" in globals() else [])])
