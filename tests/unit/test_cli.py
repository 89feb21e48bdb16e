"""The command line: its output and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import cli
from cuflash.demo import PRESETS, Options

_HOST = ["--backend", "numpy"]


def _in_process(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=root, capture_output=True, text=True, check=False
    )


def test_info_prints_what_info_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert np.__version__ in printed
    assert cuflash.info().host in printed


def test_explain_prints_the_explanation_of_both_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *_HOST]) == 0
    shape = (1, 4096, 16, 128)
    expected = [
        str(cuflash.explain(*[shape] * 3, dtype="float16", backend="numpy", operation=operation))
        for operation in ("forward", "backward")
    ]
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"


def test_explain_passes_every_option_on(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--seqlen-q 5 --seqlen-kv 7 --heads-q 4 --heads-kv 2 --head-dim 8 --head-dim-v 16"
    others = "--dtype float32 --causal --q-offset 1 --layout hsd --algorithm fa1 --blocks 2 3"
    others += " --deterministic"
    command = f"explain --operation backward {sizes} {others}".split()
    assert cli.main([*command, *_HOST]) == 0
    expected = cuflash.explain(
        (4, 5, 8),
        (2, 7, 8),
        (2, 7, 16),
        operation="backward",
        dtype="float32",
        causal=True,
        q_offset=1,
        layout="hsd",
        algorithm="fa1",
        deterministic=True,
        blocks=(2, 3),
        backend="numpy",
    )
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ("--window-size 3 none", {"window_size": (3, None)}),
        ("--window-size none 0", {"window_size": (None, 0)}),
        ("--alibi-slopes heads", {"alibi_slopes": (16,)}),
        (
            "--alibi-slopes batch --wrt alibi_slopes",
            {"alibi_slopes": (1, 16), "wrt": ("alibi_slopes",)},
        ),
        ("--bias hk", {"bias": (1, 16, 1, 9)}),
        ("--bias bq:float32 --wrt bias", {"bias": ((1, 1, 9, 1), "float32"), "wrt": ("bias",)}),
        ("--bias 1 --wrt q,bias", {"bias": (1, 1, 1, 1), "wrt": ("q", "bias")}),
        ("--mask-array qk", {"mask": (1, 1, 9, 9)}),
        ("--mask-array bhk --bias 1", {"mask": (1, 16, 1, 9), "bias": (1, 1, 1, 1)}),
        ("--mask-array 1 --wrt q", {"mask": (1, 1, 1, 1), "wrt": ("q",)}),
        ("--sinks", {"sinks": "float16"}),
        ("--sinks float32", {"sinks": "float32"}),
        ("--wrt v", {"wrt": ("v",)}),
        (
            "--sinks --wrt sinks,q --window-size 2 1",
            {"sinks": "float16", "wrt": ("sinks", "q"), "window_size": (2, 1)},
        ),
        ("--dropout-p 0.25", {"dropout_p": 0.25, "dropout_seed": 0}),
    ],
)
def test_explain_passes_on_what_features_take(
    options: str, keywords: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"explain --operation backward --seqlen-q 9 --head-dim 8 {options}".split()
    assert cli.main([*command, *_HOST]) == 0
    shape, fixed = (1, 9, 16, 8), {"operation": "backward", "dtype": "float16", "backend": "numpy"}
    expected = str(cuflash.explain(*[shape] * 3, **fixed, **keywords))
    assert capsys.readouterr().out == f"{expected}\n"
    without = str(cuflash.explain(*[shape] * 3, **fixed))
    assert expected != without


def test_explain_packs_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--operation=forward", "--seqlen-q=9", "--head-dim=8", "--layout=shd"]
    packed = ["--cu-seqlens-q=3", "--cu-seqlens-kv=3"]
    assert cli._parser().parse_args([*command, *packed]).cu_seqlens_kv == (4,)
    assert cli.main([*command, *packed, *_HOST]) == 0
    given = {"cu_seqlens_q": (4,), "cu_seqlens_kv": (4,), "layout": "shd", "backend": "numpy"}
    expected = str(cuflash.explain(*[(9, 16, 8)] * 3, dtype="float16", **given))
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("explain --cu-seqlens-q 3 --cu-seqlens-kv 3", "layout='shd'"),
        ("explain --layout shd --cu-seqlens-q 3 --cu-seqlens-kv 2", "cu_seqlens_kv"),
        ("explain --layout shd --cu-seqlens-q 3", "cu_seqlens_kv"),
        ("explain --layout shd --cu-seqlens-q -1 --cu-seqlens-kv -1", "cu_seqlens_q"),
        ("explain --heads-q 3 --heads-kv 2", "heads"),
        ("explain --algorithm fa3 --backend numpy", "fa3"),
        ("explain --layout sd --batch 2", "--batch"),
        ("explain --wrt q,q", "wrt"),
        ("explain --wrt sinks", "sinks as an argument"),
        ("explain --wrt alibi_slopes", "alibi_slopes as an argument"),
        ("explain --wrt bias", "bias as an argument"),
        ("explain --mask-array qk --wrt mask", "wrt"),
        ("explain --bias qk:float64", "bias"),
        ("explain --bias qk:no", "bias"),
        ("explain --alibi-slopes heads --q-offset 2000000000", "q_offset"),
        ("explain --sinks float64", "sinks"),
        ("explain --sinks no", "sinks"),
        ("explain --dropout-p 2", "dropout_p"),
        ("explain --dropout-seed 3", "dropout_seed"),
        ("explain --window-size -1 0", "window_size"),
        ("demo --head-dim 7", "head_dim"),
        ("demo --steps 0", "steps"),
        ("demo --generate -1", "generate"),
        ("demo --seqlen 1000000000", "seqlen"),
        ("demo --algorithm fa3 --backend numpy", "fa3"),
    ],
)
def test_what_cannot_be_done_is_said_and_ends_with_2(
    command: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert cli.main(command.split()) == 2
    answer = capsys.readouterr()
    assert answer.err.startswith(f"cuflash {command.split()[0]}: error: ")
    assert named in answer.err
    assert answer.err.count("\n") == 1


def test_the_version_is_printed(root: Path) -> None:
    ended = _in_process(root, "-m", "cuflash", "--version")
    assert (ended.returncode, ended.stdout) == (0, f"cuflash {cuflash.__version__}\n")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "unknown",
        "explain --dtype int8",
        "explain --window-size 3 x",
        "explain --bias hh",
        "explain --bias x",
        "explain --mask-array kk",
        "explain --mask-array qk:bool",
        "demo --steps many",
    ],
)
def test_wrong_arguments_end_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_demo_gets_its_options_and_its_outcome_is_the_exit_code(
    good: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Options] = []

    def run(options: Options) -> bool:
        taken.append(options)
        return good

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    given = "--size gpu --steps 7 --seed 0 --head-dim 32 --dtype bfloat16 --algorithm fa1"
    assert cli.main(["demo", *given.split()]) == code
    (options,) = taken
    assert (options.steps, options.seed, options.head_dim) == (7, 0, 32)
    assert (options.dtype, options.algorithm, options.backend) == ("bfloat16", "fa1", "cuda")
    assert options.batch == PRESETS["gpu"].batch


@pytest.mark.parametrize(("given", "count"), [("", 0), ("--generate", 200), ("--generate 7", 7)])
def test_the_demo_writes_as_much_as_it_is_asked_for(
    given: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Options] = []
    monkeypatch.setattr(cli, "run", taken.append)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    cli.main(["demo", *given.split()])
    assert [options.generate for options in taken] == [count]


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: Options) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert cli.main(["demo"]) == 130


def test_the_demo_on_a_cpu_runs_in_a_process_of_its_own_with_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(
        command: list[str], *, env: dict[str, str], check: bool
    ) -> subprocess.CompletedProcess[str]:
        started.append((command, env))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(cli.subprocess, "run", start)
    assert cli.main(["demo", "--steps", "3", *_HOST]) == 1
    ((command, environment),) = started
    assert command == [sys.executable, "-m", "cuflash", "demo", "--steps", "3", *_HOST]
    assert environment["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize("command", ["explain", "demo"])
def test_the_module_ends_with_the_code_of_the_command(command: str, root: Path) -> None:
    ended = _in_process(root, "-m", "cuflash", command, "--algorithm", "fa3", *_HOST)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"cuflash {command}: error: ")


def test_the_demo_that_learns_too_little_ends_with_1(root: Path) -> None:
    sizes = "--steps 2 --batch 2 --seqlen 64 --layers 1 --heads 1 --head-dim 8"
    ended = _in_process(root, "-m", "cuflash", "demo", *sizes.split(), *_HOST)
    assert ended.returncode == 1, ended.stderr
    assert "does NOT beat both" in ended.stdout


def test_importing_the_package_leaves_the_command_line_alone(root: Path) -> None:
    program = "import sys, cuflash; print(*{'argparse', 'rich', 'cupy'} & set(sys.modules))"
    ended = _in_process(root, "-c", program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "")
