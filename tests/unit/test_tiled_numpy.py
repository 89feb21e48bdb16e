"""The tiled NumPy backend against attention written out in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuflash import tiled_numpy
from cuflash.planning.device import HostLimits
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from .tiled_case import (
    ALGORITHMS,
    DTYPES,
    GIVEN,
    WANTED,
    Answer,
    Array,
    check,
    definition,
    destinations,
    draw,
    problem,
    run,
    solve,
)

SITUATIONS = {
    "full": {},
    "grouped heads": {"heads_q": 6, "heads_kv": 2},
    "one key/value head": {"heads_q": 5, "heads_kv": 1, "batch": 3},
    "wider values": {"head_dim": 5, "head_dim_v": 9},
    "one query": {"seqlen_q": 1, "q_offset": 22, "mask": "causal", "heads_q": 4},
    "one key": {"seqlen_kv": 1, "q_offset": -18, "mask": "causal"},
    "causal, aligned at the end": {"mask": "causal"},
    "causal, aligned at the start": {"mask": "causal", "q_offset": 0},
    "causal, grouped, dead rows": {"mask": "causal", "q_offset": -7, "heads_q": 6, "heads_kv": 3},
    "causal, more queries than keys": {"mask": "causal", "seqlen_q": 41, "q_offset": -18},
    "causal, nothing visible": {"mask": "causal", "q_offset": -19},
    "causal, everything visible": {"mask": "causal", "q_offset": 22},
}
BLOCKS = (None, (1, 1), (5, 7), (16, 4), (3, 100), (64, 2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_is_attention(situation: str, blocks: tuple[int, int] | None, algorithm: str) -> None:
    p = problem(**SITUATIONS[situation])
    given = draw(p)
    check(solve(p, given, algorithm=algorithm, blocks=blocks), definition(p, given), 1e-13)


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads_kv = int(rng.integers(1, 4))
    seqlen_q, seqlen_kv = (int(n) for n in rng.integers(1, 200, 2))
    p = problem(
        batch=int(rng.integers(1, 5)),
        heads_kv=heads_kv,
        heads_q=heads_kv * int(rng.integers(1, 4)),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=int(rng.integers(1, 40)),
        head_dim_v=int(rng.integers(1, 40)),
        mask=("full", "causal")[int(rng.integers(2))],
        q_offset=int(rng.integers(-seqlen_q, seqlen_kv)),
    )
    given = draw(p, seed)
    wanted = definition(p, given)
    block_q, block_kv = (int(n) for n in rng.integers(1, 80, 2))
    for algorithm in ALGORITHMS:
        check(solve(p, given, algorithm=algorithm), wanted, 1e-13)
        got = solve(p, given, algorithm=algorithm, blocks=(block_q, block_kv))
        check(got, wanted, 1e-13)


@pytest.mark.parametrize("cache", [1, 3000, 1 << 15])
def test_any_cache_gives_the_same_answer(cache: int) -> None:
    p = problem(batch=3, heads_q=6, heads_kv=3, seqlen_q=130, seqlen_kv=90, mask="causal")
    given = draw(p)
    into = destinations(p)
    chosen = plan(p, HostLimits(cache))
    tiled_numpy.forward(chosen, *(given[n] for n in "qkv"), into["out"], into["lse"])
    wanted = definition(p, given)
    np.testing.assert_allclose(into["out"], wanted.out, atol=1e-13)
    np.testing.assert_allclose(into["lse"], wanted.lse, atol=1e-13)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("storage", "output", "tolerance"),
    [
        ("float16", "float16", 2e-3),
        ("bfloat16", "bfloat16", 1.5e-2),
        ("float32", "float32", 2e-6),
    ],
)
def test_dtypes(storage: str, output: str, tolerance: float, algorithm: str) -> None:
    p = problem(storage=storage, output=output, heads_q=4, mask="causal", seqlen_kv=60, q_offset=30)
    given = draw(p)
    got = solve(p, given, algorithm=algorithm, blocks=(8, 16))
    wanted = definition(p, given)
    check(got, wanted, tolerance)
    assert np.abs(got.lse - wanted.lse).max() < 1e-5, "statistics are float32 at least"


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_half_inputs_accumulate_in_float32(storage: str) -> None:
    p = problem(storage=storage, output="float32", seqlen_kv=300, heads_q=4)
    given = draw(p)
    got, wanted = solve(p, given), definition(p, given)
    assert np.abs(got.out - wanted.out).max() < 2e-6
    step = float(ml_dtypes.finfo(DTYPES[storage]).eps)
    for name in ("dq", "dk", "dv"):
        a, b = getattr(got, name).astype(np.float64), getattr(wanted, name)
        assert np.all(np.abs(a - b) <= 0.5 * step * np.abs(b) + 1e-5), f"{name}: rounded once"


def plain(p: AttentionProblem, given: dict[str, Array]) -> Answer:
    """The same formulas with whole float32 matrices, as a user writes them in NumPy."""
    q, k, v, dout = (given[n].swapaxes(1, 2) for n in GIVEN[:4])
    scores = (q @ k.swapaxes(-1, -2)) * np.float32(p.scale)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total
    out = weights @ v
    delta = (dout * out).sum(axis=-1) - given["dlse"]
    dscores = weights * (dout @ v.swapaxes(-1, -2) - delta[..., None]) * np.float32(p.scale)
    dq, dk, dv = dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout
    out, dq, dk, dv = (x.swapaxes(1, 2) for x in (out, dq, dk, dv))
    return Answer(out, (highest + np.log(total))[..., 0], dq, dk, dv)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_float32_is_as_accurate_as_plain_numpy(mean: float, algorithm: str) -> None:
    p = problem(
        storage="float32",
        batch=1,
        heads_q=1,
        heads_kv=1,
        seqlen_q=1100,
        seqlen_kv=2500,
        head_dim=64,
        head_dim_v=64,
        scale=0.125,
    )
    given = draw(p)
    given["v"] += np.float32(mean)
    wanted = definition(p, given)

    def worst(answer: Answer, name: str) -> float:
        true = getattr(wanted, name)
        error = np.linalg.norm(getattr(answer, name) - true, axis=-1)
        return float((error / np.linalg.norm(true, axis=-1)).max())

    got, other = solve(p, given, algorithm=algorithm), plain(p, given)
    for name in ("out", "dq", "dk", "dv"):
        assert worst(got, name) <= 2 * worst(other, name), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shift", [-30000.0, -120.0, 1000.0, 30000.0])
def test_shifted_logits(shift: float, algorithm: str) -> None:
    p = problem(storage="float32", scale=1.0, mask="causal")
    given = draw(p)
    given["q"][..., 0] = 1
    given["k"][..., 0] = 0
    before = solve(p, given, algorithm=algorithm, blocks=(8, 8))
    given["k"][..., 0] = shift
    after = solve(p, given, algorithm=algorithm, blocks=(8, 8))
    rounding = 4 * abs(shift) * 2.0**-24
    assert np.abs(after.out - before.out).max() < rounding * np.abs(given["v"]).max() + 1e-6
    assert np.abs(after.lse - before.lse - shift).max() < rounding + 1e-5
    assert np.abs(after.dv - before.dv).max() < 20 * rounding + 1e-5


def strided(array: Array, seed: int) -> tuple[Array, Array]:
    """A copy with axes in another order, gaps and reversed axes; and the memory that holds it."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(array.ndim)
    steps = rng.integers(1, 4, array.ndim)
    memory = np.full([array.shape[axis] * steps[axis] for axis in order], 55, array.dtype)
    view = memory[tuple(slice(None, None, int(steps[axis])) for axis in order)]
    view = view.transpose(np.argsort(order))
    view = view[tuple(slice(None, None, int(rng.choice([-1, 1]))) for _ in array.shape)]
    view[...] = array
    return view, memory


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(6))
def test_any_strides(seed: int, storage: str, algorithm: str) -> None:
    p = problem(storage=storage, heads_q=4, mask="causal", q_offset=-2)
    given = draw(p, seed)
    wanted = solve(p, given, algorithm=algorithm, blocks=(5, 9))
    views = {n: strided(given[n], 100 * seed + i)[0] for i, n in enumerate(GIVEN)}
    into, memory = {}, {}
    for i, (name, array) in enumerate(destinations(p).items()):
        into[name], memory[name] = strided(array, 1000 * seed + i)
    run(p, views, into, algorithm=algorithm, blocks=(5, 9))
    for name in WANTED:
        np.testing.assert_array_equal(into[name], getattr(wanted, name), err_msg=name)
        into[name][...] = 55
        assert np.all(memory[name] == 55), f"{name}: written beside its elements"
    for name in GIVEN:
        np.testing.assert_array_equal(views[name], given[name], err_msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("axis", range(4))
def test_broadcast_inputs(axis: int, algorithm: str) -> None:
    p = problem(heads_q=4, mask="causal")
    given = draw(p)
    for name in ("q", "k", "v", "dout"):
        first = given[name][(slice(None),) * axis + (slice(0, 1),)]
        given[name] = np.broadcast_to(first, given[name].shape)
    check(solve(p, given, algorithm=algorithm, blocks=(6, 6)), definition(p, given), 1e-13)
