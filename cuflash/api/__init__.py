"""The public functions. What their docstrings say is the contract."""

from __future__ import annotations

from .available import is_available
from .backward import attention_backward
from .forward import attention
from .pullback import Pullback
from .vjp import attention_vjp

__all__ = ["Pullback", "attention", "attention_backward", "attention_vjp", "is_available"]
