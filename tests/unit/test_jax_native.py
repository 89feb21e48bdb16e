"""The handler of launch tables: what it launches, and every error that it can give XLA."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .fake_device import FakeDevice, fake_device
from .jax_case import draw, jax, jnp

__all__ = ["fake_device"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention
pytest.importorskip("numba", reason="Numba is not installed")
from cuflash.jax import device as on_device  # noqa: E402
from cuflash.jax import native, site  # noqa: E402
from cuflash.jax.call import Call  # noqa: E402
from cuflash.jax.native import registration, registry  # noqa: E402
from cuflash.options import Options  # noqa: E402

from ..kit.native_frame import FakeDriver, FakeXla  # noqa: E402

Q, KV, ROWS = (2, 5, 4, 64), (2, 9, 2, 64), (2, 4, 5)
NUMBER = 12345
COUNTERS = [1 << 44, 1 << 45]
OTHER = FakeDriver.CONTEXT + 64
NAMES = {"forward": "qkv", "backward": ("dout", "q", "k", "v", "out", "lse")}
SHAPES = {"q": Q, "k": KV, "v": KV, "out": Q, "dout": Q, "lse": ROWS, "sinks": (4,)}


class Native:
    """A pass on two fake devices, and XLA's side of it."""

    def __init__(self, fake: FakeDevice, driver: FakeDriver, xla: FakeXla) -> None:
        self.fake, self.driver, self.xla = fake, driver, xla
        self.scratch = 0

    def add(self, operation: Any = "forward", *more: str, **options: Any) -> Any:
        """Put the table of a pass under its number; the pass."""
        names = (*NAMES[operation], *more)
        call = Call(operation, Options(layout="bshd", q_offset=0, **options)).taking(names)
        arrays = [
            jax.ShapeDtypeStruct(SHAPES[n], np.float32 if n in ("lse", "sinks") else np.float16)
            for n in names
        ]
        made = on_device.prepare_device(call, arrays)
        self.table = made.launch_table(self.driver.addresses)
        registration.tables.add(NUMBER, self.table.address, self.table)
        self.made, self.scratch = made, made.scratch_bytes
        self.results = [*call.results, *(["workspace"] if self.scratch else [])]
        return made

    def run(self, skewed: int = 0, **places: int) -> dict[str, int]:
        """Call the handler; where every buffer is."""
        every = [*self.made.call.names, *self.results]
        self.at = {n: ((i + 1) << 20) + skewed for i, n in enumerate(every)} | places
        split = len(self.made.call.names)
        addresses = [*self.at.values()]
        self.status = self.xla.call(NUMBER, addresses[:split], addresses[split:])
        assert not self.driver.raised, self.driver.raised
        return self.at

    def fails(self, text: str, **places: int) -> None:
        """Call the handler, which gives XLA an error of that text."""
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


