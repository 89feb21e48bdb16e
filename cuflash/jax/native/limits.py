"""Sizes of the handler's arrays on the stack."""

from __future__ import annotations

__all__ = ["MOST_PARAMETERS", "MOST_TENSORS", "MOST_TEXT"]

#: Bytes of the parameters of a kernel: CUDA takes at most 32764.
MOST_PARAMETERS = 1 << 15
#: Most tensors of a call.
MOST_TENSORS = 64
#: Bytes of a message with its number.
MOST_TEXT = 1024
