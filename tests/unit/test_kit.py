"""The kit's cases, strides and data."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as st

from tests.kit import data
from tests.kit.case import LAYOUTS, STORAGE, TENSORS, VALUES, Case
from tests.kit.problem import cases, lengths
from tests.kit.strides import CONTIGUOUS, Strides

BUDGET = 2**18
DRAWN = cases("bfloat16", 64, 40, causal=True, tile=(64, 96), budget=BUDGET)


@given(DRAWN)
def test_the_repro_line_parses_back(case: Case) -> None:
    assert "\n" not in case.repro
    assert Case.parse(case.repro) == case


def test_a_repro_line_reads_like_this() -> None:
    case = Case(2, 6, 2, 65, 129, 64, 32, "bfloat16", True, -3, 0.125, "bhsd", 7, "outliers")
    case = case.with_strides(k=Strides((1, 0, 2, 3), (0, 8, 0, 0), 16, (2,), (0,), True))
    assert case.repro == (
        "B=2 Hq=6 Hk=2 Sq=65 Sk=129 D=64 Dv=32 dtype=bfloat16 causal=yes q_offset=-3 scale=0.125 "
        "layout=bhsd seed=7 values=outliers k:o1023,g0.8.0.0,a16,f2,b0,x1"
    )
    assert Case.parse(case.repro) == case


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads_q": 3, "heads_kv": 2},
        {"heads_q": 1, "heads_kv": 0},
        {"layout": "shd", "batch": 2},
        {"layout": "sd", "heads_q": 2, "heads_kv": 2},
        {"dtype": "int8"},
        {"values": "uniform"},
    ],
)
def test_cases_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no such case"):
        Case(**wrong)


@settings(max_examples=100)
@given(DRAWN)
def test_drawn_cases_keep_to_what_was_asked(case: Case) -> None:
    work = case.batch * case.heads_q * (case.seqlen_q + 64) * (case.seqlen_kv + 64)
    assert work <= BUDGET
    assert (case.dtype, case.head_dim, case.head_dim_v, case.causal) == ("bfloat16", 64, 40, True)


WANTED = {
    "no queries": lambda c: c.seqlen_q == 0 and c.seqlen_kv > 0,
    "no keys": lambda c: c.seqlen_kv == 0 and c.seqlen_q > 0,
    "no batch": lambda c: c.batch == 0,
    "no heads": lambda c: c.heads_q == 0,
    "one query of many keys": lambda c: c.seqlen_q == 1 and c.seqlen_kv > 96,
    "past a tile of queries": lambda c: c.seqlen_q > 64 and c.seqlen_q % 64 == 1,
    "short of a tile of keys": lambda c: c.seqlen_kv % 96 == 95,
    "whole tiles": lambda c: c.seqlen_q * c.seqlen_kv and c.seqlen_q % 64 == c.seqlen_kv % 96 == 0,
    "more queries than keys": lambda c: c.seqlen_q > c.seqlen_kv + 100 and c.seqlen_kv > 2,
    "more keys than queries": lambda c: c.seqlen_kv > c.seqlen_q + 100 and c.seqlen_q > 2,
    "groups": lambda c: c.group > 2 and c.heads_kv > 1,
    "dead rows": lambda c: c.seqlen_kv and (c.visible() == 0).any(),
    "negative strides and gaps": lambda c: any(r.flipped and any(r.gaps) for r in c.strides),
    "broadcast k": lambda c: c.recipe("k").broadcast and not c.recipe("v").broadcast,
    "last stride not 1": lambda c: any(r.gaps and r.gaps[-1] for r in c.strides),
    **{layout: lambda c, layout=layout: c.layout == layout for layout in LAYOUTS},
    **{values: lambda c, values=values: c.values == values for values in VALUES},
}


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    """The cases of several short runs: a single run may miss a value of a choice.

    At least eight runs are made, and more until every kind is drawn, but at most 24.
    """
    found: list[Case] = []

    def collect(case: Case) -> None:
        found.append(case)

    for start in range(24):
        some = settings(max_examples=50, derandomize=False, database=None, phases=[Phase.generate])
        seed(start)(some(given(DRAWN)(collect)))()
        if start >= 7 and all(any(map(wanted, found)) for wanted in WANTED.values()):
            break
    return found


@pytest.mark.long
@pytest.mark.parametrize("wanted", WANTED)
def test_every_kind_of_case_is_drawn(wanted: str, drawn: list[Case]) -> None:
    assert any(WANTED[wanted](case) for case in drawn)


@pytest.mark.long
def test_few_cases_are_empty(drawn: list[Case]) -> None:
    empty = [c for c in drawn if 0 in (c.batch, c.heads_q, c.seqlen_q, c.seqlen_kv)]
    assert len(empty) < len(drawn) / 3
    of_some_size = [
        c for c in drawn if c.seqlen_q > 32 and c.seqlen_kv > 32 and c.batch * c.heads_q
    ]
    assert len(of_some_size) > len(drawn) / 4


@settings(max_examples=300)
@given(lengths(64, 300))
def test_lengths_keep_to_the_longest(length: int) -> None:
    assert 0 <= length <= 300


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_go_about_tiles(length: int) -> None:
    find(lengths(64, 300), lambda drawn: drawn == length, settings=settings(max_examples=5000))


_SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def _placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Strides]:
    shape = draw(_SHAPES)
    axes = list(range(len(shape)))
    recipe = Strides(
        order=tuple(draw(st.permutations(axes))),
        gaps=tuple(draw(st.integers(0, 3)) for _ in axes),
        offset=draw(st.integers(0, 5)),
        flipped=tuple(axis for axis in axes if draw(st.booleans())),
        absurd=draw(st.booleans()),
    )
    return shape, recipe


@given(_placed())
def test_a_recipe_gives_every_element_its_own_place(
    given_: tuple[tuple[int, ...], Strides],
) -> None:
    shape, recipe = given_
    placement = recipe.place(shape)
    where = np.full(shape, placement.start)
    for axis, (size, stride) in enumerate(zip(shape, placement.strides, strict=True)):
        steps = np.arange(size) * stride
        where += steps.reshape([-1 if other == axis else 1 for other in range(len(shape))])
    assert np.unique(where).size == where.size
    assert where.min(initial=recipe.offset) >= recipe.offset
    assert where.max(initial=-1) == (placement.extent - 1 if where.size else -1)
    values = np.arange(where.size).reshape(shape)
    assert np.array_equal(data.strided(values, recipe), values)


def test_a_recipe_means_what_it_says() -> None:
    assert Strides().place((2, 3, 4)).strides == (12, 4, 1)
    assert Strides(order=(1, 0, 2)).place((2, 3, 4)).strides == (4, 8, 1)
    assert Strides(gaps=(0, 8, 0)).place((2, 3, 4)).strides == (36, 12, 1)
    assert Strides(flipped=(0,)).place((2, 3, 4)).strides == (-12, 4, 1)
    assert Strides(flipped=(0,), offset=5).place((2, 3, 4)).start == 17
    assert Strides(broadcast=(0,)).place((2, 3, 4)).strides == (0, 4, 1)
    assert Strides(broadcast=(0,)).place((2, 3, 4)).extent == 12
    assert Strides(absurd=True).place((1, 3, 4)).strides[0] > 2**32
    with pytest.raises(ValueError, match="recipe"):
        Strides.parse("o01,z3")


@given(DRAWN)
def test_strides_change_no_value(case: Case) -> None:
    contiguous = replace(case, strides=(CONTIGUOUS,) * len(TENSORS))
    for name in ("q", "k", "v", "dout"):
        array, recipe = data.tensor(case, name), case.recipe(name)
        assert array.shape == case.shape(name)
        assert array.dtype == ml_dtypes.bfloat16
        if not recipe.broadcast:
            assert np.array_equal(array, data.tensor(contiguous, name))
        for axis in recipe.broadcast:
            assert array.strides[axis] == 0 or (array.shape[axis] == 1 and recipe.absurd)


def test_data_follow_from_the_seed_alone() -> None:
    case = Case(seqlen_q=5, seqlen_kv=7, seed=3)
    first, again = data.arrays(case), data.arrays(case)
    assert list(first) == ["q", "k", "v", "dout"]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert np.array_equal(first["k"], data.tensor(replace(case, seqlen_q=9), "k"))
    assert not np.array_equal(first["q"], data.tensor(replace(case, seed=4), "q"))
    assert not np.array_equal(first["q"][:, :5], first["k"][:, :5])
    assert data.tensor(replace(case, dtype="float64"), "dlse").dtype == np.float64


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", STORAGE)
def test_families_hold_what_they_say(values: str, dtype: str) -> None:
    case = Case(batch=2, seqlen_q=50, seqlen_kv=60, dtype=dtype, values=values)
    x = {name: array.astype(np.float64) for name, array in data.arrays(case).items()}
    size = {name: np.sqrt(np.mean(array**2)) for name, array in x.items()}
    expected = {"small": 1e-3, "x8": 8.0, "x30": 30.0}.get(values)
    if expected:
        assert all(0.9 * expected < size[name] < 1.1 * expected for name in "qkv")
    if values in ("normal", "small", "x8", "x30", "zero_q", "positive_v"):
        assert 0.9 < size["dout"] < 1.1
    if values == "integers":
        assert all(np.isin(array, range(-2, 3)).all() for array in x.values())
        assert all(0.1 < np.mean(array != 0) < 0.3 for array in x.values())
    if values == "outliers":
        large = (np.abs(x["q"]) > 6).sum(axis=-1)
        assert large.max() == 1
        assert large.mean() > 0.5
    if values == "equal":
        assert all(np.unique(array).size == 1 and array.any() for array in x.values())
    if values == "zeros":
        assert not any(array.any() for array in x.values())
        assert all(0.4 < np.mean(np.signbit(array)) < 0.6 for array in x.values())
    assert (values in ("zeros", "zero_q")) == (not x["q"].any())
    if values == "positive_v":
        assert 1.4 < np.mean(x["v"]) < 1.6


def test_layouts_go_there_and_back() -> None:
    for layout in LAYOUTS:
        heads = 4 if "h" in layout else 1
        case = Case(2 if "b" in layout else 1, heads, heads, 3, 5, 6, 7, layout=layout)
        for name in TENSORS:
            array = np.arange(np.prod(case.shape(name))).reshape(case.shape(name))
            view = case.heads_first(name, array)
            rows, width = view.shape[2:]
            assert view.shape[:2] == (case.batch, heads)
            assert rows == (5 if name in ("k", "v", "dk", "dv") else 3)
            assert width == (7 if name in ("v", "out", "dout", "dv") else 6)
            assert np.array_equal(case.in_layout(view), array)
        assert case.heads_first("lse", np.zeros(case.shape("lse"))).shape == (case.batch, heads, 3)


def test_visible_counts_keys() -> None:
    for sq, sk, causal, offset in [(3, 5, False, None), (3, 5, True, None), (5, 3, True, None)] + [
        (4, 3, True, offset) for offset in (-9, -2, 0, 1, 9)
    ]:
        case = Case(seqlen_q=sq, seqlen_kv=sk, causal=causal, q_offset=offset)
        shown = sk - sq if offset is None else offset
        expected = [sum(not causal or j <= i + shown for j in range(sk)) for i in range(sq)]
        assert case.visible().tolist() == expected
