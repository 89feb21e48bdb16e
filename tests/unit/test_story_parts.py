"""Every part of the story measures its subject, and reports failures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import __main__ as commands
from bench.cases import Case
from bench.inputs import make_inputs
from bench.peers import PEERS
from bench.story import device, jobs, memory, share, speed, standard, traffic
from bench.story import run as story
from bench.story.counters import Kernel, NoCountersError
from bench.story.counts import of_row
from bench.story.jobs import Job
from bench.verify import Truth

from .story_rows import H200, fake_read, io_rows, share_rows

DEVICE = SimpleNamespace(num_sms=12, free_bytes=lambda: 10**9)


def _make(case: Case) -> Any:
    return make_inputs(case, np)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LENGTHS", (32, 64))
    monkeypatch.setattr(speed, "TOKENS", 128)
    monkeypatch.setattr(speed, "HIDDEN", 256)


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_hand_is_right(op: str, causal: bool) -> None:
    case = Case(op, "float16", 2, 3, 3, 16, 16, 70, 70, causal, "fa1")
    result = standard.prepare(case, _make(case))()
    worst = Truth(case, _make(case)).worst_ratio(result if op == "backward" else (result,))
    assert 0 < worst < 5


def test_attention_by_hand_bears_large_scores() -> None:
    case = Case("forward", "float16", 1, 1, 1, 16, 16, 70, 70, False, "fa1")
    inputs = replace(_make(case), q=_make(case).q * np.float16(16))
    assert Truth(case, inputs).worst_ratio((standard.prepare(case, inputs)(),)) < 100


def test_a_panel_of_the_speeds(small: None) -> None:
    calls: list[str] = []

    def clock(name: str, call: Any) -> float:
        call()
        calls.append(name)
        return 30.0 if name.endswith("fa1") else 1.0

    lines: list[str] = []
    rows = list(speed.measure_panel((64, True, "forward"), [], DEVICE, _make, lines.append, clock))
    assert [(r["label"], r["seqlen"], r["setting"], r["heads"]) for r in rows] == [
        *((name, 32, "papers", 16) for name in (speed.STANDARD, *_OURS)),
        *((name, 64, "papers", 8) for name in (speed.STANDARD, *_OURS)),
        ("cuflash fa1", 64, "filled", 12),
    ]
    slow, quick = rows[1], rows[2]
    assert (slow["ms"], slow["rounds"]) == (30.0, speed.SLOW_ROUNDS)
    assert (quick["ms"], quick["rounds"]) == (1.0, speed.ROUNDS)
    flops = 0.5 * 4 * 16 * 32 * 32 * 64
    assert quick["tflops"] == round(flops / 1.0 / 1e9, 2)
    assert rows[3]["skipped"].startswith("UnsupportedError: fa3 is for Hopper")
    assert rows[3]["ms"] is None
    assert lines[0].startswith("forward 64 causal 16x32 standard (CuPy): 1.000 ms")
    assert "skipped: UnsupportedError" in lines[3]
    assert calls.count("cuflash fa1") == 3 * speed.SLOW_ROUNDS


_OURS = tuple(f"cuflash {name}" for name in speed.GENERATIONS)


def test_whole_matrices_that_do_not_fit_are_skipped(small: None) -> None:
    full = SimpleNamespace(num_sms=1, free_bytes=lambda: 10)
    panel = (64, False, "backward")
    rows = list(
        speed.measure_panel(panel, [], full, _make, lambda line: None, lambda name, call: 1.0)
    )
    assert [r["label"] for r in rows if r["skipped"]] == 2 * [speed.STANDARD, "cuflash fa3"]
    assert "whole matrices need 0 GB, but 0 GB are free" in rows[0]["skipped"]


def test_what_computes_something_else_is_skipped(small: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(standard, "prepare", lambda case, inputs: lambda: inputs.v)
    panel = (64, False, "forward")
    rows = list(
        speed.measure_panel(panel, [], DEVICE, _make, lambda line: None, lambda name, call: 1.0)
    )
    assert "times what rounding explains" in rows[0]["skipped"]
    assert rows[1]["skipped"] is None


def test_the_papers_grid() -> None:
    assert len(speed.panels()) == 8
    for panel in speed.panels():
        for case in speed.cases(panel):
            assert case.batch * case.seqlen_q == 16384
            assert case.heads_q * case.head_dim == 2048
    (case,) = (c for c in speed.cases((64, False, "forward")) if c.seqlen_q == 4096)
    assert speed.filled(case, 132) is None  # 128 heads
    (case,) = (c for c in speed.cases((128, False, "forward")) if c.seqlen_q == 4096)
    full = speed.filled(case, 132)
    assert full is not None
    assert (full.batch, full.heads_q, full.algorithm) == (1, 132, "fa1")


def test_extra_memory_is_less_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LENGTHS", (16,))
    rows = list(memory.measure(_make, lambda call: (call(), 10**6), lambda: 10**9))
    assert [(r["label"], r["pass"]) for r in rows] == [
        (name, done) for name in (speed.STANDARD, *_OURS) for done in memory.PASSES
    ]
    matrix = 4 * 16 * 64 * 2
    assert [r["sources"] is None for r in rows[:4]] == [True, True, False, False]
    assert [r["extra_bytes"] for r in rows[:6]] == 3 * [10**6 - matrix, 10**6 - 4 * matrix]
    assert all("fa3 is for Hopper" in r["skipped"] for r in rows[6:])
    # Three squares of 2,048 bytes fit, and four do not.
    rows = list(memory.measure(_make, lambda call: (call(), 10**6), lambda: 7000))
    assert [r["skipped"] is None for r in rows[:2]] == [True, False]


def test_the_most_memory_of_a_call_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []

    class MemoryHook:
        def __enter__(self) -> None:
            hooks.append(self)

        def __exit__(self, *of: Any) -> None:
            hooks.clear()

    def take(size: int) -> None:
        hooks[0].malloc_postprocess(device_id=0, size=1, mem_size=size, mem_ptr=1, pmem_id=2)

    def free(size: int) -> None:
        hooks[0].free_postprocess(device_id=0, mem_size=size, mem_ptr=1, pmem_id=2)

    def call() -> str:
        take(512)
        take(1024)
        free(1024)
        take(100)
        return "result"

    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cuda = SimpleNamespace(
        MemoryHook=MemoryHook, Device=lambda: SimpleNamespace(synchronize=lambda: None)
    )
    cupy = SimpleNamespace(get_default_memory_pool=lambda: pool, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert device.peak_memory(call) == ("result", 1536)
    assert device.datasheet("NVIDIA A100-SXM4-80GB") == 312.0
    assert device.datasheet("NVIDIA Abacus") is None


def test_a_job_goes_through_json_and_is_planned_in_its_budget() -> None:
    every = story.jobs_of(list(story.PARTS), 132)
    assert [Job.of_json(json.loads(json.dumps(job.as_json()))) for job in every] == every
    for batch in traffic.batches(132):
        for job in batch:
            if job.budget:
                facts = jobs.facts_of(jobs.plan_of(job, H200))
                assert facts["shared_bytes"] <= job.budget
    assert {job.case.blocks[1] for b in traffic.batches(132) for job in b if job.case.blocks} == {
        *traffic.BLOCKS_KV
    }


def test_bytes_stand_beside_their_counts() -> None:
    rows = [{**row, **of_row(row)} for row in io_rows()]
    assert len(rows) == sum(map(len, traffic.batches(132)))
    by_tile = {
        (r["label"], r["head_dim"], tuple(r["blocks"] or ())): r for r in rows if not r["budget"]
    }
    fa1 = by_tile["cuflash fa1", 64, (64, 128)]
    assert fa1["paper_read"] == fa1["count_read"] == fa1["dram_read"]
    assert fa1["paper_write"] > fa1["count_write"]
    assert (fa1["l2_read"], fa1["l2_hit_percent"], fa1["ms"]) == (1600, 50.0, 50.0)
    by_hand = by_tile[speed.STANDARD, 64, ()]
    assert by_hand["count_read"] > 3 * by_hand["paper_read"]
    assert by_tile["cuflash fa3", 64, (192, 128)]["once_read"] == 528 * 3 * 16384 * 64 * 2


def test_counters_of_several_kernels_are_added() -> None:
    job = Job(Case("forward", "float16", 1, 1, 1, 64, 64, 128, 128, False, "fa1"), by_hand=True)
    kernels = [
        Kernel("a", {"dram__bytes_read.sum": 10.0, "gpu__time_duration.sum": 1.0}),
        Kernel("b", {"dram__bytes_read.sum": 5.0, "gpu__time_duration.sum": 3.0}),
    ]
    kernels[1].values["lts__t_sector_hit_rate.pct"] = 40.0
    row = traffic.row_of(job, {"skipped": None}, kernels)
    assert row["skipped"] == "the device has no counters of device memory's bytes"
    kernels[0].values["dram__bytes_write.sum"] = 2.0
    assert traffic.row_of(job, {"skipped": None}, kernels)["skipped"] is None
    assert (row["dram_read"], row["dram_write"], row["ms"]) == (15, None, 4.0)
    assert (row["l2_hit_percent"], row["l2_read"], row["kernels"]) == (30.0, None, 2)
    assert traffic.row_of(job, {}, [])["skipped"] == "no kernel was counted"


def test_without_counters_the_rows_say_why() -> None:
    def refused(jobs: Any, metrics: Any) -> Any:
        raise NoCountersError("ncu (Nsight Compute) is not installed")

    lines: list[str] = []
    found = [row for rows in traffic.measure(132, refused, lines.append) for row in rows]
    assert {row["skipped"] for row in found} == {"ncu (Nsight Compute) is not installed"}
    assert all("skipped: ncu" in line for line in lines)
    gpu = SimpleNamespace(num_sms=132, matrix_rate=lambda: {"label": "x", "tflops": 1.0})

    def nothing(*of: Any) -> Any:
        return lambda: None, {}

    rows = list(share.measure(gpu, nothing, lambda name, call: 2.0, refused, nothing))
    assert len(rows) == 13
    assert rows[1]["no_counters"] == "ncu (Nsight Compute) is not installed"
    assert rows[1]["tflops"] == round(4 * 264 * 4096**2 * 64 / 2.0 / 1e9, 1)
    assert "tensor" not in rows[1]


def test_units_are_weighed_by_time() -> None:
    names = share.UNITS["tensor"]
    kernels = [
        Kernel("a", {share.TIME: 1.0, names[1]: 10.0}),
        Kernel("b", {share.TIME: 3.0, names[0]: 50.0, names[1]: 1.0}),
    ]
    found = share.busy(kernels)
    assert found["tensor"] == 40.0
    assert found["dram"] is None
    assert share.busy([]) == {}
    assert {row["tensor"] for row in share_rows() if row["op"] != "product"} == {50.0}


def test_each_part_is_stored_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA Abacus 1", num_sms=132)
    monkeypatch.setattr("cuflash.cuda.available.require_device", lambda: 0)
    monkeypatch.setattr(story, "Gpu", lambda: gpu)
    monkeypatch.setattr(story, "compile_all", lambda jobs, say: None)
    monkeypatch.setattr(story, "RESULTS", tmp_path)

    def breaks(gpu: Any, peers: str) -> Any:
        yield [{"part": "io", "n": 1}]
        raise RuntimeError("the machine went away")

    parts = {"share": lambda gpu, peers: iter([[{"part": "share", "peers": peers}]]), "io": breaks}
    monkeypatch.setattr(story, "PARTS", parts)
    with pytest.raises(RuntimeError, match="went away"):
        story.run("share,io")
    rows = json.loads((tmp_path / "nvidia-abacus-1-story.json").read_text())
    assert [(row["part"], row["gpu"]) for row in rows] == [
        (name, "NVIDIA Abacus 1") for name in ("share", "io")
    ]
    assert (rows[0]["peers"], rows[0]["num_sms"]) == ("cudnn,fa4", 132)
    assert "num_sms" not in rows[1]
    assert set(story.BEST_PEERS.split(",")) <= set(PEERS)


def test_the_command_without_a_gpu_or_with_another_part(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "story", "--parts", "speed,luck"])
    with pytest.raises(SystemExit, match="no part 'luck'; there are memory, share, io, speed"):
        commands.main()


def test_the_fake_reader_reads_what_the_parts_ask() -> None:
    (said, (kernel,)) = fake_read(traffic.batches(132)[1][:1], traffic.METRICS)[0]
    assert said["blocks"] == [64, 16]
    assert set(kernel.values) == set(traffic.METRICS)
