"""Generate tokens with keys and values in a paged cache, and check them without one.

You learn to serve several texts of different lengths from one pool of pages. A page holds the
keys and values of `PAGE` tokens, and a text takes a page from the pool when its last one is
full, so no memory is set aside for the longest text that could come.
`cuflash.attention_with_kvcache` appends the new keys and values and attends to all of them.

The weights are random, so the tokens mean nothing. They show that the cache is right: one
causal pass over a finished text has to choose the same token at every place.

    python examples/paged_generation.py                 # NumPy, a few seconds
    python examples/paged_generation.py --arrays cupy   # longer texts, on a GPU
"""

import argparse
import importlib

import numpy as np

import cuflash

PAGE, LAYERS, VOCABULARY = 16, 2, 200
#: heads: query heads, the heads of keys and values that they share, and head_dim.
SIZES = {
    "numpy": {"prompts": (5, 40, 17), "new": 24, "heads": (4, 2, 16)},
    "cupy": {"prompts": (300, 4000, 1025, 7), "new": 100, "heads": (8, 2, 64)},
}

# ## The network
#
# Each layer is attention alone. Several query heads read one head of keys, which keeps the cache
# small, and ALiBi makes a score smaller the farther away its key is. The network is given its
# attention as a function, `attend`, because the two ways differ in nothing else.


def draw_weights(rng, heads, xp):
    """Random weights of the embedding, the layers and the head."""
    heads_q, heads_kv, head_dim = heads
    width, columns = heads_q * head_dim, (heads_q + 2 * heads_kv) * head_dim
    shapes = {"embed": (VOCABULARY, width), "head": (width, VOCABULARY)}
    for i in range(LAYERS):
        shapes |= {f"qkv {i}": (width, columns), f"out {i}": (width, width)}
    return {
        name: xp.asarray(rng.standard_normal(shape) * width**-0.5, "float32")
        for name, shape in shapes.items()
    }


def logits(p, tokens, heads, attend, xp):
    """Logits behind every token: (batch, seqlen, vocabulary) of tokens (batch, seqlen)."""
    heads_q, heads_kv, head_dim = heads
    x = p["embed"][tokens]
    for i in range(LAYERS):
        y = x / xp.sqrt((x * x).mean(axis=-1, keepdims=True))
        qkv = (y @ p[f"qkv {i}"]).reshape(*tokens.shape, -1, head_dim)
        q, k, v = xp.split(qkv, [heads_q, heads_q + heads_kv], axis=2)
        x = x + attend(i, q, k, v).reshape(x.shape) @ p[f"out {i}"]
    return x @ p["head"]


def mask(heads, xp):
    """What both ways tell attention: a causal mask, and a slope of ALiBi for every head."""
    slopes = 2.0 ** -xp.arange(1, heads[0] + 1)
    return {"causal": True, "alibi_slopes": slopes.astype("float32")}


# ## The cache
#
# All layers share one page table: page 7 of a text is the same page of every layer's cache. Pages
# are free in any order, and the table says where those of a text are. Where a text has no page
# yet the table holds -1, which is never read.


class PagedCache:
    """Keys and values of several texts, in pages that they take when they need them."""

    def __init__(self, rng, pages, texts, heads, xp):
        self.xp, self.heads = xp, heads
        shape = (LAYERS, pages, PAGE, *heads[1:])
        self.k, self.v = xp.zeros(shape, "float32"), xp.zeros(shape, "float32")
        self.free = rng.permutation(pages).tolist()
        self.table = np.full((texts, pages), -1, np.int32)
        self.lengths = np.zeros(texts, np.int32)

    def extend(self, p, tokens, texts):
        """Read new tokens, (batch, seqlen), of some texts; logits behind the last of each."""
        ends = self.lengths[texts] + tokens.shape[1]
        for text, end in zip(texts, ends, strict=True):
            for page in range((self.table[text] >= 0).sum(), -(-end // PAGE)):
                self.table[text, page] = self.free.pop()
        before = self.xp.asarray(self.lengths[texts])
        table = self.xp.asarray(self.table[texts])

        def attend(layer, q, k, v):
            caches = self.k[layer], self.v[layer]
            places = {"cache_seqlens": before, "page_table": table}
            return cuflash.attention_with_kvcache(
                q, *caches, k, v, **places, **mask(self.heads, self.xp)
            )

        self.lengths[texts] = ends
        return logits(p, tokens, self.heads, attend, self.xp)[:, -1]


# ## Both ways
#
# A prompt is read in one call. Then every step reads one token of each text, and the lengths in
# `cache_seqlens` may all differ.


def generate(p, prompts, new, cache, xp):
    """Choose `new` tokens behind each prompt, the likeliest every time: (texts, new)."""
    last = xp.stack([cache.extend(p, x[None], [i])[0] for i, x in enumerate(prompts)])
    chosen = [last.argmax(axis=1)]
    while len(chosen) < new:
        last = cache.extend(p, chosen[-1][:, None], list(range(len(prompts))))
        chosen.append(last.argmax(axis=1))
    return xp.stack(chosen, axis=1)


def recompute(p, prompt, chosen, heads, xp):
    """What one causal pass over a finished text chooses in the place of `chosen`."""

    def attend(layer, q, k, v):
        return cuflash.attention(q, k, v, **mask(heads, xp))

    text = xp.concatenate([prompt, chosen])[None, :-1]
    return logits(p, text, heads, attend, xp)[0, len(prompt) - 1 :].argmax(axis=1)


def main(argv=None):
    """Generate, recompute, and return the tokens of both ways."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=SIZES, default="numpy")
    arrays = parser.parse_args(argv).arrays
    xp, size = importlib.import_module(arrays), SIZES[arrays]
    new, heads, rng = size["new"], size["heads"], np.random.default_rng(0)
    p = draw_weights(rng, heads, xp)
    prompts = [xp.asarray(rng.integers(VOCABULARY, size=n)) for n in size["prompts"]]
    pages = sum(-(-(len(x) + new) // PAGE) for x in prompts)
    cache = PagedCache(rng, pages, len(prompts), heads, xp)
    cached = generate(p, prompts, new, cache, xp)
    again = xp.stack([recompute(p, *text, heads, xp) for text in zip(prompts, cached, strict=True)])
    for i, (prompt, tokens) in enumerate(zip(prompts, cached, strict=True)):
        count = int((tokens == again[i]).sum())
        print(f"text {i}: {len(prompt):4} tokens of prompt, then {tokens[:8].tolist()} ...")
        print(f"  in pages {cache.table[i][cache.table[i] >= 0][:10].tolist()}")
        print(f"  {count} of {new} tokens are those of the recomputed text")
    longest = len(prompts) * max(-(-(len(x) + new) // PAGE) for x in prompts)
    print(f"{pages} pages in all; with room for the longest text in each row: {longest}")
    return {"cached": cached, "recomputed": again, "lengths": cache.lengths, "free": cache.free}


if __name__ == "__main__":
    main()
