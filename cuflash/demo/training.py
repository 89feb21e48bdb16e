"""The training loop, and the loss on the held-out text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .model import Network, Parameters
from .optimizer import AdamW, learning_rate
from .options import Options
from .passes import Attention
from .text import Text, sequences

__all__ = ["Trained", "held_out_loss", "speed", "train"]

_DECAY = 0.1
#: Number of times that a run reports its loss.
_REPORTS = 40


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes
    ----------
    network : Network
        The network with its last weights.
    losses : list of (int, float)
        Number of steps done, and the loss of the last step in nats per byte.
    seconds : float
        Duration of the whole loop.
    tokens_per_second : float
        Bytes trained on per second.
    """

    network: Network
    losses: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float


def train(
    options: Options,
    text: Text,
    attention: Attention | None,
    xp: Any,
    told: Callable[[int, float], None] = lambda done, loss: None,
) -> Trained:
    """Train a network with the sizes and the seed of the options.

    Parameters
    ----------
    options : Options
        Sizes of the network, and number of steps.
    text : Text
        The sequences are drawn from its training text.
    attention : Attention or None
        Computes attention; None for an output of zero.
    xp : module
        ``numpy`` or ``cupy``.
    told : callable
        Called at intervals with the number of steps done and the loss of the last step.
    """
    parameters = Parameters.drawn(options.shape, options.seed, "float32", xp)
    network = Network(parameters, attention, xp)
    gradients = Parameters(options.shape, "float32", xp)
    optimizer = AdamW(parameters.vector, _DECAY, xp)
    content = xp.asarray(text.training)
    starts = xp.asarray(text.starts(options.steps, options.batch, options.seqlen, options.seed))
    every = max(1, options.steps // _REPORTS)
    losses = []
    began = time.perf_counter()
    for step in range(options.steps):
        tokens, targets = sequences(content, starts[step], options.seqlen, xp)
        loss = network.gradients(tokens, targets, gradients)
        optimizer.step(gradients.vector, learning_rate(step, options.steps, options.learning_rate))
        # Reading the loss waits for the device, so it is not read at every step.
        if step % every == 0 or step == options.steps - 1:
            losses.append((step + 1, float(loss)))
            told(*losses[-1])
    seconds = time.perf_counter() - began
    return Trained(network, losses, seconds, options.steps * options.tokens / seconds)


def speed(options: Options, text: Text, attention: Attention | None, xp: Any) -> float:
    """Return tokens per second of ``options.compared`` steps, after two steps of warm-up."""
    train(replace(options, steps=2), text, attention, xp)
    return train(replace(options, steps=options.compared), text, attention, xp).tokens_per_second


def held_out_loss(network: Network, text: Text, options: Options, xp: Any) -> float:
    """Return the mean loss in nats per byte over the held-out text.

    The text is cut into windows, and every byte is predicted from its window.
    """
    inputs, followers = (xp.asarray(part) for part in text.held_out_windows(options.seqlen))
    total = 0.0
    for start in range(0, len(inputs), options.batch):
        rows = slice(start, start + options.batch)
        total += float(network.loss(inputs[rows], followers[rows])) * inputs[rows].size
    return total / int(inputs.size)
