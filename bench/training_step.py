"""A training step of a language model under ``jax.jit``, with our attention and with JAX's own.

The model is a decoder with the layout of GPT-2 (Radford et al., 2019). Its weights
are in float32, its arithmetic is in bfloat16. A step computes the loss of the next
token and all gradients, and takes a step of gradient descent.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .jit import time_passes
from .run import common_columns, results_file, store
from .timing import median_ratio

__all__ = ["FUNCTIONS", "MODELS", "Model", "measure", "run_training_step", "weights_of"]

OURS = "cuflash"
#: Steps that are queued before a wait.
_STEPS = 4
#: The largest difference between the losses of two implementations, relative to ours.
_APART = 2e-3


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder and of its batch of tokens."""

    layers: int
    width: int
    heads: int
    batch: int
    seqlen: int
    vocabulary: int = 50304


#: GPT-2 small: 16,384 tokens in sequences of 1024, and of 8192.
MODELS = (Model(12, 768, 12, 16, 1024), Model(12, 768, 12, 2, 8192))


def _of_jax(implementation: str) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any) -> Any:
        import jax

        options = {"is_causal": True, "implementation": implementation}
        return jax.nn.dot_product_attention(q, k, v, **options)

    return attention


def _ours(q: Any, k: Any, v: Any) -> Any:
    from cuflash.jax import attention

    return attention(q, k, v, is_causal=True)


#: Causal attention on (batch, seqlen, heads, head_dim) arrays, by implementation.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    OURS: _ours,
    "jax.nn, cuDNN": _of_jax("cudnn"),
    "jax.nn, XLA": _of_jax("xla"),
}


def run_training_step(output: Path | None = None) -> list[dict[str, Any]]:
    """Time the steps on the GPU, print a line for each row and store the rows."""
    from cuflash.cuda.available import require_device

    require_device()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    common = {**common_columns(), "version": f"jax {jax.__version__}"}
    rows: list[dict[str, Any]] = []
    try:
        for model in MODELS:
            rows += [{**common, **row} for row in measure(model, _say)]
    finally:  # keeps what was measured before an error
        if rows:
            store(output or results_file(common["gpu"], "-training-step"), rows)
    return rows


def measure(
    model: Model,
    say: Callable[[str], None],
    functions: Mapping[str, Callable[..., Any]] | None = None,
    rounds: int = 9,
) -> list[dict[str, Any]]:
    """Rows of a model, ours first; prints a line for an implementation that cannot run it.

    Raises
    ------
    RuntimeError
        If the loss of a step differs from ours by more than rounding.
    """
    import jax

    weights, tokens = weights_of(model), _tokens_of(model)
    steps, losses = {}, {}
    for name, attention in (functions or FUNCTIONS).items():
        step = jax.jit(_step_of(model, attention))
        try:
            losses[name] = _losses(step, weights, tokens)
        except Exception as error:
            if name == OURS:
                raise
            say(f"left out: {name}, {model}: {type(error).__name__}: {str(error)[:160]}")
            continue
        steps[name] = lambda step=step: step(weights, tokens)
    for name, found in losses.items():
        if not all(abs(a - b) <= _APART * abs(b) for a, b in zip(found, losses[OURS], strict=True)):
            raise RuntimeError(f"{name}, {model}: losses {found}, ours {losses[OURS]}")
    times = time_passes(steps, jax.block_until_ready, rounds=rounds, count=_STEPS)
    rows = [_row(model, name, times, losses[name]) for name in steps]
    for row in rows:
        say(f"{model} {row['impl']:<14} {row['ms']:>8.2f} ms  {row['ratio']:.3f}")
    return rows


def weights_of(model: Model) -> Any:
    """Random weights in float32; arrays with weights of all layers have them on the first axis."""
    import jax

    width, layers = model.width, model.layers
    shapes = {
        "tokens": (model.vocabulary, width),
        "positions": (model.seqlen, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: 0.02 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _tokens_of(model: Model) -> Any:
    import jax

    shape = model.batch, model.seqlen + 1
    return jax.random.randint(jax.random.key(1), shape, 0, model.vocabulary)


def _loss_of(model: Model, attention: Callable[..., Any], weights: Any, tokens: Any) -> Any:
    """The mean cross entropy of the next token."""
    import jax
    import jax.numpy as jnp

    layered = {name: weights[name] for name in ("qkv", "out", "up", "down")}
    small = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        shape = model.batch, model.seqlen, model.heads, model.width // model.heads
        q, k, v = (a.reshape(shape) for a in jnp.split(_normal(x) @ w["qkv"], 3, axis=-1))
        x = x + attention(q, k, v).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(_normal(x) @ w["up"]) @ w["down"], None

    x = small["tokens"][tokens[:, :-1]] + small["positions"]
    x, _ = jax.lax.scan(layer, x, {name: small[name] for name in layered})
    logits = (_normal(x) @ small["tokens"].T).astype(jnp.float32)
    shown = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - shown).mean()


def _normal(x: Any) -> Any:
    """The rows, scaled to a mean square of 1."""
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide / size).astype(x.dtype)


def _step_of(model: Model, attention: Callable[..., Any]) -> Callable[..., Any]:
    """A function of weights and tokens that returns the loss and the next weights."""
    import jax

    def step(weights: Any, tokens: Any) -> tuple[Any, Any]:
        value = jax.value_and_grad(lambda w: _loss_of(model, attention, w, tokens))
        loss, gradients = value(weights)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def _losses(step: Callable[..., Any], weights: Any, tokens: Any) -> list[float]:
    """Losses of the first three steps."""
    found = []
    for _ in range(3):
        loss, weights = step(weights, tokens)
        found.append(float(loss))
    return found


def _row(
    model: Model, name: str, times: Mapping[str, list[float]], losses: list[float]
) -> dict[str, Any]:
    """A row of an implementation; ``ratio``: how many times as fast the step is with ours."""
    median = statistics.median(times[name])
    ratio, low, _ = median_ratio(times[OURS], times[name])
    return {
        "impl": name,
        **asdict(model),
        "ms": round(median, 3),
        "tokens_per_s": round(1e3 * model.batch * model.seqlen / median),
        "spread": round((max(times[name]) - min(times[name])) / median, 4),
        "ratio": round(ratio, 4),
        "ratio_low": round(low, 4),
        "losses": [round(loss, 5) for loss in losses],
    }


def _say(line: str) -> None:
    print(line, flush=True)
