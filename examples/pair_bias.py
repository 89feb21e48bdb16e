"""Triangle attention: a bias for every pair of residues, and its gradient.

You learn to attend with a learned bias, as networks for protein structure do (Jumper et al.,
"AlphaFold", 2021, there "triangle self-attention around the starting node"). The network keeps a
vector z[i, j] for each pair of residues. Row i attends within itself, from pair (i, j) to pairs
(i, k), and the vector of the third side, z[j, k], adds a number to the score.

All rows share that bias, so it is given once, as (heads, n, n), and nothing is repeated. With
"bias" in `wrt` its gradient comes back, summed over the rows. The n^3 scores of each head are
never in memory.

    python examples/pair_bias.py                 # NumPy, about a second
    python examples/pair_bias.py --arrays cupy   # more residues, on a GPU
"""

import argparse
import importlib

import numpy as np

import cuflash

#: Residues, channels of z, heads and head_dim.
SIZES = {"numpy": (48, 32, 4, 16), "cupy": (256, 128, 4, 32)}


def draw(rng, residues, channels, heads, head_dim, dtype, xp):
    """z, (n, n, channels), and the weights of the layer."""
    width = heads * head_dim
    shapes = {"z": (residues, residues, channels), "qkvg": (channels, 4 * width)}
    shapes |= {"bias": (channels, heads), "out": (width, channels)}
    p = {name: rng.standard_normal(shape) * shape[0] ** -0.5 for name, shape in shapes.items()}
    p["z"] *= residues**0.5
    return {name: xp.asarray(array, dtype) for name, array in p.items()}


def triangle_attention(p, heads, xp):
    """What the layer adds to z, and a function that pulls gradients of it back."""
    z = p["z"]
    n = len(z)
    q, k, v, g = (x.reshape(n, n, heads, -1) for x in xp.split(z @ p["qkvg"], 4, axis=-1))
    bias = (z @ p["bias"]).transpose(2, 0, 1)  # (heads, j, k): no axis for the row i
    attended, pullback = cuflash.attention_vjp(q, k, v, bias=bias, wrt=("q", "k", "v", "bias"))
    gate = 1 / (1 + xp.exp(-g))
    gated = (gate * attended).reshape(n, n, -1)

    def backward(dy):
        """The gradients of z and of the weights."""
        dgated = (dy @ p["out"].T).reshape(q.shape)
        dq, dk, dv, dbias = pullback(gate * dgated)
        dg = dgated * attended * gate * (1 - gate)
        dqkvg = xp.concatenate([x.reshape(n, n, -1) for x in (dq, dk, dv, dg)], axis=-1)
        dbias = dbias.transpose(1, 2, 0)  # (j, k, heads): one number for each pair and head
        return {
            "z": dqkvg @ p["qkvg"].T + dbias @ p["bias"].T,
            "qkvg": xp.einsum("ijc,ijw->cw", z, dqkvg),
            "bias": xp.einsum("ijc,ijh->ch", z, dbias),
            "out": xp.einsum("ijw,ijc->wc", gated, dy),
        }

    return gated @ p["out"], backward


def gradient_error(xp, step=1e-5):
    """Relative difference of the slopes that the gradient and central differences give."""
    rng, size = np.random.default_rng(1), (12, 8, 2, 8)
    p, direction = draw(rng, *size, "float64", xp), draw(rng, *size, "float64", xp)
    y, backward = triangle_attention(p, 2, xp)
    g = backward(xp.cos(y))  # of the loss sum(sin(y))
    slope = float(sum((g[name] * direction[name]).sum() for name in p))
    above, below = (
        float(xp.sin(triangle_attention(moved, 2, xp)[0]).sum())
        for moved in ({n: p[n] + h * direction[n] for n in p} for h in (step, -step))
    )
    return abs((above - below) / (2 * step) - slope) / abs(slope)


def by_hand(q, k, v, bias, dout, xp):
    """The output and all gradients, with the scores of every row in memory."""
    scale = q.shape[-1] ** -0.5
    scores = scale * xp.einsum("ijhd,ikhd->ihjk", q, k) + bias
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = xp.einsum("ihjk,ikhd->ijhd", weights, v)
    delta = (out * dout).sum(axis=-1).transpose(0, 2, 1)[..., None]
    dscores = weights * (xp.einsum("ijhd,ikhd->ihjk", dout, v) - delta)
    dq = scale * xp.einsum("ihjk,ikhd->ijhd", dscores, k)
    dk = scale * xp.einsum("ihjk,ijhd->ikhd", dscores, q)
    return out, dq, dk, xp.einsum("ihjk,ijhd->ikhd", weights, dout), dscores.sum(axis=0)


def main(argv=None):
    """Check the layer's gradient, compare attention with that by hand, and return both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=SIZES, default="numpy")
    arrays = parser.parse_args(argv).arrays
    xp, rng = importlib.import_module(arrays), np.random.default_rng(0)
    n, _, heads, head_dim = SIZES[arrays]
    error = gradient_error(xp)
    print(f"gradient beside central differences in float64: relative error {error:.0e}")
    q, k, v, dout = xp.asarray(rng.standard_normal((4, n, n, heads, head_dim)), "float32")
    bias = xp.asarray(rng.standard_normal((heads, n, n)), "float32")
    out, pullback = cuflash.attention_vjp(q, k, v, bias=bias, wrt=("q", "k", "v", "bias"))
    ours, theirs = (out, *pullback(dout)), by_hand(q, k, v, bias, dout, xp)
    differences = {}
    for name, x, y in zip(("out", "dq", "dk", "dv", "dbias"), ours, theirs, strict=True):
        differences[name] = float(abs(x - y).max() / abs(y).max())
        print(f"{name:6}{tuple(x.shape)!s:20} beside that by hand: {differences[name]:.0e}")
    print(f"scores by hand {4 * heads * n**3 / 2**20:.1f} MiB, bias {bias.nbytes / 2**20:.2f} MiB")
    return {"gradient_error": error, "differences": differences}


if __name__ == "__main__":
    main()
