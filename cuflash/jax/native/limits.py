"""Room that the handler has on its stack."""

from __future__ import annotations

__all__ = ["MOST_PARAMETERS", "MOST_TENSORS", "MOST_TEXT"]

#: Bytes of the parameters of a kernel: CUDA takes 32764 and no more.
MOST_PARAMETERS = 1 << 15
#: Tensors of a call.
MOST_TENSORS = 64
#: Bytes of a message with its number.
MOST_TEXT = 1024
