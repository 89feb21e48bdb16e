"""Replace attention that is written with a softmax by one call.

You learn which argument stands for which line of your own code. Your arrays stay as they are:
`layout="bhsd"` takes (batch, heads, seqlen, head_dim), the order in which `q @ k.T` works head by
head. Every row of the table is a line that such code often has. The program compares the outputs
and the gradients, then the memory that each way takes.

    python examples/replace_softmax.py                 # NumPy, some seconds
    python examples/replace_softmax.py --arrays cupy   # longer sequences, on a GPU
"""

import argparse
import importlib
import tracemalloc

import numpy as np

import cuflash

#: (batch, heads, queries, keys, head_dim): fewer queries than keys, as where a text is continued.
SIZES = {"numpy": (1, 2, 1024, 2048, 32), "cupy": (2, 8, 2048, 4096, 64)}


def by_hand(q, k, v, dout, scale, change, xp):
    """Before: the output and the gradients of q, k and v, with all weights in memory."""
    scores = change(scale * (q @ k.swapaxes(-1, -2)))
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights @ v
    dweights = dout @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True))
    dq, dk = scale * (dscores @ k), scale * (dscores.swapaxes(-1, -2) @ q)
    return out, dq, dk, weights.swapaxes(-1, -2) @ dout


def by_cuflash(q, k, v, dout, **options):
    """After. Without gradients it is one line: cuflash.attention(q, k, v, layout="bhsd")."""
    out, pullback = cuflash.attention_vjp(q, k, v, layout="bhsd", **options)
    return out, *pullback(dout)


def habits(size, rng, xp):
    """What code by hand does to the scores, and the options that say the same."""
    batch, heads, queries, keys, head_dim = size
    seen = xp.asarray(rng.random((batch, 1, 1, keys)) < 0.8)
    bias = xp.asarray(rng.standard_normal((heads, queries, keys)), "float32")
    first, last = xp.tri(queries, keys, dtype=bool), xp.tri(queries, keys, keys - queries, bool)
    scale = head_dim**-0.5

    def keep(visible):
        return lambda scores: xp.where(visible, scores, -xp.inf)

    return {
        "scores / sqrt(head_dim)": (scale, lambda s: s, {}),
        "scores / 20": (1 / 20, lambda s: s, {"scale": 1 / 20}),
        "where(tri(q, k), scores, -inf)": (scale, keep(first), {"causal": True, "q_offset": 0}),
        "where(tri(q, k, k - q), scores, -inf)": (scale, keep(last), {"causal": True}),
        "where(seen, scores, -inf)": (scale, keep(seen), {"mask": seen}),
        "scores + bias": (scale, lambda s: s + bias, {"bias": bias}),
    }


def difference(ours, theirs):
    """The largest difference of two arrays, divided by the largest number of the second."""
    return float(abs(ours - theirs).max() / abs(theirs).max())


def peak(call, xp):
    """The most bytes that a call takes at a time, including its result."""
    if xp is np:
        tracemalloc.start()
        call()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most
    pool = xp.cuda.MemoryPool()
    with xp.cuda.using_allocator(pool.malloc):
        call()
    return pool.total_bytes()


def main(argv=None):
    """Compare every line, and return the differences and the bytes of both ways."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=SIZES, default="numpy")
    arrays = parser.parse_args(argv).arrays
    xp, size, rng = importlib.import_module(arrays), SIZES[arrays], np.random.default_rng(0)
    batch, heads, queries, keys, head_dim = size
    q, dout, k, v = (
        xp.asarray(rng.standard_normal((batch, heads, rows, head_dim)), "float32")
        for rows in (queries, queries, keys, keys)
    )
    print(f"{'before':38} {'after':28} {'out':>7} {'dq':>7} {'dk':>7} {'dv':>7}")
    differences = {}
    for line, (scale, change, options) in habits(size, rng, xp).items():
        before = by_hand(q, k, v, dout, scale, change, xp)
        after = by_cuflash(q, k, v, dout, **options)
        found = [difference(*pair) for pair in zip(after, before, strict=True)]
        differences[line] = found
        said = ", ".join(f"{n}={n if hasattr(x, 'shape') else x}" for n, x in options.items())
        print(f"{line:38} {said:28} " + " ".join(f"{x:7.0e}" for x in found))
    hand = peak(lambda: by_hand(q, k, v, dout, head_dim**-0.5, lambda s: s, xp), xp)
    ours = peak(lambda: by_cuflash(q, k, v, dout), xp)
    said = f"{hand / 2**20:.0f} MiB before, {ours / 2**20:.0f} MiB after"
    print(f"memory of forward and backward, at most: {said}")
    return {"differences": differences, "bytes": {"by hand": hand, "cuflash": ours}}


if __name__ == "__main__":
    main()
