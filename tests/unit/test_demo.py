"""The demo: its gradients against finite differences and the oracle, its loop, its baselines."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cuflash.demo import Options, evidence, passes, run
from cuflash.demo.model import Network, Parameters, Shape
from cuflash.demo.optimizer import AdamW, learning_rate
from cuflash.demo.options import DTYPES
from cuflash.demo.passes import AttentionByHand, CuflashAttention, ReferenceAttention
from cuflash.demo.text import Text, read_text, sequences
from cuflash.demo.training import held_out_loss, train
from cuflash.dispatch import observe
from cuflash.planning.plan import Plan

from ..device.common import skip_without

_TINY = Options(
    steps=60,
    batch=4,
    seqlen=16,
    layers=1,
    heads=2,
    head_dim=8,
    dtype="float32",
    backend="numpy",
    learning_rate=1e-2,
)
#: The byte after an "a" or a "b" depends on the byte before it.
_PAIRS = Text.split("pairs", b"aabb" * 1000)


def _observed(options: Options, text: Text, xp: Any) -> tuple[list[float], set[tuple[str, str]]]:
    """The training losses, and the backend and algorithm that ran."""
    ran: Counter[tuple[str, str]] = Counter()

    def count(plan: Plan) -> None:
        ran[plan.backend, plan.algorithm] += 1

    attention = CuflashAttention(xp, options.dtype, options.backend, options.algorithm)
    with observe(count):
        trained = train(options, text, attention, xp)
    assert sum(ran.values()) == 2 * options.steps * options.layers
    return [loss for _, loss in trained.losses], set(ran)


@pytest.mark.parametrize("attention", [ReferenceAttention(), None], ids=["attention", "zeroed"])
def test_gradients_are_the_finite_differences(attention: ReferenceAttention | None) -> None:
    generator = np.random.default_rng(1)
    parameters = Parameters.drawn(Shape(layers=2, heads=2, head_dim=4), 0, np.float64, np)
    gradients = Parameters(parameters.shape, np.float64, np)
    network = Network(parameters, attention, np)
    rows = generator.integers(0, 256, (1, 8), np.uint8)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    network.gradients(tokens, targets, gradients)
    for name, matrix in parameters.matrices.items():
        for _ in range(4):
            direction = generator.standard_normal(matrix.shape)
            step, losses = 1e-5, []
            for sign in (1, -2):
                matrix += sign * step * direction
                losses.append(float(network.loss(tokens, targets)))
            matrix += step * direction
            slope = (losses[0] - losses[1]) / (2 * step)
            assert slope == pytest.approx(
                np.vdot(direction, gradients[name]), rel=1e-6, abs=1e-9
            ), name


def test_every_gradient_is_there_and_without_attention_those_of_its_matrices_are_zero() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (1, 8), np.uint8)
    for attention in (ReferenceAttention(), None):
        parameters = Parameters.drawn(Shape(1, 2, 4), 0, np.float64, np)
        gradients = Parameters(parameters.shape, np.float64, np)
        Network(parameters, attention, np).gradients(rows[:, :-1], rows[:, 1:], gradients)
        zero = {name for name, matrix in gradients.matrices.items() if not matrix.any()}
        assert zero == (set() if attention else {"qkv 0", "out 0"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_gradients_agree_with_the_oracle(dtype: str, algorithm: str) -> None:
    options = replace(_TINY, layers=2, dtype=dtype, algorithm=algorithm)
    attention = CuflashAttention(np, dtype, "numpy", algorithm)
    errors = evidence.gradient_errors(options, read_text(), attention, np)
    assert {"embedding", "q 0", "k 1", "v 1", "head"} <= errors.keys()
    assert all(error <= DTYPES[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_loss_falls_on_the_algorithm_asked_for(algorithm: str) -> None:
    losses, ran = _observed(replace(_TINY, algorithm=algorithm), read_text(), np)
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < losses[0] - 2
    assert ran == {("numpy", algorithm)}


def test_a_seed_gives_the_same_losses_again_and_another_gives_others() -> None:
    options = replace(_TINY, steps=3)
    first, again, other = (
        _observed(chosen, _PAIRS, np)[0] for chosen in (options, options, replace(options, seed=1))
    )
    assert first == again
    assert first != other


def _run(options: Options, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    monkeypatch.setattr("cuflash.demo.main.read_text", lambda: _PAIRS)
    printed = io.StringIO()
    return run(options, Console(file=printed, width=100)), printed.getvalue()


def test_the_demo_succeeds_where_attention_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    good, printed = _run(replace(_TINY, steps=150), monkeypatch)
    assert good
    for part in ("runs         fa2 on numpy", "150 backward passes ran fa2 on numpy", "beats both"):
        assert part in printed
    assert "tokens per second" in printed


def test_the_demo_fails_where_it_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    good, printed = _run(replace(_TINY, steps=1), monkeypatch)
    assert not good
    assert "does NOT beat both" in printed


def test_the_demo_fails_on_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = passes.attention_backward

    def wrong(*arrays: Any, grads: Any, **options: Any) -> None:
        right(*arrays, grads=grads, **options)
        grads[1][...] *= 1.001

    monkeypatch.setattr(passes, "attention_backward", wrong)
    good, printed = _run(_TINY, monkeypatch)
    assert not good
    assert "NOT all within the tolerance" in printed
    assert "tokens per second" not in printed


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_by_hand_is_the_reference(dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 9, 3, 8)).astype(np.float32)
    by_hand, truth = AttentionByHand(np, dtype), ReferenceAttention()
    out, saved = by_hand.forward(q, k, v)
    expected, of_truth = truth.forward(q, k, v)
    tolerance = {"float16": 4e-3}.get(dtype, 1e-5)
    assert np.abs(out - expected).max() <= tolerance * np.abs(expected).max()
    grads, right = by_hand.backward(dout, saved), truth.backward(dout, of_truth)
    assert grads.shape == right.shape
    for i in range(3):
        worst = np.abs(grads[:, :, i] - right[:, :, i]).max()
        assert worst <= tolerance * np.abs(right[:, :, i]).max()


def test_every_generation_is_timed_in_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    _, printed = _run(replace(_TINY, steps=1, compared=2), monkeypatch)
    table = printed[printed.index("The same network") :]
    for name in ("fa2", "fa1", "by hand", "none"):
        assert re.search(rf"{name} +│ +[\d,]+ │ +\d", table), table
    assert "without fa3: fa3 is for Hopper GPUs" in table
    _, printed = _run(replace(_TINY, steps=1), monkeypatch)
    assert "The same network" not in printed


def test_what_has_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("out of memory allocating 2 GB")

    monkeypatch.setattr(AttentionByHand, "forward", full)
    _, printed = _run(replace(_TINY, steps=1, compared=1), monkeypatch)
    assert "without by hand: out of memory allocating 2 GB" in printed


def test_bigram_loss_is_that_of_smoothed_frequencies() -> None:
    training = np.frombuffer(b"aab", np.uint8)
    after_a = (1 + 10 * 2 / 259) / (2 + 10)  # "ab" is one of two pairs that begin with a
    after_b = 3 / 259  # no pair begins with b, so this is the frequency of a
    for held_out, likelihoods in ((b"ab", [after_a]), (b"aba", [after_a, after_b])):
        text = Text("tiny", training, np.frombuffer(held_out, np.uint8))
        expected = -sum(map(math.log, likelihoods)) / len(likelihoods)
        assert evidence.bigram_loss(text, 1) == pytest.approx(expected)


def test_the_text_is_python_s_own_and_its_tail_is_held_out() -> None:
    text = read_text()
    assert text.training.size > 100_000
    assert 0.09 < text.held_out.size / (text.training.size + text.held_out.size) < 0.11
    inputs, followers = text.held_out_windows(50)
    assert inputs.shape[1] == 50
    assert text.held_out.size - inputs.size <= 50
    np.testing.assert_array_equal(inputs.ravel()[1:], followers.ravel()[:-1])
    np.testing.assert_array_equal(inputs.ravel(), text.held_out[: inputs.size])


def test_sequences_are_of_the_training_text_with_the_byte_after() -> None:
    text = Text("counted", np.arange(100, dtype=np.uint8), np.arange(100, 110, dtype=np.uint8))
    starts = text.starts(steps=500, batch=2, seqlen=90, seed=3)
    assert starts.shape == (500, 2)
    assert (starts.min(), starts.max()) == (0, 9)
    assert (starts != text.starts(steps=500, batch=2, seqlen=90, seed=4)).any()
    tokens, targets = sequences(text.training, starts[0], 90, np)
    np.testing.assert_array_equal(tokens, starts[0][:, None] + np.arange(90))
    np.testing.assert_array_equal(targets, tokens + 1)


def test_held_out_loss_does_not_depend_on_the_batches() -> None:
    text = Text.split("start of the topics", read_text().training[:3000].tobytes())
    parameters = Parameters.drawn(_TINY.shape, 0, np.float64, np)
    network = Network(parameters, ReferenceAttention(), np)
    inputs, followers = text.held_out_windows(16)
    losses = [held_out_loss(network, text, replace(_TINY, batch=b), np) for b in (1, 5)]
    assert losses == pytest.approx([float(network.loss(inputs, followers))] * 2, rel=1e-12)


def test_adamw_is_the_published_one_with_the_gradient_clipped() -> None:
    generator = np.random.default_rng(0)
    weights = generator.standard_normal(10)
    expected, mean, square = weights.copy(), np.zeros(10), np.zeros(10)
    optimizer = AdamW(weights, 0.1, np)
    for step in range(1, 5):
        gradients = generator.standard_normal(10) * 10 ** (step - 3)
        clipped = gradients / max(1, np.linalg.norm(gradients))
        mean = 0.9 * mean + 0.1 * clipped
        square = 0.98 * square + 0.02 * clipped**2
        corrected, root = mean / (1 - 0.9**step), np.sqrt(square / (1 - 0.98**step))
        expected = expected - 0.01 * (corrected / (root + 1e-8) + 0.1 * expected)
        optimizer.step(gradients, 0.01)
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_the_learning_rate_rises_to_its_peak_and_falls() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert rates.index(max(rates)) == 4
    assert max(rates) == pytest.approx(2.0)
    assert rates[0] == pytest.approx(0.4)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0.1, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "algorithm"), [("float32", "fa1"), ("float16", "fa1"), ("float16", "fa3")]
)
def test_the_network_trains_on_the_device(dtype: str, algorithm: str) -> None:
    import cupy

    skip_without(algorithm)

    options = replace(_TINY, dtype=dtype, algorithm=algorithm, backend="cuda")
    attention = CuflashAttention(cupy, dtype, "cuda", algorithm)
    errors = evidence.gradient_errors(options, read_text(), attention, cupy)
    assert all(error <= DTYPES[dtype] for error in errors.values()), errors
    losses, ran = _observed(options, read_text(), cupy)
    assert losses[-1] < losses[0] - 2
    assert ran == {("cuda", algorithm)}


@pytest.mark.gpu
def test_the_demo_keeps_everything_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    good, printed = _run(replace(_TINY, steps=150, backend="cuda"), monkeypatch)
    assert good
    assert "copies       none" in printed
    assert "passes ran fa" in printed
    assert "on cuda" in printed
