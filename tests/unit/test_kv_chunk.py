"""The option kv_chunk of the public functions and of the command line. No GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import cli, dispatch
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import Plan

from ..emulator.host_cupy import HostCupy, host_cupy
from .told_calls import no_kernel

_SHAPES = ((2, 100, 4, 64), (2, 700, 2, 64), (2, 700, 2, 64))


@pytest.fixture
def host() -> Iterator[HostCupy]:
    with host_cupy(make=no_kernel) as host:
        yield host


def _arrays(host: HostCupy) -> list[Any]:
    return [host.array(np.zeros(shape, np.float16)) for shape in _SHAPES]


@pytest.mark.parametrize("algorithm", ["auto", "fa2", "fa3"])
def test_every_function_with_a_forward_pass_takes_it(host: HostCupy, algorithm: Any) -> None:
    options = {"algorithm": algorithm, "kv_chunk": 128}
    ran: list[Plan] = []
    with dispatch.observe(ran.append):
        host.call(cuflash.attention, *_arrays(host), **options)
        _, pullback = host.call(cuflash.attention_vjp, *_arrays(host), **options)
        host.call(pullback, host.array(np.zeros(_SHAPES[0], np.float16)))
    prepared = cuflash.prepare(*_arrays(host), **options).plan
    explained = cuflash.explain(*_arrays(host), **options)
    assert [chunk_of(plan.problem) for plan in (*ran, prepared)] == [128, 128, 0, 128]
    assert "chunks of 128 keys" in str(explained)
    assert explained.workspace_bytes == prepared.workspace_bytes >= 4 * 6 * 2 * 4 * 100 * 66


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (-1, cuflash.ArgumentValueError, "kv_chunk: got -1"),
        (1 << 40, cuflash.ArgumentValueError, "kv_chunk: got 1099511627776"),
        (100, cuflash.ArgumentValueError, "kv_chunk: got 100; expected a multiple"),
        (64.0, cuflash.ArgumentTypeError, "kv_chunk: got 64.0"),
        (True, cuflash.ArgumentTypeError, "kv_chunk: got True"),
        ("64", cuflash.ArgumentTypeError, "kv_chunk: got '64'"),
    ],
    ids=str,
)
def test_what_is_no_chunk_is_refused(host: HostCupy, value: Any, kind: Any, said: str) -> None:
    for function in (cuflash.attention, cuflash.attention_vjp, cuflash.prepare, cuflash.explain):
        with pytest.raises(kind, match=said):
            function(*_arrays(host), kv_chunk=value, algorithm="fa3")


def test_the_numpy_backend_has_none() -> None:
    arrays = [np.zeros(shape, np.float32) for shape in _SHAPES]
    for function in (cuflash.attention, cuflash.attention_vjp, cuflash.explain):
        with pytest.raises(cuflash.UnsupportedError, match="NumPy backend walks all keys"):
            function(*arrays, backend="numpy", kv_chunk=128)
    cuflash.attention(*arrays, backend="numpy", kv_chunk=0)


def test_a_backward_pass_refuses_it(host: HostCupy) -> None:
    for function in (cuflash.prepare, cuflash.explain):
        with pytest.raises(cuflash.ArgumentValueError, match="chunks are of the forward pass"):
            function(*_arrays(host), operation="backward", kv_chunk=128)


def test_the_command_line_gives_it_to_the_forward_pass(
    host: HostCupy, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--seqlen-q", "700", "--head-dim", "64", "--dtype", "float16"]
    options = ["explain", *sizes, "--backend", "cuda", "--kv-chunk", "128"]
    assert cli.main(options) == 0
    assert capsys.readouterr().out.count("chunks of 128 keys") == 1
    assert cli.main([*options, "--operation", "forward"]) == 0
    assert cli.main([*options, "--operation", "backward"]) == 2
    assert "chunks are of the forward pass" in capsys.readouterr().err
