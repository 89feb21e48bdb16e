"""Runs the demo: trains, measures and reports."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..command_output import Console
from ..dispatch import observe
from ..errors import UnsupportedError
from ..explained import Explanation
from ..explanation import explain
from ..planning.plan import ALGORITHMS, Plan
from .evidence import bigram_loss, gradient_errors
from .generate import generate
from .model import Parameters
from .options import Options
from .passes import Attention, AttentionByHand, CuflashAttention
from .report import Report
from .text import Text, read_text
from .training import Trained, held_out_loss, speed, train

__all__ = ["array_module", "generations", "plans", "run"]

_WITH, _WITHOUT = "with attention", "attention zeroed"


def run(options: Options, console: Console | None = None) -> bool:
    """Train a network, measure it, and print the results.

    Parameters
    ----------
    options : Options
        Sizes, and where attention runs.
    console : Console, optional
        By default the standard output.

    Returns
    -------
    bool
        Whether the gradients agree with the oracle, the network beats both
        baselines, and a text is the same with a cache and without.

    Raises
    ------
    CuflashError
        If :func:`cuflash.attention` refuses the options, or if the text is
        missing or too short.
    """
    report = Report(console or Console())
    text = read_text()
    text.require(options.seqlen)
    explanations = plans(options)
    xp = array_module(explanations["forward"])
    attention = CuflashAttention(xp, options.dtype, options.backend, options.algorithm)
    report.setting(options, text, Parameters(options.shape, "float32", np).vector.size)
    report.plans(explanations)
    if not report.gradients(gradient_errors(options, text, attention, xp), options.dtype):
        return False
    trained = _train(_WITH, options, text, attention, xp, report)
    twin = _train(_WITHOUT, options, text, None, xp, report)
    report.curves({_WITH: trained, _WITHOUT: twin})
    baselines = {
        "bigram counts": bigram_loss(text, options.seqlen),
        f"network, {_WITHOUT}": held_out_loss(twin.network, text, options, xp),
    }
    good = report.losses(held_out_loss(trained.network, text, options, xp), baselines)
    if options.compared:
        report.generations(generations(options, text, xp))
    if options.generate:
        good &= report.generated(generate(trained.network.parameters, options, xp))
    return good


def generations(options: Options, text: Text, xp: Any) -> dict[str, float | str]:
    """Return tokens per second for each way of computing attention, or why it cannot run."""
    ways: dict[str, Attention | None] = {
        name: CuflashAttention(xp, options.dtype, options.backend, name) for name in ALGORITHMS
    }
    ways |= {"by hand": AttentionByHand(xp, options.dtype), "none": None}
    rates: dict[str, float | str] = {}
    for name, attention in ways.items():
        try:
            rates[name] = speed(options, text, attention, xp)
        except (UnsupportedError, MemoryError) as error:  # CuPy's is a MemoryError too
            rates[name] = str(error)
    return rates


def plans(options: Options) -> dict[str, Explanation]:
    """Return the plans of attention's forward and backward pass with these options."""
    shape = (options.batch, options.seqlen, options.heads, options.head_dim)
    asked: dict[str, Any] = {
        "dtype": options.dtype,
        "causal": True,
        "backend": options.backend,
        "algorithm": options.algorithm,
    }
    return {
        "forward": explain(shape, shape, shape, operation="forward", **asked),
        "backward": explain(shape, shape, shape, operation="backward", **asked),
    }


def array_module(explanation: Explanation) -> Any:
    """Return the array module of the backend that was chosen."""
    if explanation.backend == "numpy":
        return np
    import cupy

    return cupy


def _train(
    title: str,
    options: Options,
    text: Text,
    attention: CuflashAttention | None,
    xp: Any,
    report: Report,
) -> Trained:
    passes: Counter[tuple[str, str, str]] = Counter()

    def count(plan: Plan) -> None:
        passes[plan.problem.operation, plan.algorithm, plan.backend] += 1

    with report.progress(title, options.steps) as told, observe(count):
        trained = train(options, text, attention, xp, told)
    report.speed(trained, passes)
    return trained
