"""Train a transformer block by hand: forward, backward and Adam, without an autograd library.

You learn how little attention needs to be trained: `cuflash.attention_vjp` returns the output
and a function that turns the gradient of the output into those of q, k and v. The rest of the
block is a dozen matrix products, whose gradients are written out here.

The text is random tokens that repeat after `PERIOD` of them. Only attention can look that far
back, so the loss falls below log(VOCABULARY) only if attention learns.

    python examples/transformer_block.py                 # NumPy, some seconds
    python examples/transformer_block.py --arrays cupy   # a larger block, on a GPU
"""

import argparse
import importlib
from types import SimpleNamespace

import numpy as np

import cuflash

PERIOD = 8
#: A token sees the last two periods, itself included.
WINDOW = (2 * PERIOD - 1, 0)
VOCABULARY = 32
SIZES = {
    "numpy": {"batch": 16, "seqlen": 64, "width": 64, "heads": 4, "steps": 60, "rate": 1e-2},
    "cupy": {"batch": 64, "seqlen": 512, "width": 256, "heads": 4, "steps": 100, "rate": 2e-3},
}

# ## The block
#
# The residual stream `x` has one row for each token. Attention adds to it, then an MLP does.
# Both read rows that are divided by their root mean square (RMSNorm without a gain). What
# the backward pass needs again is kept in `saved`.


def norm(x):
    """Rows divided by their root mean square, and the factors."""
    factors = ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** -0.5
    return x * factors, factors


def forward(p, onehot, heads, xp):
    """Logits of the next token, (tokens, vocabulary), from one-hot tokens, (batch, seqlen, ...)."""
    batch, seqlen, _ = onehot.shape
    s = SimpleNamespace(tokens=onehot.reshape(batch * seqlen, -1))
    x = (onehot @ p["embed"] + positions(seqlen, p["embed"], xp)).reshape(batch * seqlen, -1)
    s.y1, s.f1 = norm(x)
    q, k, v = (
        part.reshape(batch, seqlen, heads, -1) for part in xp.split(s.y1 @ p["qkv"], 3, axis=1)
    )
    out, s.pullback = cuflash.attention_vjp(q, k, v, causal=True, window_size=WINDOW)
    s.attended = out.reshape(x.shape)
    x = x + s.attended @ p["out"]
    s.y2, s.f2 = norm(x)
    s.hidden = xp.maximum(s.y2 @ p["up"], 0)
    x = x + s.hidden @ p["down"]
    s.y3, s.f3 = norm(x)
    return s.y3 @ p["head"], s


