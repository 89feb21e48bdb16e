"""Kernels and rows of the emulator's tests take turns: each is tested on some days."""

from __future__ import annotations

import datetime

import pytest

from .. import turns
from ..emulator.call import Kernels
from ..emulator.lengths import Kernels as KernelsOfLengths
from ..emulator.rows import Row
from ..kit import block_masks, packed_lengths, split_keys, used_lengths
from ..turns import has_turn

_LISTED = (block_masks.Row, packed_lengths.Row, split_keys.Row, used_lengths.Row)


@pytest.mark.parametrize("kind", [Row, Kernels, KernelsOfLengths, *_LISTED], ids=str)
def test_kernels_of_the_emulator_take_turns_within_a_week(kind: type) -> None:
    assert 1 < kind.days_of_turn <= 7  # type: ignore[attr-defined]


class _Date(datetime.date):
    """A day that a test chooses."""

    number = 738_000

    @classmethod
    def today(cls) -> _Date:
        return cls.fromordinal(cls.number)


@pytest.mark.parametrize("days", [4, 8])
def test_a_turn_comes_once_within_its_days(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.datetime, "date", _Date)
    turned = []
    for number in range(days):
        monkeypatch.setattr(_Date, "number", 738_000 + number)
        turned += [name for name in ("fa1", "fa2", "fa3") if has_turn(name, days)]
    assert sorted(turned) == ["fa1", "fa2", "fa3"]
