"""The output of ncu is read, and the reason is reported if it is unusable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cases import Case
from bench.story import counters, probe
from bench.story.counters import Kernel, NoCountersError, available, counters_of, parse, split
from bench.story.jobs import Job

JOB = Job(Case("forward", "float16", 1, 2, 2, 64, 64, 128, 128, False, "fa1", (64, 64)))

#: A log file of Nsight Compute.
PRINTED = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "story_mark" - 0: 0%....50%....100% - 2 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes_read.sum","gpu__time_duration.sum",\
"lts__t_sector_hit_rate.pct"
"","","","","","","","","","","","byte","ns","%"
"0","4711","python3.12","127.0.0.1","story_mark","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0",\
"1,024","1,280","12.5"
"1","4711","python3.12","127.0.0.1","cuflash_fa1_forward","1","7","(256, 1, 1)","(132, 1, 1)",\
"0","9.0","54,223,110,144","55,000,000","n/a"
"2","4711","python3.12","127.0.0.1","story_mark","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0",\
"1,024","1,280","12.5"
"3","4711","python3.12","127.0.0.1","void gemm<__half, 2>(T1 *)","1","7","(1, 1, 1)","(1, 1, 1)",\
"0","9.0","7","2,000,000","50.25"
"4","4711","python3.12","127.0.0.1","cupy_exp__float16","1","7","(1, 1, 1)","(1, 1, 1)",\
"0","9.0","8","1,000,000","99"
"""

FA1 = Kernel(
    "cuflash_fa1_forward",
    {"dram__bytes_read.sum": 54223110144.0, "gpu__time_duration.sum": 55.0},
)


def _done(stdout: str = "", stderr: str = "", code: int = 0) -> Any:
    return subprocess.CompletedProcess(["ncu"], code, stdout, stderr)


def test_kernels_are_read_with_their_counters() -> None:
    kernels = parse(PRINTED)
    assert [kernel.name for kernel in kernels][1::2] == ["cuflash_fa1_forward", kernels[3].name]
    assert kernels[1].name == FA1.name
    assert kernels[1].values == pytest.approx(FA1.values)
    assert kernels[4].values["lts__t_sector_hit_rate.pct"] == 99.0
    assert parse("==ERROR== nothing\n") == []


def test_units_become_bytes_and_milliseconds() -> None:
    printed = PRINTED.replace('"byte","ns"', '"Gbyte","us"')
    values = parse(printed)[3].values
    assert values["dram__bytes_read.sum"] == 7e9
    assert values["gpu__time_duration.sum"] == pytest.approx(2000.0)


def test_a_line_of_units_may_be_missing() -> None:
    lines = [line for line in PRINTED.splitlines(keepends=True) if not line.startswith('"",')]
    assert parse("".join(lines))[1].values["dram__bytes_read.sum"] == 54223110144.0


def test_marks_part_the_jobs() -> None:
    first, second = split(parse(PRINTED))
    assert [kernel.name for kernel in first] == ["cuflash_fa1_forward"]
    assert [kernel.name for kernel in second] == ["void gemm<__half, 2>(T1 *)", "cupy_exp__float16"]
    assert split([FA1]) == []
    assert probe.MARK in PRINTED


def test_what_the_device_has_is_asked_for() -> None:
    listed = "Device NVIDIA H200 (GH100)\n---\ndram__bytes_read  Counter  byte  # of bytes\n"
    asked = ["dram__bytes_read.sum", "sm__new.avg.pct_of_peak_sustained_elapsed"]
    assert available(asked, listed) == asked[:1]
    assert available(asked, "") == asked


def test_a_job_that_was_not_come_to_says_why() -> None:
    said = {"skipped": None, "blocks": [64, 64]}
    done = _done(f"{json.dumps(said)}\nnoise\n", "Traceback\nMemoryError: no", 1)
    found = counters_of([JOB, JOB], done, PRINTED)
    assert found[0][0] == said
    assert [kernel.name for kernel in found[0][1]] == [FA1.name]
    assert found[1] == ({"skipped": "ncu ended with 1: MemoryError: no"}, [])


