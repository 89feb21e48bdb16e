"""Packed sequences in the tiled NumPy code: each equals a separate call."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.arena import POISONS, Arena
from ..kit.packed_lengths import ROWS, Row
from .fake_device import ADDRESS, FakeDevice, fake_device
from .packed_case import LENGTHS, arrays, both, compare, int32, looped, offsets, pulled, rows_of

__all__ = ["fake_device"]

_of_algorithms = pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
_OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "q_offset": 4},
    {"window_size": (6, 3), "q_offset": -2},
    {"window_size": (9, None), "softcap": 2.0},
    {"window_size": (0, 0)},
]


def _features(seed: int = 2) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"alibi_slopes": random.standard_normal(4), "sinks": random.standard_normal(4)}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.algorithm != "fa3"], ids=lambda row: row.name
)
def test_the_rows_of_the_kit(row: Row) -> None:
    x = row.arrays()
    given = {name: array for name, array in x.items() if name != "dout"} | row.options
    given |= {"layout": "shd", "backend": "numpy", "algorithm": row.algorithm}
    out, lse = cuflash.attention(**given, return_lse=True)
    saved = {"dout": x["dout"], "out": out.copy(), "lse": lse.copy()}
    row.spoil(saved)
    wrt = row.wrt(x)
    grads = cuflash.attention_backward(**saved, **given, wrt=wrt, deterministic=row.deterministic)
    names = ("out", "lse", *(f"d{name}" for name in wrt))
    row.check(dict(zip(names, (out, lse, *grads), strict=True)), row.expected(x))


@_of_algorithms
@pytest.mark.parametrize("blocks", [None, (16, 16), (7, 11)], ids=str)
@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_against_the_reference(
    algorithm: str, blocks: tuple[int, int] | None, options: dict[str, Any]
) -> None:
    """The call has no features, or slopes and sinks."""
    call = {**arrays(), "algorithm": algorithm, "blocks": blocks, **options}
    compare(both(call), looped(call))
    compare(both(call | _features()), looped(call | _features()))


@_of_algorithms
@pytest.mark.parametrize(
    "lengths",
    [(), ((0, 0),), ((0, 7),), ((7, 0),), ((1, 1),) * 40, ((300, 200), (0, 1), (170, 260))],
    ids=lambda lengths: f"{len(lengths)}",
)
def test_any_number_of_sequences(algorithm: str, lengths: Any) -> None:
    call = {**arrays(lengths), "algorithm": algorithm, "causal": True, **_features()}
    compare(both(call), looped(call))


def test_arrays_without_rows() -> None:
    """There are no queries, no keys or neither; results that have elements are written."""
    for rows, keys in ((0, 6), (6, 0), (0, 0)):
        call = arrays() | {"sinks": np.ones(4)}
        call |= {"q": np.ones((rows, 4, 8)), "k": np.ones((keys, 2, 8)), "v": np.ones((keys, 2, 6))}
        call |= {"cu_seqlens_q": int32(0, 2, 4), "cu_seqlens_kv": int32(0, 3, 4)}
        compare(both(call), looped(call))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((5, 9, 20), (30, 40, 44)),
        ((-7, 9, 20), (-(2**31), 40, 44)),
        ((0, 9, 2**31 - 1), (0, 68, 90)),
        ((0, -1, -(2**31), 8), (0, 0, -3, 72)),
        ((0, 30, 12, 4, 29, 40), (0, 44, 2, 60, 2, 59)),
        ((99, 99, 99), (99, 99, 99)),
        ((3,), (4,)),
    ],
    ids=str,
)
@_of_algorithms
def test_offsets_are_clamped(algorithm: str, queries: Any, keys: Any) -> None:
    """The first sequence begins at row 0, none leaves the arrays, and no two share rows."""
    call = arrays() | _features() | {"algorithm": algorithm, "causal": True}
    for name in ("q", "k", "v"):
        call[name] = np.nan_to_num(call[name], nan=0.5)
    call |= {"cu_seqlens_q": int32(*queries), "cu_seqlens_kv": int32(*keys)}
    compare(both(call), looped(call))


def _guarded(call: dict[str, Any], poison: str) -> None:
    """Run both passes in guarded memory: every element of results is written, and nothing else."""
    made = dict(call)
    for operation in ("forward", "backward"):
        arena = Arena(np, poison)
        given = {
            name: arena.input(name, value) if isinstance(value, np.ndarray) else value
            for name, value in made.items()
        }
        rows, heads, _ = call["q"].shape
        shapes = {"out": (rows, heads, 6), "lse": (heads, rows)}
        if operation == "forward":
            out, lse = (arena.output(name, shape, np.float64) for name, shape in shapes.items())
            cuflash.attention(**given, out=out, lse_out=lse, return_lse=True)
            made |= {"out": np.ones(out.shape), "lse": np.ones(lse.shape)}
            made |= {"dout": np.ones(out.shape), "dlse": np.ones(lse.shape)}
        else:
            wrt = ("q", "k", "v", "sinks")
            grads = tuple(arena.output(f"d{n}", call[n].shape, np.float64) for n in wrt)
            cuflash.attention_backward(**given, wrt=wrt, grads=grads)
        arena.check(f"{operation} {poison} {call['cu_seqlens_q']} {call['cu_seqlens_kv']}")


@pytest.mark.parametrize("poison", [*POISONS])
@_of_algorithms
def test_no_offset_leads_out_of_an_array(
    algorithm: str, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets may be negative, falling or far away; every row of the results is written."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    random = np.random.default_rng(6)
    wild = [-(2**31), -40, -1, 0, 1, 5, 30, 45, 46, 66, 67, 68, 100, 2**31 - 1]
    call = arrays() | {"algorithm": algorithm, "sinks": np.ones(4), "causal": True}
    for name in ("q", "k", "v"):
        call[name] = np.nan_to_num(call[name], nan=0.5)
    for count in (1, 2, 3, 4, 5, 8, 8, 8):
        call |= {
            name: int32(*random.choice(wild, count)) for name in ("cu_seqlens_q", "cu_seqlens_kv")
        }
        _guarded(call, poison)


def _of_sequence(found: dict[str, Any], number: int) -> dict[str, Any]:
    """The results' rows of one sequence."""
    rows, keys = (
        rows_of(at, found[name].shape[0])[number]
        for at, name in zip(offsets().values(), ("dq", "dk"), strict=True)
    )
    places = {"out": rows, "lse": (slice(None), rows), "dq": rows, "dk": keys, "dv": keys}
    return {name: found[name][place] for name, place in places.items()}


