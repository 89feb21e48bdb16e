"""Whether launches are being captured into a CUDA graph."""

from __future__ import annotations

__all__ = ["is_capturing"]


def is_capturing() -> bool:
    """Whether CuPy's current stream is capturing: what is launched now runs when a graph does."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    return bool(stream) and bool(cupy.cuda.runtime.streamIsCapturing(stream))