@pytest.mark.parametrize(
    ("text", "stderr", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user", "", "lets this user read no hardware counters"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "", "LibraryNotLoaded"),
        ("==ERROR== Failed to find metric a\n", "", "ncu: Failed to find metric a"),
        ("", "", "ncu ended with 9: it counted no kernel"),
        ("", "Traceback\nImportError: cupy", "ncu ended with 9: ImportError: cupy"),
    ],
)
def test_refusals_have_reasons(text: str, stderr: str, reason: str) -> None:
    with pytest.raises(NoCountersError, match=reason):
        counters_of([JOB], _done("", stderr, 9), text)


def test_without_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters, "glob", lambda place: [])
    with pytest.raises(NoCountersError, match="is not installed"):
        counters.read([JOB], ["dram__bytes_read.sum"])


def _fake_ncu(folder: Path, body: str) -> Path:
    command = folder / "ncu"
    command.write_text(f"#!/bin/sh\n{body}\n")
    command.chmod(0o755)
    return command


def test_ncu_is_run_once_for_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in prints ncu's output, and records its arguments."""
    (tmp_path / "printed").write_text(PRINTED)
    line = json.dumps({"skipped": None})
    command = _fake_ncu(
        tmp_path,
        f'if [ "$1" = --query-metrics ]; then echo "dram__bytes_read  Counter"; exit; fi\n'
        f'echo "$@" >> {tmp_path}/asked\n'
        f'while [ "$1" != --log-file ]; do shift; done\n'
        f'cp {tmp_path}/printed "$2"\n'
        f"for last; do :; done; cp $last {tmp_path}/jobs\n"
        f"echo '{line}'; echo '{line}'",
    )
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(command))
    found = counters.read([JOB, JOB], ["dram__bytes_read.sum", "gone__metric.sum"])
    assert [len(kernels) for _, kernels in found] == [1, 2]
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert "--clock-control none" in asked
    assert "--profile-from-start off" in asked
    assert "--metrics dram__bytes_read.sum " in asked
    jobs = json.loads((tmp_path / "jobs").read_text())
    assert [Job.of_json(values) for values in jobs] == [JOB, JOB]


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "PATIENCE", 0.2)
    command = _fake_ncu(tmp_path, 'if [ "$1" != --query-metrics ]; then exec sleep 5; fi')
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(command))
    with pytest.raises(NoCountersError, match="given up after 0 s"):
        counters.read([JOB], ["a__b.sum"])


def test_the_probe_marks_every_job_and_says_why_one_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    happened: list[str] = []
    runtime = SimpleNamespace(
        profilerStart=lambda: happened.append("start"), profilerStop=lambda: happened.append("stop")
    )
    device = SimpleNamespace(synchronize=lambda: None)
    cupy = SimpleNamespace(
        RawKernel=lambda code, name: lambda *launch: happened.append(name),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        cuda=SimpleNamespace(runtime=runtime, Device=lambda: device),
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setattr(probe, "make_inputs", lambda case, xp: None)

    def prepare(job: Job, inputs: Any) -> Any:
        if job.by_hand:
            raise MemoryError("too large\nby far")
        if job.budget:
            return lambda: {}["late"], {}
        return lambda: happened.append("call"), {"blocks": [64, 64]}

    monkeypatch.setattr(probe, "prepare", prepare)
    asked = [JOB, Job(JOB.case, by_hand=True), Job(JOB.case, budget=1)]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([job.as_json() for job in asked]))
    assert probe.main(str(path)) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    reasons = [None, "MemoryError: too large", "KeyError: 'late'"]
    assert [one["skipped"] for one in said] == reasons
    assert said[0]["blocks"] == [64, 64]
    mark = probe.MARK
    of_job = ["start", mark, "stop"]
    assert happened == [mark, "start", mark, "call", "stop", *of_job, *of_job]
