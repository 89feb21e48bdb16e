"""The host time of a call: the timed part, waits for the device, and stored rows."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import __main__ as commands
from bench import latency, report, run, torch_peers
from bench.latency import CALLS, QUEUE, SETS, Contestant, time_blocks
from bench.peers import PEERS
from bench.tables import LATENCY, render
from cuflash import BackendUnavailableError

from .fake_device import FakeDevice, device_array, fake_device
from .fake_torch import FakeTorch, fake_torch

__all__ = ["fake_device", "fake_torch"]

KEYS = [
    *("run", "date", "gpu", "cpu", "python", "impl", "version", "op", "dtype", "batch"),
    *("heads_q", "head_dim", "seqlen_q", "causal", "options", "what", "calls", "blocks"),
    *("us", "spread"),
]


class Story:
    """Records the events in order, and has a clock that every call advances."""

    def __init__(self) -> None:
        self.now, self.told = 0.0, []  # type: float, list[Any]

    def contestant(self, name: str, seconds: float, launches: int = 1) -> Contestant:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            self.told.append("enter")
            yield
            self.told.append("leave")

        def call(number: int) -> None:
            self.now += seconds
            self.told.append((name, number))

        return Contestant(name, "1", "forward", "cycling", call, launches, around)

    def wait(self) -> None:
        self.now += 1000
        self.told.append("wait")

    def clock(self) -> float:
        return self.now


def test_a_block_is_queued_between_two_waits_that_are_not_timed() -> None:
    story = Story()
    (times,) = time_blocks([story.contestant("a", 2e-6)], story.wait, 3, story.clock)
    assert times == [pytest.approx(2.0)] * 3
    block = ["enter", "wait", *(("a", number) for number in range(CALLS)), "wait", "leave"]
    assert story.told == 4 * block  # three blocks, and one to warm up


def test_all_take_turns() -> None:
    story = Story()
    all_of_them = [story.contestant(name, 1e-6 * ord(name)) for name in "abc"]
    times = time_blocks(all_of_them, story.wait, 20, story.clock)
    assert times == [[pytest.approx(ord(name))] * 20 for name in "abc"]
    turns = [name for name, number in (x for x in story.told if len(x) == 2) if number == 0]
    rounds = ["".join(turns[i : i + 3]) for i in range(0, 63, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 3


@pytest.mark.parametrize("launches", [1, 2, 3, 7])
def test_a_block_fits_the_queue(launches: int) -> None:
    contestant = Story().contestant("a", 1e-6, launches)
    assert contestant.calls * launches <= QUEUE < 1024
    assert contestant.calls == CALLS or (contestant.calls + 1) * launches > QUEUE


@pytest.fixture
def gpu(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    """A fake device on which every array is only an address."""
    import cupy

    places = iter(range(1 << 40, 1 << 50, 1 << 20))

    def place(shape: Any, dtype: Any = float) -> Any:
        return device_array(shape if isinstance(shape, tuple) else (shape,), dtype, next(places))

    def inputs(case: Any, xp: Any) -> Any:
        shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
        return SimpleNamespace(
            **{name: place(shape, torch_peers.ml_dtypes.bfloat16) for name in "qkv"}
        )

    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(latency, "make_inputs", inputs)
    monkeypatch.setattr(latency, "BLOCKS", 2)
    monkeypatch.setattr(cupy, "empty", place)
    monkeypatch.setattr(cupy, "empty_like", lambda array: place(array.shape, array.dtype))
    monkeypatch.setattr("cuflash.cuda.available.require_device", lambda: 0)
    common = {"run": "1", "date": "2030-01-01", "gpu": "NVIDIA H200"}
    monkeypatch.setattr(latency, "common_columns", lambda: common)
    monkeypatch.setattr(cupy.cuda.runtime, "deviceSynchronize", lambda: None)
    return fake_device


def test_ours_cycle_repeat_and_are_prepared(gpu: FakeDevice) -> None:
    made = latency.ours()
    kinds = [(each.op, each.options["algorithm"], each.what, each.launches) for each in made]
    both = ("cycling", "repeating")
    assert kinds == [
        *(("forward", "auto", what, 1) for what in both),
        *(("forward", "fa2", what, 1) for what in both),
        *(("backward", "auto", what, 2) for what in both),
        ("forward", "auto", "prepared", 1),
    ]
    for each in made:
        gpu.launched.clear()
        for number in range(2 * SETS):
            each.call(number)
        assert len(gpu.launched) == 2 * SETS * each.launches
        fields = gpu.launched[each.launches // 2].dtype.names
        name = "q_map" if "q_map" in fields else "q"
        main = gpu.launched[each.launches // 2 :: each.launches]
        seen = Counter(one[name].tobytes() for one in main)
        assert set(seen.values()) == {2 * SETS} if each.what == "repeating" else {2}
        assert len(seen) == (1 if each.what == "repeating" else SETS)


def test_rows_are_stored_and_shown(
    gpu: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = latency.run_latency(peers="")
    stored = json.loads((tmp_path / "nvidia-h200-latency.json").read_text())
    assert stored == rows
    assert all(list(row) == KEYS for row in rows)
    assert {(row["blocks"], row["calls"]) for row in rows} == {(2, 500), (2, 450)}
    assert all(row["us"] > 0 for row in rows)
    for row, us in zip(stored, (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 7.04), strict=True):
        row["us"] = us
    (tmp_path / "nvidia-h200-latency.json").write_text(json.dumps(stored))
    lines = render(LATENCY).splitlines()
    assert lines[0].startswith("NVIDIA H200, ")
    assert "µs of the host" in lines[0]
    assert lines[2:] == [
        "|  | pass | cycling | repeating | prepared |",
        "|---|---|---|---|---|",
        "| cuflash auto | forward | 10.0 | 20.0 | 7.0 |",
        "| cuflash fa2 | forward | 30.0 | 40.0 |  |",
        "| cuflash auto | backward | 50.0 | 60.0 |  |",
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


#: The page with the table.
PAGE = "docs/results/host-and-cpu.md"


def test_without_rows_there_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert render(LATENCY) == ""
    assert report.check(PAGE, "nothing") == []


def test_a_block_that_is_missing_is_named(gpu: FakeDevice, tmp_path: Path) -> None:
    latency.run_latency(peers="")
    assert report.check(PAGE, "nothing") == [LATENCY]
    assert report.outdated() == []  # the file holds no device times


@pytest.mark.parametrize("name", ["flash", "cudnn", "fa4"])
def test_a_peer_is_called_as_a_program_would(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shape = (1, 64, 4, 64)
    sets = [tuple(np.full(shape, i, np.float16) for _ in "qkv") for i in range(SETS)]
    monkeypatch.setattr(latency, "_sets", lambda: sets)
    cycling, repeating = latency.of_peer(PEERS[name])
    assert (cycling.what, repeating.what, cycling.impl) == (
        "cycling",
        "repeating",
        PEERS[name].label,
    )
    with cycling.around():
        for number in range(2):
            cycling.call(number)
    first, second = (asked for _, asked in fake_torch.calls)
    assert first["shapes"] == [shape if name == "fa4" else (1, 4, 64, 64)] * 3
    assert (first["grad"], first["options"]) == (False, {})
    assert second["backend"] == {"fa4": None}.get(name, f"{name.upper()}_ATTENTION")


def test_a_peer_that_cannot_is_left_out(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuses(number: int) -> None:
        raise RuntimeError("no such head_dim")

    good = Contestant("good", "1", "forward", "cycling", lambda number: None)
    bad = Contestant("bad", "1", "forward", "cycling", refuses)
    assert latency._able([bad, good]) == [good]
    assert capsys.readouterr().out == "left out: bad, cycling: RuntimeError: no such head_dim\n"
    with pytest.raises(SystemExit, match="'math' is not timed here"):
        latency.of_peer(PEERS["math"])


def test_without_a_gpu_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> int:
        raise BackendUnavailableError("there is no device")

    monkeypatch.setattr("cuflash.cuda.available.require_device", none)
    monkeypatch.setattr(sys, "argv", ["bench", "latency"])
    assert commands.main() == 2
    assert capsys.readouterr().err == "python -m bench latency: there is no device\n"
