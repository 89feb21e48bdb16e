"""The code that each planted bug changes exists, and every bug is killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from ..kit.case import Case
from ..kit.few import any_lengths
from ..kit.parts import parts_forced
from ..mutants import hopper, hopper_emulated
from ..mutants.__main__ import judge
from ..mutants.bugs import BUGS, EMULATED_BUGS, HOPPER_BUGS, Bug
from ..mutants.hopper_problems import (
    CAUSAL,
    GRADIENTS,
    HALVES_GRADIENTS,
    LISTS,
    MANY_HEADS,
    NARROW,
    NARROW_GRADIENTS,
    ORDERED_GRADIENTS,
    PARTED_GRADIENTS,
    SERIAL_GRADIENTS,
    SERIAL_TURNS,
    SHARED_GRADIENTS,
    Listed,
)
from ..mutants.record import EMULATED_RECORD, HOPPER_RECORDS, device_digest, read
from ..turns import has_turn

_ALL = (*BUGS, *HOPPER_BUGS, *EMULATED_BUGS)


@pytest.mark.parametrize("bug", _ALL, ids=lambda bug: bug.name)
def test_a_bug_is_one_edit_that_can_be_made(bug: Bug, root: Path) -> None:
    assert (root / bug.file).read_text().count(bug.find) == 1
    assert bug.find != bug.replace


@pytest.mark.parametrize("bug", [*BUGS, *EMULATED_BUGS], ids=lambda bug: bug.name)
def test_the_test_of_a_bug_exists(bug: Bug, root: Path) -> None:
    for named, folder in ((bug.test, ""), (bug.emulated, "tests/emulator")):
        file, _, name = named.partition("::")
        if not name:
            continue
        there = next(
            p for p in (root / folder / file, root / "tests/emulator" / file) if p.is_file()
        )
        assert f"def {name.partition('[')[0]}(" in there.read_text(), named


def test_names_are_unique() -> None:
    assert len({bug.name for bug in _ALL}) == len(_ALL)


def test_there_are_enough_of_each_kind() -> None:
    in_device_code = [bug for bug in BUGS if bug.needs_gpu]
    assert len(in_device_code) >= 60
    assert len(BUGS) >= 75
    assert len(HOPPER_BUGS) >= 30
    assert {bug.test for bug in HOPPER_BUGS} == set(LISTS)


def _check_code(record: Mapping[str, Any], key: str, now: str) -> None:
    """A record was made with this code, or says what has changed since then."""
    since = record.get("since", {"code": record[key], "changed": ""})
    assert since["code"] == now, "the code changed since the record"
    assert record[key] == now or len(since["changed"]) > 20


def test_every_bug_of_the_device_code_was_killed() -> None:
    """``python -m tests.mutants`` brings the record up to date."""
    record = read()
    assert {bug.name for bug in BUGS if bug.needs_gpu} <= set(record["killed"])
    _check_code(record, "device_code", device_digest())


@pytest.mark.parametrize("name", HOPPER_RECORDS)
def test_every_bug_of_the_hopper_kernels_was_killed(name: str) -> None:
    """``python -m tests.mutants --only fa3`` on a Hopper GPU brings the record up to date.

    The record was made with this code, or with earlier code. In that case it says what has changed
    since, and the emulator has killed the bugs that it can show in this code.
    """
    path = HOPPER_RECORDS[name]
    if not path.exists():
        pytest.skip(f"the bugs of the {name} pass of fa3 have not been run on a GPU yet")
    record = read(path)
    bugs = [bug for bug in HOPPER_BUGS if hopper.pass_of(bug) == name]
    assert {bug.name for bug in bugs} == set(record["killed"])
    assert record["compute_capability"] == "90"
    _check_code(record, "code", hopper.digest_of(name))
    if record["code"] != hopper.digest_of(name):
        _check_code(read(EMULATED_RECORD), "device_code", hopper.digest_of_both())


def test_every_bug_of_the_hopper_kernels_that_the_emulator_shows_was_killed() -> None:
    """``python -m tests.mutants --only fa3`` without a GPU brings the record up to date."""
    record, names = read(EMULATED_RECORD), {bug.name for bug in (*HOPPER_BUGS, *EMULATED_BUGS)}
    assert set(hopper_emulated.UNSEEN) <= names
    assert set(record["killed"]) == names - set(hopper_emulated.UNSEEN)
    _check_code(record, "device_code", hopper.digest_of_both())


@pytest.mark.parametrize("name", [CAUSAL, NARROW])
def test_the_problems_of_the_hopper_kernels_are_what_their_bugs_need(name: str) -> None:
    """Both cases have one kernel and several kv tiles. Blocks compute several tiles each."""
    listed = LISTS[name]
    few, many = (_plan(listed, case) for case in (listed.few, listed.many))
    assert few.launches[0].config == many.launches[0].config
    tile, case = many.tile, listed.many
    tiles = case.batch * case.heads_q * -(-case.seqlen_q // tile.block_q)
    assert tiles > 2 * LIMITS["90"].num_sms
    assert min(listed.few.seqlen_kv, case.seqlen_kv) > 4 * tile.block_kv
    assert (tile.takes_turns, tile.warpgroups) == {CAUSAL: (True, 3), NARROW: (False, 4)}[name]


#: Queries and keys of a tile, and the columns of K and of V.
_TILES = {
    GRADIENTS: (64, 128, 128, 128),
    NARROW_GRADIENTS: (128, 128, 64, 64),
    SHARED_GRADIENTS: (64, 64, 256, 256),
    SERIAL_GRADIENTS: (64, 128, 192, 128),
    HALVES_GRADIENTS: (64, 128, 96, 96),
    PARTED_GRADIENTS: (64, 128, 128, 128),
}


@pytest.mark.parametrize("name", _TILES)
def test_the_problems_of_the_hopper_gradients_are_what_their_bugs_need(name: str) -> None:
    """Both cases have one kernel, several q tiles, sums that blocks clear, and unseen tiles."""
    listed = LISTS[name]
    few, many = (_plan(listed, case) for case in (listed.few, listed.many))
    assert few.launches[1].config == many.launches[1].config
    tile, case = many.tile, listed.many
    assert _tiles(many) > 2 * LIMITS["90"].num_sms
    _check_clearing(many)
    assert case.group > listed.parts  # a block clears more than one query head
    for chosen in (few, many):
        assert dict(chosen.launches[1].arguments).get("parts", 1) == listed.parts
    assert min(listed.few.seqlen_q, case.seqlen_q) > 4 * tile.block_q
    unseen = replace(listed.few, q_offset=-40).visible().max()
    assert unseen + tile.block_kv < listed.few.seqlen_kv
    assert (tile.block_q, tile.block_kv, tile.head_dim, tile.head_dim_v) == _TILES[name]
    if name == SERIAL_GRADIENTS:
        assert case.dtype == "float16"  # weights are multiplied before they are rounded
        assert -(-listed.few.seqlen_q // tile.block_q) * tile.block_q > listed.few.seqlen_q


@pytest.mark.parametrize("name", [ORDERED_GRADIENTS, SERIAL_TURNS])
def test_the_problems_of_ordered_gradients_are_what_their_bugs_need(name: str) -> None:
    """Both cases have one kernel and head groups; blocks clear sums, which several tiles add to."""
    listed = LISTS[name]
    few, many = (_plan(listed, case) for case in (listed.few, listed.many))
    assert few.launches[1].config == many.launches[1].config
    assert many.tile.ordered
    assert (many.tile.head_dim + many.tile.head_dim_v > 256) == (name == SERIAL_TURNS)
    head_group = dict(many.launches[1].arguments)["head_group"]
    assert 1 < head_group < many.problem.batch * many.problem.heads_kv
    assert _kv_tiles(many) > 4
    _check_clearing(many)


def test_the_problems_of_many_heads_are_what_their_bugs_need() -> None:
    """Both cases have one kernel. Rows to clear do not divide evenly, or are cleared late."""
    listed = LISTS[MANY_HEADS]
    few, full, many = (
        _plan(listed, case) for case in (listed.few, replace(listed.few, causal=False), listed.many)
    )
    assert few.launches[1].config == many.launches[1].config
    for chosen in (few, full, many):
        _check_clearing(chosen)
        lag = dict(chosen.launches[1].arguments)["convert_lag"]
        of_round = chosen.tile.kv_tiles_per_convert_block
        assert lag < -(-_tiles(chosen) // of_round) * of_round, "a block rounds beside tiles"
    units = -(-listed.few.seqlen_q // few.tile.block_q) * few.tile.block_q // 16
    kept = units // _kv_tiles(few) * _kv_tiles(few)  # without the remainder
    assert listed.few.seqlen_q > 16 * kept
    unseen = replace(listed.few, q_offset=-40).visible().max()
    assert unseen + few.tile.block_kv < listed.few.seqlen_kv
    # A block clears twenty times the bytes that a tile reads, and a tile has one step. Tiles add
    # only to the last rows, which are cleared last.
    case, tile = listed.many, many.tile
    assert (_kv_tiles(many), case.group, _seen_tiles(case, tile.block_q)) == (1, 1, 1)
    assert case.visible()[-1] > 0
    cleared = case.seqlen_q * tile.head_dim * 4
    assert cleared > 20 * 2 * (tile.block_q + tile.block_kv) * (tile.head_dim + tile.head_dim_v)


def test_few_tiles_are_all_on_the_device_at_once_with_what_finishes_their_rows() -> None:
    """A block that finishes rows without waiting for their tiles then runs before they end."""
    chosen = _plan(LISTS[GRADIENTS], LISTS[GRADIENTS].few)
    assert chosen.tile.kv_tiles_per_convert_block
    assert chosen.launches[1].grid < LIMITS["90"].num_sms
    assert chosen.problem.batch > 1
    assert _kv_tiles(chosen) > 1
    ordered = _plan(LISTS[ORDERED_GRADIENTS], LISTS[ORDERED_GRADIENTS].few)
    assert ordered.tile.kv_tiles_per_convert_block


def _check_clearing(chosen: Any) -> None:
    """Blocks clear sums of later tiles, also of the last head, which is compared with the truth."""
    assert dict(chosen.launches[1].arguments)["ahead"] < _tiles(chosen)


def _tiles(chosen: Any) -> int:
    """The number of kv tiles of all heads."""
    heads_kv = dict(chosen.launches[1].arguments).get("heads_kv", chosen.problem.heads_kv)
    return chosen.problem.batch * heads_kv * _kv_tiles(chosen)


def _kv_tiles(chosen: Any) -> int:
    """The number of kv tiles of a head."""
    return -(-chosen.problem.seqlen_kv // chosen.tile.block_kv)


def _seen_tiles(case: Case, block_q: int) -> int:
    """The number of q tiles with a query that is not dead."""
    alive = case.visible() > 0
    return sum(bool(alive[i : i + block_q].any()) for i in range(0, case.seqlen_q, block_q))


def _plan(listed: Listed, case: Case) -> Any:
    problem = AttentionProblem(
        operation="backward" if listed.backward else "forward",
        batch=case.batch,
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        seqlen_q=case.seqlen_q,
        seqlen_kv=case.seqlen_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        storage=case.dtype,
        output=case.dtype,
        mask="causal" if case.causal else "full",
        scale=case.factor,
        q_offset=case.offset,
        alignment="tensor_map",
        deterministic=listed.ordered,
    )
    limits = replace(LIMITS["90"], nvrtc=(13, 0))
    with parts_forced(listed.parts), any_lengths():
        return plan(problem, limits, algorithm="fa3", blocks=listed.blocks)


def test_bugs_of_the_hopper_kernels_are_left_out_elsewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "why_left_out", lambda: "this device has 8.0")
    assert hopper.run(HOPPER_BUGS, 2, tmp_path)
    said = f"left out: {len(HOPPER_BUGS)} bugs of fa3 need compute capability 9.0, this device"
    assert said in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


#: Days between two runs of each bug of the host code: a run takes seconds.
_DAYS = 18
_TODAY = [bug for bug in BUGS if not bug.needs_gpu and has_turn(bug.name, _DAYS)]


@pytest.mark.long
@pytest.mark.parametrize("bug", _TODAY, ids=lambda bug: bug.name)
def test_a_bug_of_the_host_code_is_killed(bug: Bug) -> None:
    dead, by = judge(bug)
    assert dead, by
