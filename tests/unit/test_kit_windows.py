"""Windows and sinks of the kit's cases."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import Phase, given, seed, settings

from tests.kit.case import Case
from tests.kit.problem import cases

_DRAWN = cases(
    "bfloat16",
    *(64, 40),
    causal=False,
    tile=(16, 24),
    budget=2**16,
    windowed=True,
    sinks=("", "bfloat16", "float32"),
)


def _alive(case: Case) -> bool:
    return bool((case.visible() > 0).any())


WANTED = {
    "only a left side": lambda c: c.window.endswith(":"),
    "only a right side": lambda c: c.window.startswith(":"),
    "both sides": lambda c: None not in c.sides,
    "one key": lambda c: c.sides == (0, 0),
    "a left side of whole tiles": lambda c: c.sides[0] and c.sides[0] % 24 == 0,
    "a key beside whole tiles": lambda c: c.sides[0] in (23, 25),
    "a window of all keys": lambda c: c.seqlen_q * c.seqlen_kv and c.sees().all(),
    "nothing seen at all": lambda c: c.seqlen_q * c.seqlen_kv and not c.sees().any(),
    "dead rows above": lambda c: _alive(c) and not c.visible()[0],
    "dead rows below": lambda c: _alive(c) and not c.visible()[-1],
    "keys that nobody sees": lambda c: _alive(c) and not c.sees().any(axis=0).all(),
    "a negative offset": lambda c: _alive(c) and (c.q_offset or 0) < 0,
    "groups": lambda c: c.group > 2 and c.heads_kv > 1,
    "no sinks": lambda c: not c.sinks,
    "sinks of q's dtype": lambda c: c.sinks == "bfloat16",
    "sinks of the compute type": lambda c: c.sinks == "float32",
}


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    """The cases of a run, or of at most four: a single run may miss a value of a choice."""
    found: list[Case] = []

    def collect(case: Case) -> None:
        found.append(case)

    some = settings(max_examples=100, derandomize=False, database=None, phases=[Phase.generate])
    for start in range(4):
        seed(start)(some(given(_DRAWN)(collect)))()
        if all(any(map(wanted, found)) for wanted in WANTED.values()):
            break
    return found


@pytest.mark.parametrize("wanted", WANTED)
def test_every_kind_is_drawn(wanted: str, drawn: list[Case]) -> None:
    assert any(WANTED[wanted](case) for case in drawn)


def test_the_repro_line_parses_back(drawn: list[Case]) -> None:
    assert all(Case.parse(case.repro) == case for case in drawn)


def test_a_window_is_what_it_says(drawn: list[Case]) -> None:
    """A pair is visible if its key is in the window; ``visible`` counts the keys of each row."""
    for case in drawn[::8]:
        left, right = case.sides
        sees = case.sees()
        for i, j in itertools.product(range(0, case.seqlen_q, 3), range(0, case.seqlen_kv, 3)):
            ahead = j - i - case.offset
            inside = (left is None or ahead >= -left) and (right is None or ahead <= right)
            assert sees[i, j] == inside, case.repro
        assert (sees.sum(axis=1) == case.visible()).all(), case.repro


def test_a_case_says_its_window_and_sinks() -> None:
    case = Case(seqlen_q=5, seqlen_kv=7, dtype="float16", window="3:0", sinks="float32", seed=1)
    assert case.repro.endswith("window=3:0 sinks=float32")
    assert case.options["window_size"] == (3, 0)
    assert Case(window=":4").options["window_size"] == (None, 4)
    assert "window_size" not in Case().options
    assert case.shape("sinks") == case.shape("dsinks") == (1,)
    with pytest.raises(ValueError, match="no such case"):
        Case(dtype="float16", sinks="bfloat16")
