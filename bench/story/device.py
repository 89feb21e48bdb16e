"""The current GPU, for the parts that measure on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..timing import Clock

__all__ = ["DATASHEET", "Gpu", "datasheet", "peak_memory"]

#: TFLOP/s of the 16-bit matrix units without sparsity, from the vendors' data sheets.
DATASHEET = {"NVIDIA H200": 989.4, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA A100": 312.0}


def datasheet(gpu: str) -> float | None:
    """The data sheet's TFLOP/s of a device by its name; None if it is not listed."""
    return next((rate for name, rate in DATASHEET.items() if gpu.startswith(name)), None)


class Gpu:
    """The name, the multiprocessors and the free memory of the GPU."""

    def __init__(self) -> None:
        import cupy

        from cuflash.planning.device import DeviceLimits

        self._cupy = cupy
        limits = DeviceLimits.query(cupy.cuda.Device().id)
        self.name, self.num_sms = limits.name, limits.num_sms
        self.clock = Clock()

    def free_bytes(self) -> int:
        """Memory that a call may take, with some left for the workspace of matrix products."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        free, _ = self._cupy.cuda.runtime.memGetInfo()
        return int(free * 0.9)

    def matrix_rate(self, size: int = 8192, rounds: int = 15) -> dict[str, Any]:
        """TFLOP/s of a large product of 16-bit matrices by cuBLAS through CuPy."""
        import statistics

        cupy = self._cupy
        generator = cupy.random.default_rng(1)
        a, b = (
            generator.standard_normal((size, size), dtype=cupy.float32).astype(cupy.float16)
            for _ in range(2)
        )
        out = cupy.empty_like(a)
        times = [self.clock("product", lambda: cupy.matmul(a, b, out=out)) for _ in range(rounds)]
        milliseconds = statistics.median(times[3:])
        return {
            "label": f"cuBLAS, {size} x {size} x {size}",
            "ms": round(milliseconds, 5),
            "tflops": round(2.0 * size**3 / milliseconds / 1e9, 1),
        }


def peak_memory(call: Callable[[], Any]) -> tuple[Any, int]:
    """The results of a call, and the most bytes of CuPy's pool that it held at once."""
    import cupy

    pool = cupy.get_default_memory_pool()

    class Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "Watch"
        held = most = 0

        def malloc_postprocess(
            self, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int
        ) -> None:
            self.held += mem_size
            self.most = max(self.most, self.held)

        def free_postprocess(
            self, device_id: int, mem_size: int, mem_ptr: int, pmem_id: int
        ) -> None:
            self.held -= mem_size

    pool.free_all_blocks()
    watch = Watch()
    with watch:
        results = call()
        cupy.cuda.Device().synchronize()
    return results, watch.most
