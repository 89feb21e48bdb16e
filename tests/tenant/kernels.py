"""Kernels of this folder's features: few, since compiling one takes seconds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cuflash.dispatch import call
from cuflash.planning.kernel import KernelConfig

from ..emulator.build import emulate
from ..emulator.host_cupy import HostCupy, host_cupy
from .case import Array, TenantCall, both_passes
from .parity import PARITY
from .registered import registered
from .tilt import TILT

__all__ = ["KERNELS", "TenantKernels"]

_PARITY = TenantCall(parity=1, causal=True, q_offset=0, dead=math.nan)  # the first query is dead
_TILT = TenantCall(tilt=0.05)
_ALL = TenantCall(parity=0, tilt=-0.05, sinks=True, window=(40, 9))
#: A function of the scores, whose results have another unit, before terms that add to them.
_CAPPED = TenantCall(parity=1, tilt=0.05, softcap=1.5, causal=True)


@dataclass(frozen=True)
class TenantKernels:
    """One configuration of each pass, with its runner.

    Attributes
    ----------
    used
        A call that determines the features, the mask and the bounds.
    num_sms
        Multiprocessors of the device; a single one takes the tiles of a full device.
    """

    algorithm: str
    architecture: str
    dtype: str
    used: TenantCall
    blocks: tuple[int, int] | None = None
    head_dim: int = 64
    num_sms: int | None = 1

    @property
    def name(self) -> str:
        """The name in a test."""
        every = ("parity", "tilt", "softcap")
        names = [name for name in every if getattr(self.used, name) is not None]
        parts = [self.algorithm, f"sm_{self.architecture}", self.dtype, f"d{self.head_dim}"]
        return "-".join([*parts, *names])

    def calls(self) -> list[TenantCall]:
        """Odd lengths, several tiles, grouped heads; one query; rows that see no key."""
        one = replace(self.used, dtype=self.dtype, head_dim=self.head_dim)
        long = self.algorithm == "fa3"
        return [
            replace(one, seqlen_q=150 if long else 37, seqlen_kv=203 if long else 101),
            replace(one, batch=1, heads_kv=4, seqlen_q=1, seqlen_kv=75, seed=1),
            replace(one, heads_kv=1, seqlen_q=67, seqlen_kv=33, q_offset=-7, seed=2),
        ]

    def run(self, one: TenantCall) -> dict[str, Array]:
        """Results of a call on the emulated device; every launch is audited."""
        with self.device() as host:
            first, results = (self._both(host, one) for _ in range(2))  # the second repeats it
            for name in ("out", "lse"):
                assert first[name].peek().tobytes() == results[name].peek().tobytes(), name
            return {name: array.peek() for name, array in results.items()}

    def configs(self) -> dict[str, KernelConfig]:
        """The kernels that the calls compile, by name."""
        found: dict[str, KernelConfig] = {}

        def make(config: KernelConfig) -> Any:
            found[f"{config.generation}/{config.kernel}"] = config
            return lambda *_: None

        with self.device(make) as host:
            self._both(host, self.calls()[0])
        return found

    @contextlib.contextmanager
    def device(self, make: Callable[[KernelConfig], Any] = emulate) -> Iterator[HostCupy]:
        """An emulated device with this folder's features in the table."""
        with registered(PARITY, TILT), host_cupy(self.architecture, self.num_sms, make) as host:
            yield host

    def _both(self, host: HostCupy, one: TenantCall) -> dict[str, Any]:
        options = {"algorithm": self.algorithm, "blocks": self.blocks}

        def run(operation: Any, arrays: dict[str, Any], keywords: dict[str, Any]) -> Any:
            return host.call(lambda **given: call(operation, given, keywords), **arrays)

        return both_passes(one, host.array, run, **options)


_SMALL = (32, 32)
KERNELS = (
    TenantKernels("fa1", "90", "float32", _TILT, (16, 32)),
    TenantKernels("fa1", "90", "float32", _ALL, (16, 32)),
    TenantKernels("fa1", "90", "float32", _CAPPED, (16, 32)),
    TenantKernels("fa2", "75", "float16", _PARITY, _SMALL, num_sms=None),
    TenantKernels("fa2", "75", "float16", _TILT, _SMALL, num_sms=None),
    TenantKernels("fa2", "75", "float16", _ALL, _SMALL, num_sms=None),
    # Backward with scores as keys x queries.
    TenantKernels("fa2", "90", "bfloat16", _ALL),
    TenantKernels("fa2", "90", "float16", _CAPPED),
    TenantKernels("fa3", "90", "float16", _PARITY),
    TenantKernels("fa3", "90", "float16", _CAPPED),
    TenantKernels("fa3", "90", "float16", _TILT),
    TenantKernels("fa3", "90", "float16", _ALL),
    # Backward with one tile of scores at a time.
    TenantKernels("fa3", "90", "float16", _ALL, head_dim=192),
)