def positions(seqlen, like, xp):
    """Sines and cosines of the position, (seqlen, width)."""
    angles = xp.arange(seqlen)[:, None] * 10.0 ** -xp.linspace(0, 1, like.shape[1] // 2)
    return xp.concatenate([xp.sin(angles), xp.cos(angles)], axis=1).astype(like.dtype)


# ## The gradient
#
# The backward pass visits the same lines from the last to the first. `s.pullback` recomputes
# the weights of attention tile by tile, so no matrix of (seqlen, seqlen) is ever kept.


def norm_backward(dy, y, factors):
    """The gradient of `norm` with respect to x."""
    return factors * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def backward(p, s, dlogits, shape, xp):
    """The gradient of every matrix; `shape` is that of q, (batch, seqlen, heads, head_dim)."""
    dx = norm_backward(dlogits @ p["head"].T, s.y3, s.f3)
    dhidden = (dx @ p["down"].T) * (s.hidden > 0)
    g = {"head": s.y3.T @ dlogits, "down": s.hidden.T @ dx, "up": s.y2.T @ dhidden}
    dx = dx + norm_backward(dhidden @ p["up"].T, s.y2, s.f2)
    dq, dk, dv = s.pullback((dx @ p["out"].T).reshape(shape))
    dqkv = xp.concatenate([grad.reshape(dx.shape) for grad in (dq, dk, dv)], axis=1)
    g |= {"out": s.attended.T @ dx, "qkv": s.y1.T @ dqkv}
    dx = dx + norm_backward(dqkv @ p["qkv"].T, s.y1, s.f1)
    return g | {"embed": s.tokens.T @ dx}


def loss_and_gradients(p, tokens, heads, xp):
    """Mean cross-entropy of tokens 1, 2, ... given those before them, and its gradients."""
    onehot = xp.eye(VOCABULARY, dtype=p["embed"].dtype)[tokens]
    inputs, targets = onehot[:, :-1], onehot[:, 1:].reshape(-1, VOCABULARY)
    logits, saved = forward(p, inputs, heads, xp)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - xp.log(xp.exp(logits).sum(axis=1, keepdims=True))
    loss = -(targets * log_p).sum() / len(targets)
    dlogits = (xp.exp(log_p) - targets) / len(targets)
    return float(loss), backward(p, saved, dlogits, (*inputs.shape[:2], heads, -1), xp)


# ## Data, weights and Adam


def draw_tokens(rng, batch, seqlen, xp):
    """Sequences that repeat their first tokens again and again: (batch, seqlen)."""
    first = rng.integers(VOCABULARY, size=(batch, PERIOD))
    return xp.asarray(np.tile(first, -(-seqlen // PERIOD))[:, :seqlen])


def draw_weights(rng, width, dtype, xp):
    """Normal weights: a product keeps the size of what it multiplies."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
    shapes |= {"down": (4 * width, width), "head": (width, VOCABULARY)}
    p = {name: rng.standard_normal(shape) * shape[0] ** -0.5 for name, shape in shapes.items()}
    p["embed"] = rng.standard_normal((VOCABULARY, width)) / 2
    return {name: xp.asarray(matrix, dtype) for name, matrix in p.items()}


def adam(p, g, moments, step, rate):
    """One step of Adam (Kingma and Ba, 2014), in place; `step` counts from 1."""
    for name, grad in g.items():
        m, v = moments.setdefault(name, (0 * grad, 0 * grad))
        m += 0.1 * (grad - m)
        v += 0.01 * (grad * grad - v)
        p[name] -= rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)) ** 0.5 + 1e-8)


# ## Is the gradient right?
#
# Along a random direction, the slope of the loss by central differences must be the product of
# the gradient and the direction. In float64 the two agree to some eight digits.


def gradient_error(xp, heads=2, step=1e-5):
    """Relative difference of the slopes that the gradient and central differences give."""
    rng = np.random.default_rng(1)
    p = draw_weights(rng, 16, "float64", xp)
    direction = draw_weights(rng, 16, "float64", xp)
    tokens = draw_tokens(rng, 2, 40, xp)
    _, g = loss_and_gradients(p, tokens, heads, xp)
    slope = float(sum((g[name] * direction[name]).sum() for name in p))
    above, below = (
        loss_and_gradients({n: p[n] + h * direction[n] for n in p}, tokens, heads, xp)[0]
        for h in (step, -step)
    )
    return abs((above - below) / (2 * step) - slope) / abs(slope)


def main(argv=None):
    """Check the gradient, train, and return the error and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=SIZES, default="numpy")
    arrays = parser.parse_args(argv).arrays
    xp, size = importlib.import_module(arrays), SIZES[arrays]
    error = gradient_error(xp)
    print(f"gradient beside central differences in float64: relative error {error:.0e}")
    rng = np.random.default_rng(0)
    p, moments, losses = draw_weights(rng, size["width"], "float32", xp), {}, []
    for step in range(1, size["steps"] + 1):
        tokens = draw_tokens(rng, size["batch"], size["seqlen"], xp)
        loss, g = loss_and_gradients(p, tokens, size["heads"], xp)
        adam(p, g, moments, step, size["rate"])
        losses.append(loss)
        if step % 10 == 0 or step == 1:
            print(f"step {step:4}  loss {loss:5.2f}  {'#' * round(12 * loss)}")
    floor = (PERIOD - 1) / (size["seqlen"] - 1) * np.log(VOCABULARY)
    print(f"the best that can be: {floor:.2f}, since the first {PERIOD} tokens cannot be known")
    return {"gradient_error": error, "losses": losses, "floor": float(floor)}


if __name__ == "__main__":
    main()
