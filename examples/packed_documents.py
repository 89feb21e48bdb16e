"""Attend within documents of different lengths that are packed one behind another.

You learn to train on ragged documents without padding. `cuflash.pack` moves the rows that count
into one array, (tokens, heads, head_dim), and gives `cu_seqlens`, the offsets at which documents
begin. With these offsets attention stays within each document, forward and backward. Padding costs
no work, in attention and in the products and norms around it.

Every document is compared with attention on it alone. Then one document is changed, and the
others must keep every bit of their output.

    python examples/packed_documents.py                 # NumPy, about a second
    python examples/packed_documents.py --arrays cupy   # more and longer documents, on a GPU
"""

import argparse
import importlib
import itertools

import numpy as np

import cuflash

#: Documents, tokens of the longest, query heads, heads of keys and values, and head_dim.
SIZES = {"numpy": (8, 400, 4, 2, 32), "cupy": (32, 4096, 8, 2, 64)}


def draw_lengths(rng, documents, longest):
    """Lengths as texts have them: many are short, and one is the longest."""
    lengths = np.exp(rng.uniform(np.log(longest / 20), np.log(longest), documents)).astype(int)
    lengths[0] = longest
    return lengths


def attend(q, k, v, dout, **options):
    """Output and gradients of packed rows, (tokens, heads, head_dim), under a causal mask."""
    out, pullback = cuflash.attention_vjp(q, k, v, causal=True, layout="shd", **options)
    return out, *pullback(dout)


def distance_from_alone(arrays, results, offsets):
    """The largest error beside each document by itself, relative to its largest number."""
    far = 0.0
    for begin, end in itertools.pairwise(offsets):
        alone = attend(*(x[begin:end] for x in arrays))
        pairs = zip(results, alone, strict=True)
        far = max(far, *(float(abs(x[begin:end] - y).max() / abs(y).max()) for x, y in pairs))
    return far


def main(argv=None):
    """Pack, attend, compare, and return the distances and the work that is left."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=SIZES, default="numpy")
    arrays = parser.parse_args(argv).arrays
    xp, rng = importlib.import_module(arrays), np.random.default_rng(0)
    documents, longest, heads_q, heads_kv, head_dim = SIZES[arrays]
    lengths = draw_lengths(rng, documents, longest)
    tokens = int(lengths.sum())

    # A padded batch, as a data loader gives it: (documents, longest, heads, head_dim).
    padded = (
        xp.asarray(rng.standard_normal((documents, longest, heads, head_dim)), "float32")
        for heads in (heads_q, heads_kv, heads_kv, heads_q)
    )
    # `total` lets CuPy pack without waiting for the lengths to arrive on the host.
    packed = [cuflash.pack(x, xp.asarray(lengths), total=tokens) for x in padded]
    q, k, v, dout = (rows for rows, _ in packed)
    cu_seqlens = packed[0][1]
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    results = attend(q, k, v, dout, **options)

    offsets = cu_seqlens.tolist()
    far = distance_from_alone((q, k, v, dout), results, offsets)
    begin, end = offsets[1:3]  # the second document
    before = cuflash.attention(q, k, v, causal=True, layout="shd", **options)
    v[begin:end] += 1
    after = cuflash.attention(q, k, v, causal=True, layout="shd", **options)
    changed = (before != after).any(axis=(1, 2))
    elsewhere = int(changed[:begin].sum() + changed[end:].sum())

    out = cuflash.unpack(results[0], cu_seqlens, longest)  # padded again, with zeros
    rows, pairs = tokens / (documents * longest), (lengths**2).sum() / (documents * longest**2)
    print(f"{documents} documents of {lengths.min()} to {longest} tokens, {tokens} in all")
    print(f"offsets: {offsets[:6]} ...")
    print(f"of a padded batch's tokens {rows:.0%} are left, of its pairs of tokens {pairs:.0%}")
    print(f"output and gradients beside each document alone: relative error {far:.0e}")
    print(f"one document changed: {int(changed.sum())} rows differ, {elsewhere} of other documents")
    print(f"unpacked: {out.shape}")
    return {"far": far, "changed": changed, "elsewhere": elsewhere, "lengths": lengths, "out": out}


if __name__ == "__main__":
    main()