@pytest.mark.parametrize("number", [0, 2, 5, len(LENGTHS)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@_of_algorithms
def test_nothing_of_a_sequence_reaches_another(algorithm: str, value: float, number: int) -> None:
    """Rows after the last sequence reach no sequence either, and add nothing to any sum."""
    call = arrays() | _features() | {"algorithm": algorithm, "window_size": (20, 20)}
    call |= {name: np.nan_to_num(call[name], nan=0.5) for name in ("q", "k", "v")}
    expected = both(call)
    at = [rows_of(each, 99)[number] for each in offsets().values()]
    saved = {"out": expected["out"].copy(), "lse": expected["lse"].copy()}
    saved |= pulled(saved["out"], saved["lse"])
    call["q"][at[0]] = call["k"][at[1]] = call["v"][at[1]] = value
    for name, array in saved.items():
        (array.T if "lse" in name else array)[at[0]] = value
    found = both(call, **saved)
    for other in range(len(LENGTHS) + 1):
        if other != number:
            for name, got in _of_sequence(found, other).items():
                assert got.tobytes() == _of_sequence(expected, other)[name].tobytes(), (other, name)
    if number == len(LENGTHS):
        for name, got in found.items():
            assert got.tobytes() == expected[name].tobytes(), name
    else:
        assert not np.isfinite(_of_sequence(found, number)["out"]).all()


def _table(score: Any, batch: Any, head: Any, i: Any, j: Any, offset: Any, p: Any) -> Any:
    return score * p.table(batch, head) + np.cos(i + offset - j) * p.most


_SCORES = cuflash.ScoreMod(
    "return s * p.table(batch, head) + cos(i + offset - j) * p.most;",
    numpy=_table,
    most=1.5,
    table=np.linspace(0.2, 1.4, 28).reshape(7, 4),
)
_DROPOUT = {"dropout_p": 0.4, "dropout_seed": np.array([1, 2, 3, 4], np.uint32)}


def _padded(call: dict[str, Any]) -> dict[str, Any]:
    """The call as a padded batch with a mask for the padding, so that no code for lengths runs."""
    queries, keys = call["cu_seqlens_q"], call["cu_seqlens_kv"]
    left_out = {"layout", "cu_seqlens_q", "cu_seqlens_kv"}
    padded = {name: value for name, value in call.items() if name not in left_out}
    padded["q"] = cuflash.unpack(call["q"], queries, 17)
    padded |= {name: cuflash.unpack(call[name], keys, 33) for name in ("k", "v")}
    rows, columns = (np.arange(n) < np.diff(at)[:, None] for n, at in ((17, queries), (33, keys)))
    return padded | {"mask": rows[:, None, :, None] & columns[:, None, None]}


@pytest.mark.parametrize("more", [_DROPOUT, {"score_mod": _SCORES}], ids=["dropout", "score_mod"])
@_of_algorithms
def test_a_sequence_is_the_entry_of_its_number(algorithm: str, more: dict[str, Any]) -> None:
    """Dropout and score functions treat a sequence as the entry of its number in a padded batch."""
    call = arrays() | more | {"algorithm": algorithm, "causal": True, "q_offset": 3}
    found = both(call)
    of, at = pulled(found["out"], found["lse"]), call["cu_seqlens_q"]
    dlse = cuflash.unpack(of["dlse"].T, at, 17).swapaxes(1, 2)
    padded = both(_padded(call), dout=cuflash.unpack(of["dout"], at, 17), dlse=dlse)
    padded["lse"], found["lse"] = padded["lse"].swapaxes(1, 2), found["lse"].T
    for name, got in found.items():
        lengths = np.array(LENGTHS)[:, int(name in ("dk", "dv"))]
        rows, _ = cuflash.pack(padded[name], lengths, total=len(got))
        if name == "lse":
            rows[lengths.sum() :] = -np.inf
        np.testing.assert_allclose(got, rows, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("more", [_DROPOUT, {"score_mod": _SCORES}], ids=["dropout", "score_mod"])
def test_a_sequence_stands_where_the_entry_with_its_lengths_does(more: dict[str, Any]) -> None:
    """Without ``q_offset``, the last query of a sequence is at its last key."""
    call = arrays() | more | {"causal": True}
    used = _padded(call)
    del used["mask"]
    lengths = np.array(LENGTHS, np.int32).T.copy()
    used |= dict(zip(("seqused_q", "seqused_kv"), lengths, strict=True))
    found, expected = (cuflash.attention(**one) for one in (call, used))
    rows, _ = cuflash.pack(expected, lengths[0], total=len(found))
    np.testing.assert_allclose(found, rows, rtol=1e-9, atol=1e-10)


def test_gradients_in_any_order() -> None:
    call = arrays() | {"sinks": np.ones(4), "causal": True}
    expected = looped(call)
    out, lse = cuflash.attention(**call, return_lse=True)
    saved = {"out": out, "lse": lse} | pulled(out, lse)
    for count in (1, 2, 4):
        for wrt in permutations(("q", "k", "v", "sinks"), count):
            grads = cuflash.attention_backward(**saved, **call, wrt=wrt)
            compare({f"d{name}": got for name, got in zip(wrt, grads, strict=True)}, expected)


def test_the_vjp_takes_offsets_to_both_passes() -> None:
    call = arrays() | {"causal": True, "sinks": np.ones(4)}
    out, pullback = cuflash.attention_vjp(**call, wrt=("sinks", "k"))
    expected = both(call, dlse=None)
    assert out.tobytes() == expected["out"].tobytes()
    for name, got in zip(("dsinks", "dk"), pullback(pulled(out, out)["dout"]), strict=True):
        assert got.tobytes() == expected[name].tobytes(), name


def test_results_have_the_same_bits_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    q, k = (random.standard_normal((rows, 2, 64)).astype(np.float32) for rows in (1700, 1900))
    call = {"q": q, "k": k, "v": k, "sinks": np.zeros(2, np.float32), "layout": "shd"}
    call |= {"cu_seqlens_q": int32(0, 700, 701, 1600), "backend": "numpy"}
    call |= {"cu_seqlens_kv": int32(0, 10, 900, 1900)}
    found = []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found.append(both(call))
    for name, got in found[0].items():
        assert got.tobytes() == found[1][name].tobytes(), name


def test_a_plan_says_that_sequences_are_packed() -> None:
    shape, options = (40, 4, 8), {"layout": "shd", "dtype": "float32", "backend": "numpy"}
    given = {"cu_seqlens_q": (4,), "cu_seqlens_kv": int32(0, 3, 9, 40)}
    told = str(cuflash.explain(shape, shape, shape, **given, **options))
    assert "packed cu_seqlens_q int32 cu_seqlens_kv int32" in told


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_prepared_call_takes_offsets(fake_device: FakeDevice, operation: str) -> None:
    q, kv = (40, 4, 64), (50, 2, 64)
    options: dict[str, Any] = {"layout": "shd", "dtype": "float16", "operation": operation}
    prepared = cuflash.prepare(q, kv, kv, cu_seqlens_q=(4,), cu_seqlens_kv=(4,), **options)
    pointers = {name: ADDRESS * (i + 1) for i, name in enumerate(prepared.tensors)}
    prepared.run(pointers, workspace=ADDRESS)
    packed = [
        one["packed_lengths"] for one in fake_device.launched if "packed_lengths" in one.dtype.names
    ]
    assert packed
    lists, *others = fake_device.launched
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        assert int(lists[name]) == pointers[name]
    assert int(lists["entries"]) == 3
    assert len(packed) == len(others)
    for one in packed:
        assert int(one["entries"]) == 3
        for name in ("q_begins", "kv_begins"):
            assert int(one[name]) == int(lists[name]) >= ADDRESS
