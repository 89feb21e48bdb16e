"""Which reports of racecheck are set aside, and which are faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuflash.cuda import compile as compiling

from ..device import sanitize
from ..device.racecheck import READS, judge
from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients

K = "cuflash_fa3_backward"
FOLDER = Path("/src/cuda_src")
COPY = "cuflash::ptx::bulk_load(unsigned int, const void *, unsigned int, unsigned int)"
MATH = "void cuflash::fa3::differentiate<Config, cuflash::WarpTile<float, (int)16>>(const T2 &)"
WRITE = f"Write access at {COPY}+0xced0 in {FOLDER}/fa3/../ptx/bulk_copy.cuh:13"
READ = f"Read access at {MATH}+0x78f0 in {FOLDER}/fa3/backward_score.cuh:115"
LOST = f"Read access at {K}+0x7a10"


def report(first: str, *others: str, level: str = "Error") -> str:
    lines = [f"========= {level}: Race reported between {first}"]
    lines += [f"=========     and {other} [4608 hazards]" for other in others]
    return "\n".join([*lines, "=========     Saved host backtrace up to driver entry point", ""])


def printed(*reports: str, displayed: int | None = None) -> str:
    count = len(reports) if displayed is None else displayed
    summary = f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"
    return "\n".join(
        ["========= COMPUTE-SANITIZER", *reports, "8 problems", "=========", summary, ""]
    )


def test_the_known_kind_is_set_aside_in_either_order() -> None:
    other = READ.replace("0x78f0", "0x7900").replace("score.cuh:115", "math.cuh:164")
    verdict = judge(printed(report(WRITE, READ, other, LOST), report(READ, WRITE)))
    assert (verdict.known, verdict.faults) == (4, ())


def test_files_may_have_no_folder() -> None:
    write, read = (text.replace(f"{FOLDER}/fa3/", "") for text in (WRITE, READ))
    verdict = judge(printed(report(write.replace("../ptx/", ""), read)))
    assert (verdict.known, verdict.faults) == (1, ())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WRITE, READ.replace("backward_score", "forward_softmax")),
        (WRITE, READ.replace("fa3/backward_score", "fa2/backward_types")),
        (WRITE, READ.replace("fa3/backward_score", "tile/backward_steps")),
        (WRITE, READ.replace(f"{FOLDER}/fa3/backward_score", "backward_steps")),
        (WRITE, READ.replace("cuflash::fa3::", "cuflash::fa2::")),
        (WRITE.replace("bulk_load(", "bulk_store("), READ),
        (WRITE, LOST.replace(K, "cuflash_fa3_forward")),
        (WRITE, LOST.replace("Read", "Write")),
        (WRITE.replace("bulk_copy", "tensor_copy"), READ),
        (WRITE.replace("ptx/bulk", "tile/bulk"), READ),
        (READ.replace("Read", "Write"), WRITE.replace("Write", "Read")),  # the copy reads
        (WRITE, READ.replace("Read", "Write")),
        (WRITE, READ.split(" in ")[0]),
        (WRITE.split(" in ")[0], READ),
    ],
)
def test_everything_else_is_a_fault(first: str, second: str) -> None:
    for text in (report(first, second), report(second, first)):
        verdict = judge(printed(report(WRITE, READ), text))
        assert verdict.known == 1
        (fault,) = verdict.faults
        assert " at " in fault
    mixed = judge(printed(report(WRITE, READ), report(first, second, second)))
    assert (mixed.known, len(mixed.faults)) == (1, 1)  # one fault, not two


def test_no_line_information_is_said() -> None:
    (fault,) = judge(printed(report(WRITE, READ.split(" in ")[0]))).faults
    assert f"read of {MATH} at an unknown line" in fault


def test_a_summary_that_counts_more_is_a_fault() -> None:
    verdict = judge(printed(report(WRITE, READ), displayed=2))
    assert verdict.faults == ("the summary counts 2 hazards, 1 were read",)
    assert judge(report(WRITE, READ)).faults == ("there is no summary",)


@pytest.mark.parametrize(
    "line",
    [
        "========= Error: process didn't terminate successfully",
        "========= Warning: something new",
        f"========= Error: Race reported between {WRITE} and more",
        f"=========     and {READ}",
        f"=========     and Atomic access at {K}+0x10 in x.cu:3 [2 hazards]",
        "========= Target application returned an error",
    ],
)
def test_what_is_not_understood_is_a_fault(line: str) -> None:
    verdict = judge(printed(report(WRITE, READ) + line))
    assert line in verdict.faults


def test_a_report_of_one_access_is_a_fault() -> None:
    text = printed(report(WRITE, READ, READ), report(WRITE))
    assert judge(text).faults == ("a report has only one access",)
    lonely = printed(f"=========     and {READ} [3 hazards]\n")
    assert f"=========     and {READ} [3 hazards]" in judge(lonely).faults


def test_the_reads_are_of_files_that_there_are() -> None:
    assert {"backward_score.cuh", "backward_math.cuh"} < {path.name for path in READS}
    assert {path.parent.name for path in READS} == {"fa3"}


def test_the_exit_status_stands_for_all_other_tools() -> None:
    text = printed(report(WRITE, READ))
    clean, said = sanitize.judge("racecheck", 9, text)
    assert clean
    assert "1 known races set aside" in said
    assert sanitize.judge("memcheck", 0, text)[0]
    assert not sanitize.judge("memcheck", 9, text)[0]


def test_a_program_that_does_not_end_well_is_not_clean() -> None:
    text = printed(report(WRITE, READ))
    assert not sanitize.judge("racecheck", 1, text)[0]
    assert not sanitize.judge("racecheck", 9, text.replace("8 problems\n", ""))[0]
    assert not sanitize.judge("racecheck", 9, printed())[0]


def test_kernels_under_a_tool_know_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[str, ...]] = []
    config = planned(of_gradients()).launches[0].config

    def note(*_: str) -> None:
        options.append(compiling.compile_options(config, FOLDER))

    monkeypatch.setattr(sanitize, "_every_problem", note)
    sanitize.inside("fa3", "float16")
    plain = compiling.compile_options(config, FOLDER)
    assert options == [(*plain, "-lineinfo")]
    assert "-lineinfo" not in plain


def test_what_is_left_is_said() -> None:
    unknown = report(WRITE, READ.replace("backward_score", "forward_softmax"))
    clean, said = sanitize.judge("racecheck", 9, printed(report(WRITE, READ), unknown))
    assert not clean
    assert "1 known races set aside" in said
    assert "forward_softmax.cuh:115" in said
