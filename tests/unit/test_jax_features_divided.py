"""Every feature and pair of features gives the same on four devices as on one, also under vmap."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cuflash import BlockMask, ScoreMod
from cuflash.features.refused import REFUSED
from cuflash.features.table import FEATURES

from .divided_case import GROUPED, WHOLE, P, run_divided
from .jax_case import cpu_mesh, draw, jax, jnp

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

#: The keywords of every feature.
KEYWORDS: dict[str, dict[str, Any]] = {
    "window": {"local_window_size": (2, 1)},
    "used_lengths": {},
    "packed_lengths": {},
    "softcap": {"softcap": 1.5},
    "score_mod": {
        "score_mod": ScoreMod(
            "return tanh(s + p.by_head(head) + p.by_entry(batch)) + 0.1 * (i + offset - j);",
            numpy=lambda s, batch, head, i, j, offset, p: (
                np.tanh(s + p.by_head(head) + p.by_entry(batch)) + 0.1 * (i + offset - j)
            ),
            by_head=np.cos(np.arange(8, dtype=np.float32)),
            by_entry=np.sin(np.arange(4, dtype=np.float32)),
        )
    },
    "alibi": {},
    "bias": {},
    "mask": {},
    "block_mask": {},
    "sinks": {},
    "dropout": {
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(5),
        "broadcast_dropout": False,
    },
}
#: The arrays of every feature: the shape, and the division over batch ("x") and heads ("y").
ARRAYS: dict[str, dict[str, tuple[tuple[int, ...], Any]]] = {
    "window": {},
    "used_lengths": {
        "query_seq_lengths": ((4,), P("x")),
        "key_value_seq_lengths": ((4,), P("x")),
    },
    "packed_lengths": {"cu_seqlens_q": ((5,), P()), "cu_seqlens_kv": ((5,), P())},
    "softcap": {},
    "score_mod": {},
    "alibi": {"alibi_slopes": ((4, 8), P("x", "y"))},
    "bias": {"bias": ((1, 8, 6, 1), P(None, "y"))},
    "mask": {"mask": ((4, 1, 6, 6), P("x"))},
    "block_mask": {"block_mask": ((4, 8, 1, 1), P("x", "y"))},
    "sinks": {"sinks": ((8,), P("y"))},
    "dropout": {},
}
#: Arrays that have another name in ``cuflash.jax``.
NAMES = {"seqused_q": "query_seq_lengths", "seqused_kv": "key_value_seq_lengths"}
#: The contents of arrays that are not random.
NUMBERS = {
    "query_seq_lengths": [6, 0, 3, 5],
    "key_value_seq_lengths": [2, 6, 9, 1],
    "cu_seqlens_q": [0, 7, 7, 19, 21],
    "cu_seqlens_kv": [0, 5, 9, 22, 23],
}
CHOSEN = [
    chosen
    for count in (1, 2)
    for chosen in itertools.combinations(FEATURES, count)
    if not any({pair.first, pair.second} <= {*chosen} for pair in REFUSED)
]


def test_every_feature_has_a_case() -> None:
    """``dropout_seed`` has no case: in JAX the seed comes from a key."""
    assert set(KEYWORDS) == set(ARRAYS) == set(FEATURES)
    for name, feature in FEATURES.items():
        own = {of for of, rule in feature.arrays.items() if not rule.argument}
        assert set(ARRAYS[name]) == {NAMES.get(of, of) for of in own - {"dropout_seed"}}


def case_of(chosen: tuple[str, ...]) -> tuple[Any, list[Any], list[Any]]:
    """A function for all gradients with these features, its arrays, and their divisions."""
    keywords = {k: v for name in chosen for k, v in KEYWORDS[name].items()}
    extra = {k: v for name in chosen for k, v in ARRAYS[name].items()}

    def total(q: Any, k: Any, v: Any, *others: Any) -> Any:
        named = dict(zip(extra, others, strict=True))
        if "block_mask" in named:
            named["block_mask"] = BlockMask(named["block_mask"], (64, 64))
        out, lse = attention(q, k, v, is_causal=True, return_lse=True, **keywords, **named)
        return (out * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()

    matrices, spec = [WHOLE, GROUPED, GROUPED], P("x", None, "y")
    if "packed_lengths" in chosen:
        matrices, spec = [(rows * n, *rest) for rows, n, *rest in matrices], P(None, "y")
        extra |= {
            name: (shape[1:], P("y")) for name, (shape, _) in extra.items() if "alibi" in name
        }
    named = {**dict.fromkeys("qkv"), **extra}
    arrays = draw(*matrices, *(shape for shape, _ in extra.values()), dtype="float32")
    arrays = [_as(name, array) for name, array in zip(named, arrays, strict=True)]
    numbers = [place for place, name in enumerate(named) if _has_gradient(name, chosen)]
    return jax.grad(total, numbers), arrays, [spec] * 3 + [own for _, own in extra.values()]


def _as(name: str, array: Any) -> Any:
    """Turn random numbers into contents that the argument may have."""
    if name in NUMBERS:
        return jnp.asarray(NUMBERS[name], jnp.int32)
    return array > -0.5 if "mask" in name else array


def _has_gradient(name: str, chosen: tuple[str, ...]) -> bool:
    refused = name == "alibi_slopes" and "packed_lengths" in chosen
    return name not in NUMBERS and "mask" not in name and not refused


@pytest.mark.parametrize("chosen", CHOSEN, ids="+".join)
def test_over_four_devices(chosen: tuple[str, ...]) -> None:
    gradients, arrays, specs = case_of(chosen)
    _, collectives = run_divided(gradients, cpu_mesh(2, 2), arrays, specs)
    assert set(collectives) <= {"all-reduce"}


@pytest.mark.parametrize("chosen", CHOSEN, ids="+".join)
def test_mapped_entries_over_four_devices(chosen: tuple[str, ...]) -> None:
    gradients, arrays, specs = case_of(chosen)
    other = [array if array.shape == (5,) else array[::-1] for array in arrays]
    mapped = [jnp.stack(both) for both in zip(arrays, other, strict=True)]
    run_divided(jax.vmap(gradients), cpu_mesh(2, 2), mapped, [P("x") for _ in specs])
