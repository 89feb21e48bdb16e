"""``python -m cuflash explain`` with ``--operation kvcache`` and ``append``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import cuflash
from cuflash import cli
from cuflash.explain_command_caches import CACHE_OPERATIONS, arrays_of_caches

from ..emulator.host_cupy import HostCupy, host_cupy
from .told_calls import no_kernel


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCupy]:
    monkeypatch.delenv("CUFLASH_BACKEND", raising=False)
    with host_cupy(make=no_kernel) as host:
        yield host


def _caches(*axes: int, dims: tuple[int, int] = (128, 128)) -> dict[str, Any]:
    both = {f"{name}_cache": (*axes, dim) for name, dim in zip("kv", dims, strict=True)}
    return {**both, "cache_seqlens": "int32"}


def _new(*axes: int, dims: tuple[int, int] = (128, 128)) -> dict[str, Any]:
    return {name: (*axes, dim) for name, dim in zip("kv", dims, strict=True)}


_STEP = {"q": (1, 1, 16, 128), **_new(1, 1, 16), **_caches(1, 4096, 16), "dtype": "float16"}
_APPEND = {**_new(1, 1, 16), **_caches(1, 4096, 16), "dtype": "float16"}
_TABLES = dict.fromkeys(("rotary_cos", "rotary_sin"), (4096, 64))
_ROTARY = {**_TABLES, "rotary_interleaved": False}


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ("kvcache", _STEP),
        ("kvcache --new-tokens 0", {**_STEP, "k": None, "v": None}),
        ("kvcache --seqlen-q 5", {**_STEP, "q": (1, 5, 16, 128), **_new(1, 5, 16)}),
        ("kvcache --seqlen-q 5 --new-tokens 2", {**_STEP, "q": (1, 5, 16, 128), **_new(1, 2, 16)}),
        (
            "kvcache --batch 3 --seqlen-kv 100 --heads-q 8 --heads-kv 2 --head-dim 64",
            {"q": (3, 1, 8, 64), **_new(3, 1, 2, dims=(64, 64)), "dtype": "float16",
             **_caches(3, 100, 2, dims=(64, 64))},
        ),
        (
            "kvcache --head-dim-v 64 --dtype bfloat16",
            {"q": (1, 1, 16, 128), **_new(1, 1, 16, dims=(128, 64)), "dtype": "bfloat16",
             **_caches(1, 4096, 16, dims=(128, 64))},
        ),
        (
            "kvcache --batch 2 --page-size 16 --seqlen-kv 100",
            {"q": (2, 1, 16, 128), **_new(2, 1, 16), **_caches(14, 16, 16), "page_table": (2, 7),
             "dtype": "float16"},
        ),
        (
            "kvcache --cache-dtype float8_e4m3fn",
            {**_STEP, "cache_dtype": "float8_e4m3fn", "k_scale": 1, "v_scale": 1},
        ),
        ("kvcache --rotary", {**_STEP, **_ROTARY}),
        (
            "kvcache --rotary --page-size 64 --seqlen-kv 65 --dtype float64",
            {**_STEP, **_caches(2, 64, 16), "page_table": (1, 2), "dtype": "float64",
             "rotary_cos": (128, 64), "rotary_sin": (128, 64), "rotary_interleaved": False},
        ),
        (
            "kvcache --causal --softcap 9 --sinks --algorithm fa2 --kv-chunk 512 --backend cuda",
            {**_STEP, "causal": True, "softcap": 9.0, "sinks": "float16", "algorithm": "fa2",
             "kv_chunk": 512},
        ),
        ("kvcache --alibi-slopes heads --compile",
         {**_STEP, "alibi_slopes": (16,), "compile": True}),
        ("kvcache --window-size 64 0 --algorithm fa3 --blocks 128 128",
         {**_STEP, "window_size": (64, 0), "algorithm": "fa3", "blocks": (128, 128)}),
        (
            "kvcache --heads-q 8",
            {**_STEP, "q": (1, 1, 8, 128), **_new(1, 1, 8), **_caches(1, 4096, 8)},
        ),
        ("append", _APPEND),
        ("append --new-tokens 7 --heads-kv 2",
         {**_new(1, 7, 2), **_caches(1, 4096, 2), "dtype": "float16"}),
        ("append --new-tokens 0", {**_APPEND, **_new(1, 0, 16)}),
        ("append --rotary --page-size 4096",
         {**_APPEND, **_ROTARY, "page_table": (1, 1)}),
    ],
)  # fmt: skip
def test_the_options_are_those_of_the_call(
    host: HostCupy, options: str, keywords: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(f"explain --operation {options}".split()) == 0
    operation: Any = options.split()[0]
    expected = str(cuflash.explain(operation=operation, **keywords))
    assert capsys.readouterr().out == f"{expected}\n"


def test_every_entry_has_pages_of_its_own() -> None:
    command = "explain --operation append --batch 3 --page-size 16 --seqlen-kv 40 --head-dim 8"
    arrays = arrays_of_caches(cli._parser().parse_args(command.split()))
    pages = _caches(9, 16, 16, dims=(8, 8))
    assert arrays == {**pages, **_new(3, 1, 16, dims=(8, 8)), "page_table": (3, 3)}


@pytest.mark.parametrize("options", ["--rotary", "--page-size 32", "--new-tokens 0"])
def test_an_option_changes_what_is_told(
    host: HostCupy, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for more in ("", options):
        assert cli.main(f"explain --operation kvcache {more}".split()) == 0
        told.append(capsys.readouterr().out)
    assert told[0] != told[1]


@pytest.mark.parametrize("operation", CACHE_OPERATIONS)
def test_json_names_the_operation(
    host: HostCupy, operation: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(f"explain --json --operation {operation} --page-size 16".split()) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert list(found) == [operation]
    keywords = _STEP if operation == "kvcache" else _APPEND
    paged = {**keywords, **_caches(256, 16, 16), "page_table": (1, 256)}
    said = cuflash.explain(operation=operation, **paged)
    told = found[operation]
    assert [kernel["name"] for kernel in told["kernels"]] == [k.name for k in said.kernels]
    assert told["kernels"][0]["name"] == "steps/append_kv"
    assert told["workspace_bytes"] == said.workspace_bytes
    assert (told["algorithm"], told["reason"]) == (said.algorithm, said.reason)
    assert told["problem"]["text"] == str(said.problem)
    assert ("page_table" in told["problem"]["arrays"]) == (operation == "kvcache")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--page-size 16", "--page-size: got 16; expected nothing: --operation both has none"),
        ("--operation forward --new-tokens 0", "--new-tokens: got 0; expected nothing"),
        ("--operation backward --rotary", "--rotary: got True; expected nothing"),
        ("--cache-dtype float8_e4m3fn", "--cache-dtype: got float8_e4m3fn; expected nothing"),
        ("--operation kvcache --layout bshd", "layout: got 'bshd'; expected nothing"),
        ("--operation kvcache --q-offset 3", "q_offset: got 3; expected nothing"),
        ("--operation kvcache --wrt q", "wrt: got ('q',); expected nothing"),
        ("--operation kvcache --deterministic", "deterministic: got True; expected nothing"),
        ("--operation kvcache --bias hk", "bias: got "),
        ("--operation kvcache --mask-array qk", "mask: got "),
        ("--operation kvcache --block-mask 128x128", "block_mask: got "),
        ("--operation kvcache --dropout-p 0.5", "dropout_p: got 0.5"),
        ("--operation kvcache --seqused-kv", "seqused_kv: got "),
        ("--operation kvcache --cu-seqlens-q 2", "--cu-seqlens-q: got (3,); expected nothing"),
        ("--operation kvcache --cu-seqlens-kv 2", "cu_seqlens_kv: got (3,); expected nothing"),
        ("--operation kvcache --page-size 0", "--page-size: got 0; expected 1 or more"),
        ("--operation kvcache --page-size 4 --seqlen-kv -3", "--seqlen-kv: got -3; expected 0"),
        ("--operation kvcache --new-tokens -1", "k: got (1, -1, 16, 128); expected a shape"),
        ("--operation kvcache --rotary --new-tokens 0", "rotary_cos: got an array and no new"),
        ("--operation kvcache --heads-q 3 --heads-kv 2", "k_cache: got 2 heads beside 3 of q"),
        ("--operation append --seqlen-q 3", "--seqlen-q: got 3; expected nothing: --operation app"),
        ("--operation append --heads-q 8", "--heads-q: got 8; expected nothing"),
        ("--operation append --causal", "causal: got True; expected nothing: operation='append'"),
        ("--operation append --algorithm fa2", "algorithm: got 'fa2'; expected nothing"),
        ("--operation append --kv-chunk 64", "kv_chunk: got 64; expected nothing"),
        ("--operation kvcache --backend numpy", "operation='kvcache' is not explained for NumPy"),
    ],
)
def test_what_the_operation_does_not_take_is_refused(
    host: HostCupy, options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(f"explain {options}".split()) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err.startswith(f"cuflash explain: error: {says}")
    assert answer.err.count("\n") == 1


def test_the_examples_of_help_run(host: HostCupy, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:")
    commands = [line.split(" -m cuflash ")[1] for line in examples.strip().splitlines()]
    assert any("--operation kvcache" in command for command in commands)
    for command in commands:
        assert cli.main(command.split()) == 0, command
