"""The demo's step as one graph, replayed on the emulated device, gives the text of NumPy."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.caches import device
from cuflash.demo import Options, decoder
from cuflash.demo.decoder import Decoder
from cuflash.demo.generate import _replayed
from cuflash.demo.model import Parameters

from .arithmetic import array_module
from .build import compiler
from .host_cupy import HostCupy, host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_OPTIONS = Options(
    steps=1, batch=1, seqlen=12, layers=2, heads=2, head_dim=16, dtype="float32", backend="cuda"
)
_STREAM, _PROMPT, _BYTES = 77, b"ab" * 9, 20


def _written(steps: Any, writer: Decoder) -> None:
    writer.begin(_PROMPT)
    for _ in range(_BYTES - 1):
        steps()


def _on_numpy(noise: Any) -> bytes:
    options = replace(_OPTIONS, backend="numpy")
    writer = Decoder(_parameters(np), options, noise, np)
    _written(writer.step, writer)
    return bytes(writer.text)


def _parameters(xp: Any) -> Parameters:
    host = Parameters.drawn(_OPTIONS.shape, 1, "float32", np)
    host["head"][...] *= 20
    return host.copied("float32", xp)


def _replays(host: HostCupy, noise: Any) -> tuple[bytes, bytes]:
    """Two texts by replays of one graph; the second starts with empty caches."""
    xp = array_module(host, _STREAM)
    writer = Decoder(_parameters(xp), _OPTIONS, xp.asarray(noise), xp)
    writer.begin(_PROMPT)
    how, step = _replayed(writer.step, xp)
    assert how == "one graph, replayed"
    told = dict(host.auditor.told)
    texts = []
    for _ in range(2):
        writer.text.set(np.zeros(len(noise), np.uint8))
        writer.begin(_PROMPT)
        host.auditor.told = dict(told)  # the step's plans, which the prompt's have replaced
        host.auditor.plan = None
        for _ in range(_BYTES - 1):
            step()
        texts.append(bytes(writer.text.peek()))
    return texts[0], texts[1]


def test_a_replayed_graph_writes_the_text_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).gumbel(size=(len(_PROMPT) + _BYTES + 1, 256))
    noise = noise.astype(np.float32)
    expected = _on_numpy(noise)
    assert len(set(expected)) > 10
    device._kept_for_graphs.clear()
    decoder._product.cache_clear()
    with host_cupy() as host, host.runtime.on_stream(_STREAM, 0):
        attend = functools.partial(host.call, cuflash.attention_with_kvcache)
        monkeypatch.setattr(decoder, "attention_with_kvcache", attend)
        first, second = _replays(host, noise)
    device._kept_for_graphs.clear()
    decoder._product.cache_clear()
    assert first == second == expected
