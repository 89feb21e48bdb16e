"""``--json`` prints one object with the documented keys and all facts of the text."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash import cli, explain_command, info_command
from cuflash.planning.device import DeviceLimits

from ..architectures import LIMITS
from ..emulator.host_cupy import HostCupy, host_cupy
from .told_calls import no_kernel


@pytest.fixture
def host() -> Iterator[HostCupy]:
    with host_cupy(make=no_kernel) as host:
        yield host


def _printed(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(command.split()) == 0
    answer = capsys.readouterr()
    assert answer.err == ""
    assert answer.out.isascii()
    found: dict[str, Any] = json.loads(answer.out, parse_constant=pytest.fail)
    return found


def _documented(root: Path, command: str) -> set[str]:
    """The keys in the page's table for a command."""
    page = (root / "docs/api/commands.md").read_text("utf-8")
    _, _, part = page.partition(f"`{command} --json`")
    table, _, _ = part[part.index("|") :].partition("\n\n")
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {key for cell in cells for key in re.findall(r"`([a-z_.]+)`", cell)}


def test_info_has_the_documented_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(_printed("info --json", capsys)) == _documented(root, "info")


def test_info_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = _printed("info --json", capsys), cuflash.info()
    assert found["versions"] == dict(said.versions)
    assert found["environment"] == dict(said.environment)
    assert found["cuda"]["usable"] == cuflash.is_available()
    assert said.cuda == (found["cuda"]["error"] or "usable")
    assert said.host == f"{found['cpu_cache']['bytes_per_core']:,} bytes"
    assert said.sources == found["cuda_sources"]["folder"]
    assert said.kernel_cache.startswith(found["kernel_cache"]["folder"])
    assert found["kernel_cache"]["binaries"] >= 0
    assert len(found["devices"]) == len(said.devices)


def test_info_has_every_limit_of_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = cuflash.info()
    device = LIMITS["90"]
    found = cuflash.Info(
        said.versions, "usable", (device,), said.host, said.sources, "", said.environment
    )
    monkeypatch.setattr(info_command, "info", lambda: found)
    (shown,) = _printed("info --json", capsys)["devices"]
    assert set(shown) == {"architecture", *(field.name for field in fields(DeviceLimits))}
    assert (shown["architecture"], shown["num_sms"]) == ("sm_90", device.num_sms)


def test_what_info_cannot_find_is_null_beside_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_CUDA_SRC", "/nowhere")
    found = _printed("info --json", capsys)
    assert found["cuda_sources"]["folder"] is None
    assert "/nowhere" in found["cuda_sources"]["error"]
    monkeypatch.setenv("CUFLASH_CPU_CACHE", "much")
    found = _printed("info --json", capsys)
    assert found["cpu_cache"]["bytes_per_core"] is None
    assert "CUFLASH_CPU_CACHE" in found["cpu_cache"]["error"]
    assert found["environment"]["CUFLASH_CPU_CACHE"] == "much"


def test_a_kernel_cache_that_cannot_be_looked_at_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = "/" + "long" * 100
    monkeypatch.setenv("CUPY_CACHE_DIR", folder)
    found = _printed("info --json", capsys)["kernel_cache"]
    assert (found["folder"], found["binaries"]) == (folder, None)
    assert "too long" in found["error"]
    assert found["error"] in cuflash.info().kernel_cache


_SIZES = "explain --json --backend numpy --seqlen-q 9 --head-dim 8"


def test_explain_has_the_documented_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(_SIZES, capsys)
    assert list(found) == ["forward", "backward"]
    for said in found.values():
        problem = {f"problem.{key}" for key in said["problem"]}
        assert (set(said) - {"problem"}) | problem == _documented(root, "explain")


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_explain_has_the_pass_that_was_asked_for(
    operation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--heads-q 4 --heads-kv 2 --window-size 3 none --bias hk:float32 --wrt q,bias"
    if operation == "forward":
        options = options.partition(" --wrt")[0]
    found = _printed(f"{_SIZES} --operation {operation} {options}", capsys)
    assert list(found) == [operation]
    problem = found[operation]["problem"]
    assert (problem["heads_q"], problem["heads_kv"], problem["seqlen_kv"]) == (4, 2, 9)
    assert (problem["mask"], problem["q_first"], problem["q_offset"]) == ("left", -3, None)
    assert problem["features"] == ["window", "bias"]
    assert problem["arrays"] == {"bias": {"dtype": "float32", "shape": [1, 4, 1, 9]}}
    assert problem["wrt"] == ([] if operation == "forward" else ["q", "bias"])


def test_explain_has_what_the_text_has(host: HostCupy, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan for a device has kernels, and algorithms that are not taken."""
    options = "explain --backend cuda --dtype float32 --operation forward"
    assert cli.main(options.split()) == 0
    text = capsys.readouterr().out
    said = _printed(f"{options} --json", capsys)["forward"]
    assert said["kernels"]
    assert said["not_taken"]
    for kernel in said["kernels"]:
        line = f"{kernel['name']} ({kernel['architecture']}): {kernel['grid']:,} blocks of "
        line += f"{kernel['threads']} threads, {kernel['shared_bytes']:,} bytes of shared memory"
        assert line in text
    for one in said["not_taken"]:
        assert f"not {one['algorithm']}      {one['reason']}" in text
    for shown in (said["problem"]["text"], said["reason"], said["device"], said["algorithm"]):
        assert shown in text
    assert f"{said['workspace_bytes']:,} bytes" in text
    assert f"{said['block_q']} queries x {said['block_kv']} keys" in text
    assert f"copies       {', '.join(said['copies']) or 'none'}" in text


def test_warnings_are_part_of_the_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explain = explain_command.explain

    def warned(*args: Any, **given: Any) -> cuflash.Explanation:
        warnings.warn("an old compiler", stacklevel=1)
        return explain(*args, **given)

    monkeypatch.setattr(explain_command, "explain", warned)
    found = _printed(f"{_SIZES} --operation forward", capsys)
    assert found["forward"]["warnings"] == ["an old compiler"]


def test_an_error_leaves_the_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--json", "--head-dim", "0"]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err.startswith("cuflash explain: error: ")
