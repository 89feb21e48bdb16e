"""A pass on two fake devices: a fake XLA calls the handler of launch tables."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .fake_device import FakeDevice, fake_device
from .jax_case import jax

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
pytest.importorskip("numba", reason="Numba is not installed")
from cuflash.jax import device as on_device
from cuflash.jax import native
from cuflash.jax.call import Call
from cuflash.jax.native import registration, registry
from cuflash.options import Options

from ..kit.native_frame import FakeDriver, FakeXla

__all__ = ["COUNTERS", "KV", "NUMBER", "OTHER", "Native", "Q", "fake_device", "two"]

Q, KV, ROWS = (2, 5, 4, 64), (2, 9, 2, 64), (2, 4, 5)
NUMBER = 12345
COUNTERS = [1 << 44, 1 << 45]
OTHER = FakeDriver.CONTEXT + 64
NAMES = {"forward": "qkv", "backward": ("dout", "q", "k", "v", "out", "lse")}
SHAPES = {"q": Q, "k": KV, "v": KV, "out": Q, "dout": Q, "lse": ROWS, "sinks": (4,)}


class Native:
    """A pass on two fake devices, and the fake XLA that calls it."""

    def __init__(self, fake: FakeDevice, driver: FakeDriver, xla: FakeXla) -> None:
        self.fake, self.driver, self.xla = fake, driver, xla
        self.scratch = 0
        self.shapes: dict[str, tuple[int, ...]] = {}  # shapes that replace some of SHAPES

    def add(self, operation: Any = "forward", *more: str, **options: Any) -> Any:
        """Register the launch table of a pass under ``NUMBER``, and return the prepared pass."""
        names = (*NAMES[operation], *more)
        call = Call(operation, Options(layout="bshd", q_offset=0, **options)).taking(names)
        shapes = SHAPES | self.shapes
        arrays = [
            jax.ShapeDtypeStruct(shapes[n], np.float32 if n in ("lse", "sinks") else np.float16)
            for n in names
        ]
        made = on_device.prepare_device(call, arrays)
        self.table = made.launch_table(self.driver.addresses)
        registration.tables.add(NUMBER, self.table.address, self.table)
        self.made, self.scratch = made, made.scratch_bytes
        self.results = [*call.results, *(["workspace"] if self.scratch else [])]
        return made

    def run(self, skewed: int = 0, **places: int) -> dict[str, int]:
        """Call the handler; return the address of every buffer."""
        every = [*self.made.call.names, *self.results]
        self.at = {n: ((i + 1) << 33) + skewed for i, n in enumerate(every)} | places
        split = len(self.made.call.names)
        addresses = [*self.at.values()]
        self.status = self.xla.call(NUMBER, addresses[:split], addresses[split:])
        assert not self.driver.raised, self.driver.raised
        return self.at

    def fails(self, text: str, **places: int) -> None:
        """Call the handler, and check that it returns an error with ``text`` to XLA."""
        self.run(**places)
        assert self.status == FakeXla.FAILURE
        ((said, code),) = self.xla.errors
        assert (text in said, code) == (True, 13), said


@pytest.fixture
def two(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    """Two devices of JAX, the second in a context of its own."""
    counters = [SimpleNamespace(data=SimpleNamespace(ptr=place)) for place in COUNTERS]
    contexts = FakeDriver.CONTEXT, OTHER
    monkeypatch.setattr(on_device, "_devices", lambda: [0, 1])
    monkeypatch.setattr(on_device, "context_of", lambda device: contexts[device])
    monkeypatch.setattr(on_device, "new_counter", lambda device: counters[device])
    monkeypatch.setattr(registration, "tables", registry.Registry())
    driver = FakeDriver(fake_device.launch, fake_device.encode)
    handler = registration._handler()
    registration.tell(registration.tables)
    yield Native(fake_device, driver, FakeXla(handler.ctypes))
    registration.tell(native.tables)
