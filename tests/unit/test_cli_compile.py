"""``python -m cuflash compile``: its requests, its output and its exit codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cuflash import cli, compile_command
from cuflash.calls_to_come import Calls
from cuflash.compile_ahead import Outcome, kernels_of
from cuflash.planning.device import DeviceLimits
from cuflash.planning.kernel import KernelConfig

from ..architectures import LIMITS


class Compiler:
    """Replaces the compiler and the device, which is of the given architecture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, architecture: str = "90") -> None:
        self.limits = LIMITS[architecture]
        self.calls: list[Calls] = []
        self.arch: str | None = None
        self.threads: int | None = None
        self.error: type[BaseException] | None = None
        self.only_last = False  # plan only the last value of every list
        monkeypatch.setattr(compile_command, "device_of", self.device_of)
        monkeypatch.setattr(DeviceLimits, "query", lambda device: self.limits)
        monkeypatch.setattr(compile_command, "kernels_of", self.kernels_of)
        monkeypatch.setattr(compile_command, "compile_ahead", self.compile_ahead)

    def device_of(self, architecture: str | None) -> int:
        self.arch = architecture
        return 3

    def kernels_of(self, calls: Calls, limits: DeviceLimits) -> tuple[KernelConfig, ...]:
        self.calls.append(calls)
        lists = {f.name: getattr(calls, f.name) for f in fields(calls)}
        last = {name: given[-1:] for name, given in lists.items() if isinstance(given, tuple)}
        return kernels_of(replace(calls, **last) if self.only_last else calls, limits)

    def compile_ahead(
        self,
        kernels: Sequence[KernelConfig],
        device: int,
        told: Callable[[KernelConfig], None],
        threads: int | None,
    ) -> Outcome:
        assert device == 3
        self.threads = threads
        for kernel in kernels:
            told(kernel)
        if self.error is not None:
            raise self.error
        return Outcome(len(kernels), len(kernels) - 1, 1.26, Path("/cache"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def test_every_option_is_passed_on(compiler: Compiler) -> None:
    lists = "--head-dim 64,192/128 --dtype float32,float64 --operation backward --mask causal"
    lists += ",band --softcap yes --alibi no,yes --bias none,qk:float32 --sinks none,query"
    lists += " --mask-array none,qk,1 --dropout yes --used-lengths no,yes --packed yes,no"
    compiler.only_last = True
    others = "--algorithm fa2 --deterministic --unaligned --seqlen 512,1/4096 --arch sm_90"
    assert cli.main(["compile", *lists.split(), *others.split(), "--threads", "2"]) == 0
    assert compiler.calls == [
        Calls(
            head_dims=((64, 64), (192, 128)),
            dtypes=("float32", "float64"),
            operations=("backward",),
            masks=("causal", "band"),
            softcap=(True,),
            alibi=(False, True),
            bias=(None, "qk:float32"),
            mask_array=(None, "qk", "1"),
            sinks=(None, "query"),
            dropout=(True,),
            used_lengths=(False, True),
            packed=(True, False),
            algorithm="fa2",
            deterministic=True,
            unaligned=True,
            seqlens=((512, 512), (1, 4096)),
        )
    ]
    assert (compiler.arch, compiler.threads) == ("sm_90", 2)


@pytest.mark.parametrize(
    ("architecture", "dtypes"), [("90", ("float16", "bfloat16")), ("75", ("float16",))]
)
def test_by_default_it_compiles_both_passes_of_what_the_device_has(
    architecture: str, dtypes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch, architecture)
    compiler.only_last = True
    assert cli.main(["compile"]) == 0
    assert compiler.calls == [Calls(head_dims=((64, 64), (128, 128)), dtypes=dtypes)]
    assert (compiler.arch, compiler.threads) == (None, None)


def test_elsewhere_than_on_a_terminal_a_line_tells_of_each_kernel(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--head-dim 192/128 --dtype float16 --operation forward --seqlen 4096"
    assert cli.main(["compile", *options.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1/6 fa3/forward float16 192/128 full kv_chunks 128x128",
        "2/6 steps/merge float16 192/128 full kv_chunks 128x128",
        "3/6 fa3/forward float16 192/128 full 128x128",
        "4/6 fa3/forward float16 192/128 causal kv_chunks 128x128",
        "5/6 steps/merge float16 192/128 causal kv_chunks 128x128",
        "6/6 fa3/forward float16 192/128 causal 128x128",
        "6 kernels for  (sm_90): 5 compiled, 1 there already, 1.3 s; in /cache",
    ]


def test_on_a_terminal_there_is_a_bar(
    compiler: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_command, "Console", lambda: Console(force_terminal=True, width=120))
    options = "--head-dim 192/128 --dtype float16 --operation forward --seqlen 4096"
    assert cli.main(["compile", *options.split()]) == 0
    printed = capsys.readouterr().out
    assert "━" in printed
    assert "6/6" in printed
    assert "1/6 fa3" not in printed
    assert "5 compiled, 1 there already" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [("--head-dim 300", "head_dim"), ("--seqlen 0", "seqlen"), ("--algorithm fa3", "fa3")],
)
def test_what_cannot_be_done_is_said_and_ends_with_2(
    options: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(monkeypatch, "80")
    assert cli.main(["compile", *options.split()]) == 2
    answer = capsys.readouterr()
    assert answer.err.startswith("cuflash compile: error: ")
    assert named in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


@pytest.mark.parametrize(
    "options",
    [
        "--dtype int8",
        "--dtype float16,",
        "--mask window",
        "--head-dim 64/",
        "--bias h",
        "--mask-array h",
        "--mask-array qk:bool",
        "--threads 0",
    ],
)
def test_wrong_arguments_end_with_2(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", *options.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage:" in said
    assert options.split()[1].strip(",") in said


def test_without_a_gpu_it_ends_with_1_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cuflash.cuda import available

    monkeypatch.setattr(available, "_why_not", lambda: "there is no CUDA device")
    assert cli.main(["compile"]) == 1
    said = capsys.readouterr().err
    assert "there is no CUDA device" in said
    assert "CUPY_CACHE_DIR" in said


def test_an_interrupt_ends_with_130_and_leaves_the_terminal_alone(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.error, compiler.only_last = KeyboardInterrupt, True
    assert cli.main(["compile", "--head-dim", "64"]) == 130
    assert "Traceback" not in capsys.readouterr().err