def _prepared_words(two: Native, device: int, counter: int) -> list[bytes]:
    """What the library's own launches are given for the same buffers."""
    two.fake.launched.clear()
    scratch = two.at.get("workspace", 0)
    workspace = -(-scratch // 256) * 256
    pointers = {name: at for name, at in two.at.items() if name != "workspace"}
    ready = two.made.prepared[device]
    addresses = ready._addresses.of(pointers, workspace)
    launcher = ready._launcher
    launcher._kept.clear()
    launcher.launch(addresses, workspace, FakeXla.STREAM)
    return [_without(words, counter) for words in two.fake.launched]


def _without(words: Any, counter: int) -> bytes:
    """The bytes of parameters, the counter's address as given here."""
    kept = words.copy()
    if "tile_counter" in (kept.dtype.names or ()):
        kept["tile_counter"] = counter
    return bytes(kept.tobytes())


PASSES = [
    ("forward", "fa1", ()),
    ("forward", "fa2", ("sinks",)),
    ("forward", "fa3", ()),
    ("backward", "fa1", ()),
    ("backward", "fa2", ()),
    ("backward", "fa3", ("sinks",)),
]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("skewed", [0, 16, 240])
@pytest.mark.parametrize(("operation", "algorithm", "more"), PASSES)
def test_the_parameters_are_those_of_a_prepared_call(
    two: Native, operation: str, algorithm: str, more: tuple[str, ...], skewed: int, device: int
) -> None:
    """Bit for bit, on the device whose context the stream has, in the same order."""
    two.add(operation, *more, algorithm=algorithm)
    two.driver.stream_context = (FakeDriver.CONTEXT, OTHER)[device]
    two.run(skewed)
    assert two.status == 0
    assert {stream for _, stream in two.fake.queued} == {FakeXla.STREAM}
    got = [_without(words, 0) for words in two.fake.launched]
    assert got == _prepared_words(two, device, 0)
    assert got


@pytest.mark.parametrize("before", [FakeDriver.CONTEXT, OTHER, None])
def test_the_context_of_the_thread_is_as_before(two: Native, before: int | None) -> None:
    two.add(algorithm="fa2")
    two.driver.contexts = [] if before is None else [before]
    two.driver.launch_kernel = lambda *_: seen.extend(two.driver.contexts[-1:])
    seen: list[int] = []
    two.run()
    assert two.status == 0
    assert seen == [FakeDriver.CONTEXT]
    assert two.driver.contexts == ([] if before is None else [before])
    assert ("push_context" in two.driver.asked) == (before != FakeDriver.CONTEXT)


def _counter(two: Native) -> int:
    return int(two.fake.launched[-1]["tile_counter"])


def test_a_counter_belongs_to_the_first_stream(two: Native) -> None:
    """Others have one in the workspace, which is set to 0 before the launch."""
    two.add(algorithm="fa3")
    two.run()
    two.run()
    assert _counter(two) == COUNTERS[0]
    assert not two.driver.set_to
    two.xla.stream = FakeXla.STREAM + 8
    at = two.run()
    inside = _counter(two)
    assert at["workspace"] <= inside < at["workspace"] + two.scratch
    assert two.driver.set_to == [(inside, 0, 1, FakeXla.STREAM + 8)]
    assert two.driver.asked.index("memset") < len(two.driver.asked) - 1
    two.xla.stream = FakeXla.STREAM
    two.run()
    assert _counter(two) == COUNTERS[0]


def test_a_captured_launch_has_a_counter_of_the_graph(two: Native) -> None:
    two.add(algorithm="fa3")
    two.driver.capturing.add(FakeXla.STREAM)
    at = two.run()
    inside = _counter(two)
    assert at["workspace"] <= inside < at["workspace"] + two.scratch
    assert two.driver.set_to == [(inside, 0, 1, FakeXla.STREAM)]
    two.driver.capturing.clear()
    two.run()
    assert _counter(two) == COUNTERS[0]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("launch", "forward: the launch was refused: CUDA error 7"),
        ("encode", "the tensor map of q was refused: CUDA error 7"),
        ("memset", "the counter of tiles cannot be set: CUDA error 7"),
        ("is_capturing", "the counter of tiles cannot be set: CUDA error 7"),
        ("stream_context", "XLA's stream cannot be used: CUDA error 7"),
        ("current_context", "XLA's stream cannot be used: CUDA error 7"),
        ("push_context", "XLA's stream cannot be used: CUDA error 7"),
    ],
)
@pytest.mark.parametrize("number", [7, 701, 70001])
def test_what_the_driver_refuses_is_said(
    two: Native, function: str, text: str, number: int
) -> None:
    two.add(algorithm="fa3")
    two.driver.contexts = []
    two.driver.capturing.add(FakeXla.STREAM)
    two.driver.failing[function] = number
    two.fails(text.replace("7", str(number)))
    said = two.xla.errors[0][0]
    assert said.startswith("cuflash: ")
    assert said.endswith(f" {number}")
    assert two.driver.contexts == []


