"""The public functions. Their docstrings are the contract."""

from __future__ import annotations

from .available import is_available
from .backward import attention_backward
from .cache import append_kv, attention_with_kvcache
from .forward import attention
from .pullback import Pullback
from .vjp import attention_vjp

__all__ = [
    "Pullback",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_vjp",
    "attention_with_kvcache",
    "is_available",
]
