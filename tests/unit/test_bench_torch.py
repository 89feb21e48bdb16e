"""Calls of PyTorch and FlashAttention-4: arguments, memory and stream."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import torch_peers
from bench.cases import Case
from bench.inputs import Inputs, make_inputs
from bench.peers import importable, select_peers

from .fake_torch import FakeTorch, fake_torch

__all__ = ["fake_torch"]

CASE = Case("forward", "bfloat16", 2, 3, 3, 8, 8, 5, 5, True, "fa2")
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def _call(name: str, case: Case, inputs: Inputs | None = None) -> tuple[Any, Any]:
    (peer,) = select_peers(name)
    return peer.prepare(case, inputs or make_inputs(case, np)), peer


@pytest.mark.parametrize("name", BACKENDS)
def test_the_forward_pass_of_a_backend(fake_torch: FakeTorch, name: str) -> None:
    inputs = make_inputs(CASE, np)
    call, peer = _call(name, CASE, inputs)
    assert fake_torch.calls == []
    (out,) = peer.arrays(call())
    ((_, asked),) = fake_torch.calls
    assert asked["backend"] == BACKENDS[name]
    assert asked["shapes"] == [(2, 3, 5, 8)] * 3
    assert asked["options"] == {"is_causal": True, "enable_gqa": False}
    assert (asked["stream"], asked["grad"], asked["deterministic"]) == ("external 7", False, False)
    assert out.dtype == inputs.v.dtype
    assert np.shares_memory(out, inputs.v)
    assert np.array_equal(out, inputs.v)


@pytest.mark.parametrize("name", [*BACKENDS, "fa4"])
def test_the_backward_pass_is_autograds_alone(fake_torch: FakeTorch, name: str) -> None:
    inputs = make_inputs(CASE, np)
    call, peer = _call(name, replace(CASE, op="backward"), inputs)
    assert [what for what, _ in fake_torch.calls] == ["fa4" if name == "fa4" else "sdpa"]
    assert fake_torch.calls[0][1]["grad"] is True
    assert fake_torch.calls[0][1]["stream"] == "external 7"
    fake_torch.calls.clear()
    gradients = peer.arrays(call())
    ((what, asked),) = fake_torch.calls
    assert what == "grad"
    assert asked["options"] == {"retain_graph": True}
    assert asked["wanted"] == [True] * 3
    assert asked["stream"] == "external 7"
    for gradient, array in zip(gradients, (inputs.q, inputs.k, inputs.v), strict=True):
        assert np.shares_memory(gradient, array)


def test_flash_attention_4_takes_the_layout_as_it_is(fake_torch: FakeTorch) -> None:
    call, peer = _call("fa4", CASE)
    assert peer.arrays(call())[0].shape == (2, 5, 3, 8)
    ((_, asked),) = fake_torch.calls
    assert asked["shapes"] == [(2, 5, 3, 8)] * 3
    assert asked["options"] == {"causal": True}


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_flash_attention_4_is_asked_for_features(fake_torch: FakeTorch, op: str) -> None:
    case = replace(CASE, op=op, causal=False, window_size=(3, 0), sinks=True, softcap=9.0)
    inputs = make_inputs(case, np)
    call, peer = _call("fa4", case, inputs)
    results = peer.arrays(call())
    options = dict(fake_torch.calls[0][1]["options"])
    sinks = options.pop("learnable_sink")
    assert np.shares_memory(sinks.array, inputs.sinks)
    assert sinks.array.shape == (3,)
    assert options == {"causal": False, "window_size": (3, 0), "softcap": 9.0}
    if op == "backward":
        assert fake_torch.calls[1][1]["wanted"] == [True] * 4
        assert np.shares_memory(results[3], inputs.sinks)


@pytest.mark.parametrize("name", ["cudnn", "efficient", "math"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_bias_is_a_mask_that_all_batch_entries_share(
    fake_torch: FakeTorch, name: str, op: str
) -> None:
    case = replace(CASE, op=op, causal=False, bias=True)
    inputs = make_inputs(case, np)
    call, peer = _call(name, case, inputs)
    results = peer.arrays(call())
    options = dict(fake_torch.calls[0][1]["options"])
    mask = options.pop("attn_mask")
    assert options == {"is_causal": False, "enable_gqa": False}
    assert mask.array.shape == (2, 3, 5, 5)
    assert np.shares_memory(mask.array, inputs.bias)
    assert len(results) == (1 if op == "forward" else 3)
    if op == "backward":
        assert fake_torch.calls[1][1]["wanted"] == [True] * 3


@pytest.mark.parametrize("name", ["efficient", "math", "flex"])
def test_the_gradient_of_a_bias_is_the_last_result(fake_torch: FakeTorch, name: str) -> None:
    case = replace(CASE, op="backward", causal=False, bias=True, dbias=True)
    inputs = make_inputs(case, np)
    call, peer = _call(name, case, inputs)
    results = peer.arrays(call())
    what, asked = fake_torch.calls[-1]
    assert (what, asked["wanted"]) == ("grad", [True] * 4)
    assert results[3].shape == (1, 3, 5, 5)
    assert np.shares_memory(results[3], inputs.bias)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_flex_attention_is_compiled_for_the_slopes_of_a_case(
    fake_torch: FakeTorch, op: str
) -> None:
    case = replace(CASE, op=op, alibi=True, heads_kv=1)
    inputs = make_inputs(case, np)
    call, peer = _call("flex", case, inputs)
    peer.arrays(call())
    call()
    names = [what for what, _ in fake_torch.calls]
    calls = ["flex", "grad", "grad"] if op == "backward" else ["flex", "flex"]
    assert names == ["reset", "compile", *calls]
    compiled, asked = (fake_torch.calls[place][1] for place in (1, 2))
    assert (compiled["dynamic"], compiled["fullgraph"]) == (False, True)
    assert fake_torch.compiler.donated_buffer is False
    assert asked["shapes"] == [(2, 3, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)]
    assert (asked["stream"], asked["grad"]) == ("external 7", op == "backward")
    options = asked["options"]
    assert options["enable_gqa"] is True
    assert options["block_mask"] == ("mask", True, False, (None, None, 5, 5))
    slope = inputs.alibi_slopes[2]
    assert options["score_mod"](10.0, 1, 2, 4, 1) == 10.0 - 3 * slope
    if op == "backward":  # no gradient of the slopes is asked for
        assert fake_torch.calls[3][1]["wanted"] == [True] * 3


def test_flex_attention_reads_a_bias_of_the_pair(fake_torch: FakeTorch) -> None:
    case = replace(CASE, causal=False, bias=True)
    inputs = make_inputs(case, np)
    _call("flex", case, inputs)[0]()
    options = fake_torch.calls[2][1]["options"]
    assert options["block_mask"] is None
    bits = options["score_mod"](np.int16(0), 1, 2, 4, 1)
    assert bits == inputs.bias.view(np.int16)[0, 2, 4, 1]


def test_the_default_stream_is_pytorchs_own(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0))
    _call("flash", CASE)[0]()
    assert fake_torch.calls[0][1]["stream"] == "default"


def test_single_precision_is_not_shortened(fake_torch: FakeTorch) -> None:
    call, peer = _call("efficient", replace(CASE, dtype="float32"))
    assert peer.arrays(call())[0].dtype == np.float32
    assert fake_torch.backends.cuda.matmul.allow_tf32 is False
    assert fake_torch.state["precision"] == "highest"


def test_the_same_bits_in_every_run_where_they_are_asked(fake_torch: FakeTorch) -> None:
    case = replace(CASE, op="backward", deterministic=True)
    for name in ("flash", "fa4"):
        fake_torch.calls.clear()
        _call(name, case)[0]()
        first, second = fake_torch.calls
        assert (second[1]["deterministic"], second[1]["fills"]) == (True, False)
        assert first[1]["deterministic"] is True
        assert first[1]["options"].get("deterministic", False) is (name == "fa4")
    assert fake_torch.state["deterministic"] is False
    assert fake_torch.utils.deterministic.fill_uninitialized_memory is True


def test_the_switch_goes_back_after_an_error(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*tensors: Any, **options: Any) -> Any:
        raise RuntimeError("not deterministic")

    monkeypatch.setattr(fake_torch, "scaled_dot_product_attention", refuses)
    with pytest.raises(RuntimeError, match="not deterministic"):
        _call("cudnn", replace(CASE, op="backward", deterministic=True))
    assert fake_torch.state["deterministic"] is False


def test_versions_say_what_was_timed(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = select_peers("flash,cudnn,efficient,math,fa4")
    lines: list[str] = []
    assert importable(peers, lines.append) == peers
    said = [peer.version() for peer in peers]
    assert said[:4] == ["torch 9.9", "torch 9.9, cudnn 91900", "torch 9.9", "torch 9.9"]
    monkeypatch.setattr(fake_torch.cuda, "is_available", lambda: False)
    assert importable(peers, lines.append) == []
    assert lines[0] == "left out: torch flash: this PyTorch has no usable CUDA device"


def test_every_backend_is_a_peer() -> None:
    names = [backend.name for backend in torch_peers.BACKENDS]
    assert [peer.name for peer in select_peers(None)][1:] == names