def test_an_error_of_xla_is_handed_on(two: Native) -> None:
    two.add(algorithm="fa2")
    two.xla.stream = None
    two.run()
    assert two.status == FakeXla.FAILURE + 1
    assert not two.fake.launched


def test_a_device_that_was_not_there_is_refused(two: Native) -> None:
    two.add(algorithm="fa2")
    two.driver.stream_context = 1
    two.fails("compiled for other devices than XLA runs it on")


def test_another_number_of_buffers_is_refused(two: Native) -> None:
    two.add(algorithm="fa2")
    assert two.xla.call(NUMBER, [1 << 20] * 4, [1 << 21] * 2) == FakeXla.FAILURE
    assert two.xla.call(NUMBER, [1 << 20] * 3, [1 << 21] * 9) == FakeXla.FAILURE
    assert ["a call of other arguments" in said for said, _ in two.xla.errors] == [True, True]
    assert not two.fake.launched


def test_a_number_without_a_table_is_refused(two: Native) -> None:
    two.add(algorithm="fa2")
    assert two.xla.call(NUMBER + 1, [1 << 20] * 3, [1 << 21] * 2) == FakeXla.FAILURE
    ((said, _),) = two.xla.errors
    assert "compiled in another process" in said


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_a_buffer_that_is_not_aligned_as_planned_is_refused(two: Native, name: str) -> None:
    two.add(algorithm="fa2")
    two.fails(f"{name} is at no multiple of", **{name: (1 << 25) + 2})
    assert two.xla.errors[0][0].endswith(f"at {(1 << 25) + 2}")
    assert not two.fake.launched


def test_other_stages_do_nothing(two: Native) -> None:
    two.add(algorithm="fa2")
    for stage in (0, 1, 2):
        assert two.xla.call(NUMBER, [1 << 20] * 3, [1 << 21] * 2, stage) == 0
    assert not two.driver.asked


def test_tables_whose_numbers_meet_in_one_slot_are_told_apart(two: Native) -> None:
    """Beside another, and behind the end of the list."""
    last = registry.SLOTS - 1
    two.add(algorithm="fa2")
    for number in (last, last + registry.SLOTS, last + 2 * registry.SLOTS):
        registration.tables.add(number, two.table.address, two.table)
        assert number in registration.tables
        places = [1 << 20] * 3, [1 << 21] * len(two.results)
        assert two.xla.call(number, *places) == 0
    assert two.xla.call(last + 3 * registry.SLOTS, *places) == FakeXla.FAILURE


def _lowered(function: Any, *arrays: Any) -> str:
    traced = jax.jit(function).trace(*arrays)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_a_computation_for_cuda_calls_the_handler(
    two: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same number in every process; other shapes, keywords and passes have others."""
    monkeypatch.setattr(on_device, "tables", registration.tables)
    monkeypatch.setattr(on_device, "driver_functions", lambda: two.driver.addresses)
    monkeypatch.setattr(site, "is_ready", lambda platform: True)
    q, k, v = draw(Q, KV, KV, dtype="float16")

    def numbers(function: Any, *arrays: Any) -> list[str]:
        text = _lowered(function, *arrays)
        assert "xla_buffer_python" not in text
        assert text.count("@cuflash_launch_table") == text.count("table = ")
        return [part.split()[0] for part in text.split("table = ")[1:]]

    (first,) = numbers(attention, q, k, v)
    assert numbers(lambda *qkv: attention(*qkv) * 2, q, k, v) == [first]
    assert len(set(numbers(jax.grad(lambda *x: attention(*x).sum()), q, k, v))) == 2
    (other,) = numbers(lambda *qkv: attention(*qkv, is_causal=True), q, k, v)
    (longer,) = numbers(attention, q, jnp.concatenate([k, k], 1), jnp.concatenate([v, v], 1))
    assert len({first, other, longer}) == 3
    assert all(int(number) in registration.tables for number in (first, other, longer))
