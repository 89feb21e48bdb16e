"""The handler of launch tables: its launches, and every error that it can return to XLA."""

from __future__ import annotations

from typing import Any

import pytest

from cuflash.features.score_text import ScoreText
from cuflash.pipeline import DeviceLimits

from ..architectures import LIMITS
from ..kit.native_frame import FakeDriver, FakeXla
from .native_case import COUNTERS, NUMBER, OTHER, Native, fake_device, two

__all__ = ["fake_device", "two"]


def _prepared_words(two: Native, device: int, counter: int) -> list[bytes]:
    """The parameters of the launches of a prepared call with the same buffers."""
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
    """All bytes of parameters, padding too, with ``counter`` as the address of the tile counter."""
    kept, place = bytearray(words.tobytes()), (words.dtype.fields or {}).get("tile_counter")
    if place is not None:
        kept[place[1] : place[1] + 8] = counter.to_bytes(8, "little")
    return bytes(kept)


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
    """Launches have the same parameters and order, on the device of the stream's context."""
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
    """Other streams use a counter in the workspace, which is set to 0 before the launch."""
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


def test_each_device_has_a_counter_and_an_owner(two: Native) -> None:
    two.add(algorithm="fa3")
    two.run()
    two.driver.stream_context, two.xla.stream = OTHER, FakeXla.STREAM + 8
    two.run()
    assert _counter(two) == COUNTERS[1]
    assert not two.driver.set_to


@pytest.mark.parametrize("status", [1, 2])
def test_a_captured_launch_has_a_counter_of_the_graph(two: Native, status: int) -> None:
    """The counter is in the workspace, even if the capture has failed and never runs."""
    two.add(algorithm="fa3")
    two.driver.capture_status = status
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
@pytest.mark.parametrize("number", [7, 10, 701, 70001])
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
    saying = "a call of other arguments, in number "
    assert [said.partition(saying)[2] for said, _ in two.xla.errors] == ["4", "3"]
    assert not two.fake.launched


def test_a_number_without_a_table_is_refused(two: Native) -> None:
    two.add(algorithm="fa2")
    assert two.xla.call(NUMBER + 1, [1 << 20] * 3, [1 << 21] * 2) == FakeXla.FAILURE
    ((said, _),) = two.xla.errors
    assert "compiled in another process" in said


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_a_buffer_that_is_not_aligned_as_planned_is_refused(two: Native, name: str) -> None:
    two.add(algorithm="fa2")
    two.fails(f"{name} is at no multiple of", **{name: (1 << 45) + 2})
    assert two.xla.errors[0][0].endswith(f"at {(1 << 45) + 2}")
    assert not two.fake.launched


def test_other_stages_do_nothing(two: Native) -> None:
    two.add(algorithm="fa2")
    for stage in (0, 1, 2):
        assert two.xla.call(NUMBER, [1 << 20] * 3, [1 << 21] * 2, stage) == 0
    assert not two.driver.asked


def _as_prepared(two: Native, device: int = 0) -> bool:
    """Whether a run launches the same as a prepared call, and at least one kernel."""
    two.fake.launched.clear()
    two.driver.stream_context = (FakeDriver.CONTEXT, OTHER)[device]
    two.run(**{name: 1 for name, shape in two.shapes.items() if 0 in shape})
    got = [_without(words, 0) for words in two.fake.launched]
    two.at |= {name: 0 for name, shape in two.shapes.items() if 0 in shape}
    return two.status == 0 and bool(got) and got == _prepared_words(two, device, 0)


def test_gradients_that_nobody_asked_for_are_in_the_workspace(two: Native) -> None:
    made = two.add("backward", algorithm="fa2", wrt=("q",))
    assert len({*made.plans[0].scratch.values()}) == 2
    assert _as_prepared(two)


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_arrays_without_elements_are_anywhere(two: Native, operation: str) -> None:
    """XLA may give empty arrays any address; the launches are those for address 0."""
    empty = (2, 0, 2, 64)
    two.shapes = dict.fromkeys(("k", "v", "dk", "dv") if operation == "backward" else "kv", empty)
    two.add(operation, algorithm="fa2")
    assert _as_prepared(two)


def test_devices_may_be_of_different_kinds(two: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device needs no tile counter and no workspace; the second needs both."""
    kinds = "80", "90"
    monkeypatch.setattr(DeviceLimits, "query", lambda device: LIMITS[kinds[device]])
    two.shapes = {"q": (2, 17, 4, 64)}  # more than the kernel for few queries takes
    made = two.add()
    needed = [planned.workspace_bytes for planned in made.plans.values()]
    assert not needed[0]
    assert needed[1]
    assert two.results == ["out", "lse", "workspace"]
    assert all(_as_prepared(two, device) for device in (0, 1))


@pytest.mark.parametrize("at", range(0, 256, 85))
def test_the_workspace_fits_wherever_it_is(two: Native, at: int) -> None:
    made = two.add("backward", algorithm="fa3")
    begin = -(-at // 256) * 256
    assert begin + made.plans[0].workspace_bytes <= at + two.scratch


def test_parameters_may_be_as_large_as_cuda_takes_them(two: Native) -> None:
    numbers = tuple((f"n{i}", True, str(i)) for i in range(4000))
    two.add(algorithm="fa2", more=(("score_mod", ScoreText("return score;", numbers)),))
    two.run()
    got = [_without(words, 0) for words in two.fake.launched]
    assert max(map(len, got)) > 8 * 1024
    assert got == _prepared_words(two, 0, 0)


def test_a_merge_may_begin_before_the_chunks_have_ended(two: Native) -> None:
    """The kernel of the chunks waits for the kernel before it, as all others do."""
    two.add(algorithm="fa2", kv_chunk=32)
    two.run()
    assert two.driver.overlapped == [False, True]
