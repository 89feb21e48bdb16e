"""Swap the attention of a Flax model in one line, and train the model with both functions.

You learn that `cuflash.jax.attention` takes the place of `jax.nn.dot_product_attention`: the same
names, the same layout, and it works inside `nnx.jit` and under gradients. The model reads bytes
and predicts the next one. Its text is this file.

    python examples/flax_attention.py                   # on the CPU, some seconds
    python examples/flax_attention.py --platform cuda   # a larger model, on a GPU
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cuflash.jax

STEPS = 32
SIZES = {
    "cpu": {"batch": 8, "seqlen": 64, "width": 32, "heads": 2, "layers": 1, "rate": 3e-3},
    "cuda": {"batch": 16, "seqlen": 1024, "width": 512, "heads": 8, "layers": 4, "rate": 1e-3},
}


class Block(nnx.Module):
    """Causal attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, width, heads, attention, rngs):
        self.heads, self.attention = heads, attention
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        """Apply the block to x, (batch, seqlen, width)."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (a.reshape(shape) for a in jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1))
        x = x + self.out(self.attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """Takes bytes (batch, seqlen) to logits of the next bytes, (batch, seqlen, 256)."""

    def __init__(self, size, attention, rngs):
        width = size["width"]
        self.bytes = nnx.Embed(256, width, rngs=rngs)
        self.positions = nnx.Embed(size["seqlen"], width, rngs=rngs)
        blocks = (Block(width, size["heads"], attention, rngs) for _ in range(size["layers"]))
        self.blocks = nnx.List(blocks)
        self.norm, self.head = nnx.RMSNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits of the byte that follows each token."""
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model, optimizer, tokens):
    """Make one step, and return the loss before it."""

    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(size, attention):
    """Train a new model, with the same weights and text every time; return its losses."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    rng, length = np.random.default_rng(0), size["seqlen"] + 1
    model = Model(size, attention, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(size["rate"]), wrt=nnx.Param)
    losses = []
    for _ in range(STEPS):
        starts = rng.integers(len(text) - length, size=(size["batch"], 1))
        tokens = jnp.asarray(text[starts + np.arange(length)], jnp.int32)
        losses.append(float(train_step(model, optimizer, tokens)))
    return losses


def main(argv=None):
    """Train with both functions, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--platform", choices=SIZES, default="cpu")
    platform = parser.parse_args(argv).platform
    size, device = SIZES[platform], jax.devices(platform)[0]
    # On a GPU XLA's own products would be rounded to TF32, and the curves would part sooner.
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        before = train(size, jax.nn.dot_product_attention)
        after = train(size, cuflash.jax.attention)  # the one line
    apart = [abs(a - b) / b for a, b in zip(after, before, strict=True)]
    print("step   jax.nn  cuflash  relative difference")
    for step in range(0, STEPS, 4):
        print(f"{step:4}  {before[step]:7.4f}  {after[step]:7.4f}  {apart[step]:.0e}")
    return {"before": before, "after": after, "apart": apart}


if __name__ == "__main__":
    main()
