"""FlashAttention-3 and cuflash under ``jax.jit``: compiled, timed, verified and reported."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import kernel_times, run, tables
from bench.cases import Case
from bench.inputs import Inputs, make_inputs, widened
from bench.kernel_times import busy

jax = pytest.importorskip("jax", reason="JAX is not installed")

from bench import flash3  # noqa: E402

CASE = Case("forward", "float32", 1, 2, 2, 16, 16, 24, 24, False, "fa2", window_size=(5, 0))


def _plain(case: Case) -> Any:
    """Attention by whole matrices in JAX, which JAX differentiates by itself."""
    distance = np.arange(case.seqlen_kv)[None] - np.arange(case.seqlen_q)[:, None]
    left, right = case.window_size or (case.seqlen_kv, 0)
    seen = (distance >= -(left or 0)) & (distance <= (right or 0))

    def function(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        scores = jax.numpy.einsum("bihd,bjhd->bhij", q, k) * case.head_dim**-0.5
        p = jax.numpy.exp(jax.numpy.where(seen, scores, -jax.numpy.inf))
        more = jax.numpy.exp(sinks[0])[None, :, None, None] if sinks else 0.0
        p = p / (p.sum(-1, keepdims=True) + more)
        return jax.numpy.einsum("bhij,bjhd->bihd", p, v)

    return function


def _measure(case: Case, **functions: Any) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[str] = []
    inputs = make_inputs(case, np)
    return flash3.measure(
        case, inputs, jax.numpy.asarray, np.asarray, lines.append, functions
    ), lines


TIMED = flash3.timed


@pytest.mark.parametrize(("milliseconds", "how"), [(0.3, "passes"), (0.1, "kernels")])
def test_short_passes_are_timed_by_their_kernels(milliseconds: float, how: str) -> None:
    def of_passes(passes: Any, wait: Any) -> Any:
        return {"a": [1.0] * 3, "b": [milliseconds] * 3}

    def of_kernels(passes: Any, wait: Any) -> Any:
        return {"a": [0.9] * 3, "b": [0.05] * 3}

    def broken(passes: Any, wait: Any) -> Any:
        raise RuntimeError("holds no kernel")

    lines: list[str] = []
    passes: Any = {"a": None, "b": None}
    found, times = TIMED(passes, lines.append, of_passes, of_kernels)
    assert (found, times["b"][0], lines) == (how, 0.05 if how == "kernels" else 0.3, [])
    found, times = TIMED(passes, lines.append, of_passes, broken)
    assert (found, times["b"][0]) == ("passes", milliseconds)
    assert len(lines) == (how == "kernels")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flash3._VERSIONS, "peer", lambda: "1")  # type: ignore[index]
    monkeypatch.setattr(flash3, "digest_now", lambda algorithm, op, features: "")
    times = {"cuflash": [1.0] * 3, "peer": [2.0] * 3}
    monkeypatch.setattr(
        flash3, "timed", lambda passes, say: ("passes", {name: times[name] for name in passes})
    )


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_ours_under_jit_is_verified_and_compared(op: str) -> None:
    case = replace(CASE, op=op)
    rows, lines = _measure(case, cuflash=flash3._ours, peer=_plain)
    assert lines == []
    assert [(row["impl"], row["ratio"], row["how"]) for row in rows] == [
        ("cuflash", 2.0, "passes"),
        ("peer", 0.5, "passes"),
    ]
    assert rows[0]["options"] == {"algorithm": "fa2", "window_size": (5, 0)}
    assert rows[1]["options"] == {"window_size": (5, 0)}
    assert all(0 < row["worst_ratio"] < 10 for row in rows)
    assert rows[0]["tflops"] == round(case.flops / 1e9, 2)
    assert flash3.summary(rows) == [
        f"{op}: 2.000 times flash-attn-3 (geometric mean of 1), worst 2.000"
    ]


def test_what_the_peer_has_no_argument_for_is_refused() -> None:
    for name in ("alibi", "bias-backward", "mask"):
        with pytest.raises(SystemExit, match="no slopes, no bias and no boolean mask"):
            flash3.run_flash3(name)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_gradient_of_sinks_is_the_last_result(op: str) -> None:
    case = replace(CASE, op=op, sinks=True)
    rows, _ = _measure(case, cuflash=_plain, peer=_plain)
    assert all(row["worst_ratio"] < 10 for row in rows)


def test_a_backward_pass_is_the_pullback_alone() -> None:
    case, ran = replace(CASE, op="backward"), []

    @jax.custom_vjp
    def function(q: Any, k: Any, v: Any) -> Any:
        return v

    def forward(q: Any, k: Any, v: Any) -> Any:
        jax.debug.callback(lambda: ran.append("forward"))
        return v, (q, k)

    def backward(saved: Any, dout: Any) -> Any:
        jax.debug.callback(lambda: ran.append("backward"))
        return *saved, dout

    function.defvjp(forward, backward)
    x: Inputs = make_inputs(case, np)
    call = flash3.compiled_pass(case, function, [x.q, x.k, x.v], x.dout)
    jax.effects_barrier()
    ran.clear()
    results = [call(), call()][-1]
    jax.effects_barrier()
    assert ran == ["backward"] * 2
    for found, given in zip(results, (x.q, x.k, x.dout), strict=True):
        np.testing.assert_array_equal(found, widened(given))


def test_rows_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert tables.render(tables.FLASH3) == ""
    cases = [CASE, replace(CASE, op="backward", window_size=None, causal=True)]
    cases += [replace(case, seqlen_q=48, seqlen_kv=48) for case in cases]
    rows = [row for case in cases for row in _measure(case, cuflash=_plain, peer=_plain)[0]]
    rows.append({**rows[0], "ratio": None})  # a row without the peer's time
    common = {"run": "2", "date": "2026-11-24", "gpu": "NVIDIA H200", "jax": "1"}
    old = {**rows[0], **common, "run": "1"}
    stored = [old, *({**row, **common, "tflops": float(i)} for i, row in enumerate(rows))]
    (tmp_path / "nvidia-h200-flash3.json").write_text(json.dumps(stored))
    shown = tables.render(tables.FLASH3)
    assert "| forward | 16 | 2 | 24 | window (5, 0) | passes | 0 | 1 | 2.000 | 2.000 |" in shown
    assert "| backward | 16 | 2 | 48 | causal | passes | 6 | 7 | 2.000 | 2.000 |" in shown
    assert len([line for line in shown.splitlines() if line.startswith("| ")]) == 1 + 4
    assert "forward: 2.00 times FlashAttention-3, worst 2.00; backward: 2.00 times" in shown


def test_what_computes_something_else_is_refused() -> None:
    def wrong(case: Case) -> Any:
        return _plain(replace(case, window_size=(4, 0)))

    with pytest.raises(RuntimeError, match="peer, fa2 forward"):
        _measure(CASE, cuflash=_plain, peer=wrong)


def test_a_peer_that_cannot_is_left_out() -> None:
    def unable(case: Case) -> Any:
        raise ValueError("takes bf16 or fp16")

    rows, lines = _measure(CASE, cuflash=_plain, peer=unable)
    assert [(row["impl"], row["ratio"]) for row in rows] == [("cuflash", None)]
    assert lines == [f"left out: peer, {CASE}: ValueError: takes bf16 or fp16"]
    with pytest.raises(ValueError, match="takes bf16"):
        _measure(CASE, cuflash=unable)


def test_a_cap_reaches_our_call_and_the_peer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("cuflash.jax.attention", lambda *arrays, **given: asked.append(given))
    monkeypatch.setitem(sys.modules, "dew_flash_attn", SimpleNamespace(flash_mha=None))
    case = replace(CASE, softcap=2.0)
    flash3._ours(case)("q", "k", "v")
    assert asked[0]["softcap"] == 2.0
    with pytest.raises(ValueError, match="takes no softcap"):
        flash3._flash3(case)


@pytest.mark.parametrize(
    ("window", "sides"), [((5, 0), (5, 0)), ((None, 3), (-1, 3)), (None, (-1, -1))]
)
def test_what_flash_attention_3_is_asked(
    monkeypatch: pytest.MonkeyPatch, window: Any, sides: Any
) -> None:
    asked: list[Any] = []
    fake = SimpleNamespace(flash_mha=lambda *arrays, **options: asked.append((arrays, options)))
    monkeypatch.setitem(sys.modules, "dew_flash_attn", fake)
    flash3._flash3(replace(CASE, window_size=window, causal=True))("q", "k", "v", "s")
    options = {"is_causal": True, "window_size": sides, "sinks": "s"}
    assert asked == [(("q", "k", "v"), options)]


def test_a_side_without_a_bound_is_as_long_as_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuflash.jax

    asked: list[Any] = []
    monkeypatch.setattr(cuflash.jax, "attention", lambda *a, **options: asked.append(options))
    flash3._ours(replace(CASE, window_size=(None, 3)))("q", "k", "v")
    flash3._ours(replace(CASE, window_size=None, causal=True, sinks=True))("q", "k", "v", "s")
    assert asked == [
        {"is_causal": False, "algorithm": "fa2", "local_window_size": (24, 3)},
        {"is_causal": True, "algorithm": "fa2", "sinks": "s"},
    ]


def _events(*spans: tuple[int, int]) -> list[Any]:
    return [SimpleNamespace(start_ns=a, duration_ns=b - a) for a, b in spans]


def _profile(*planes: tuple[str, list[tuple[str, Any]]]) -> Any:
    return SimpleNamespace(
        planes=[
            SimpleNamespace(
                name=name, lines=[SimpleNamespace(name=n, events=events) for n, events in lines]
            )
            for name, lines in planes
        ]
    )


def test_the_device_is_busy_once_where_kernels_overlap() -> None:
    streams = [
        ("Stream #7(Compute)", _events((10, 30), (50, 60))),
        ("Stream #9(Memset)", _events((20, 40), (25, 35))),
        ("XLA Modules", _events((0, 1000))),
    ]
    profile = _profile(("/host:CPU", [("Stream #1", _events((0, 9)))]), ("/device:GPU:0", streams))
    assert busy(profile) == pytest.approx(40 / 1e6)
    with pytest.raises(RuntimeError, match="holds no kernel"):
        busy(_profile(("/host:CPU", streams)))


def test_kernel_times_are_shared_among_the_passes() -> None:
    told: list[str] = []
    profile = _profile(("/device:GPU:0", [("Stream #7", _events((0, 24_000_000)))]))

    def profiled(function: Any) -> Any:
        told.append("start")
        function()
        return profile

    passes = {name: (lambda name=name: told.append(name)) for name in ("a", "b")}
    times = kernel_times.kernel_times(passes, lambda _: told.append("wait"), 3, profiled)
    assert times == {"a": [2.0] * 3, "b": [2.0] * 3}
    rounds = " ".join(told[4:]).split("start ")[1:]
    assert len(rounds) == 6
    assert {tuple(each.split()[: kernel_times.PASSES]) for each in rounds} == {
        ("a",) * 12,
        ("b",) * 12,
    }
    assert all(each.split()[-1] == "wait" for each in rounds)


def test_a_real_profile_is_read() -> None:
    profile = kernel_times._profiled(lambda: jax.block_until_ready(jax.numpy.ones(3) + 1))
    with pytest.raises(RuntimeError, match="/host:CPU"):  # the function runs on the CPU
        busy(profile)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_packed_sequences_reach_both(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    for module in ("bench.lengths", "bench.case", "bench.flash3"):
        monkeypatch.setattr(f"{module}.lengths_of", lambda kind: (9, 1, 14))
    case = replace(CASE, op=op, window_size=None, causal=True, lengths="some")
    asked: list[Any] = []

    def packed(q: Any, k: Any, v: Any, offsets: Any, longest: int, is_causal: bool) -> Any:
        asked.append((offsets.tolist(), longest, is_causal))
        return flash3._ours(case)(q, k, v)

    monkeypatch.setitem(sys.modules, "dew_flash_attn", SimpleNamespace(flash_mha_varlen=packed))
    rows, lines = _measure(case, cuflash=flash3._ours, peer=flash3._flash3)
    assert lines == []
    assert all(0 < row["worst_ratio"] < 10 for row in rows)
    assert set(map(str, asked)) == {"([0, 9, 10, 24], 14, True)"}
    assert [row["options"] for row in rows] == [
        {"algorithm": "fa2", "lengths": "some"},
        {"lengths": "some"},
    ]
