"""The account of GPU tests that ran in several processes at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import MINIMUM_GPU_TESTS
from ..device.side_by_side import SLOWEST, Account, deal, devices, read, run, say

REPORT = """<testsuites><testsuite>
<testcase classname="tests.device.a" name="test_one[1]" time="2.5"/>
<testcase classname="tests.device.a" name="test_two"><failure message="assert 1 == 2">x</failure>
</testcase>
<testcase classname="tests.device.a" name="test_three"><error message="no device"/></testcase>
<testcase classname="tests.device.a" name="test_four">
<skipped message="needs a second CUDA device"/></testcase>
<testcase classname="tests.device.a" name="test_five"><skipped message="tired"/></testcase>
</testsuite></testsuites>"""


def test_every_test_is_dealt_once_and_large_ones_not_at_all() -> None:
    tests = [f"tests/device/test_x.py::test[{i}]" for i in range(10)]
    parts = deal([*tests, "tests/device/test_large.py::test"], 4)
    assert sorted(test for part in parts for test in part) == sorted(tests)
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    assert deal(tests[:2], 4) == [[tests[0]], [tests[1]]]


def test_a_part_that_does_not_end_has_failed(tmp_path: Path) -> None:
    account = run("part3", ["tests/unit/test_side_by_side.py"], tmp_path, 0.01)
    assert account.failed[-1] == "part3: did not end in 0 s"


def test_a_report_is_read(tmp_path: Path) -> None:
    path = tmp_path / "part0.xml"
    path.write_text(REPORT)
    account = read(path)
    assert account.passed == 1
    assert account.failed == [
        "tests.device.a::test_two: assert 1 == 2",
        "tests.device.a::test_three: no device",
    ]
    assert account.skipped == {"needs a second CUDA device": 1, "tired": 1}
    assert account.unlisted() == ["tired"]
    assert account.seconds["tests.device.a::test_one[1]"] == 2.5
    assert account.seconds["tests.device.a::test_five"] == 0


def test_a_part_without_a_report_has_failed(tmp_path: Path) -> None:
    assert read(tmp_path / "part7.xml").failed == ["part7: left no report"]


def test_accounts_add_up() -> None:
    sum_of = Account(2, {"a": 1}, seconds={"one": 1.0})
    sum_of.add(Account(3, {"a": 2, "b": 1}, ["x: y"], {"two": 2.0}))
    assert sum_of == Account(5, {"a": 3, "b": 1}, ["x: y"], {"one": 1.0, "two": 2.0})


def test_the_slowest_tests_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    taken = {f"test{i}": float(i) for i in range(SLOWEST + 2)}
    say(Account(5, seconds=taken), 5, 1.0, whole=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [f"{i} s in test{i}" for i in range(SLOWEST + 1, 1, -1)]


#: Tests that pass in a whole run.
_WHOLE = MINIMUM_GPU_TESTS


@pytest.mark.parametrize(
    ("account", "collected", "whole", "said"),
    [
        (Account(5), 5, False, "5 passed, 0 failed, 0 skipped of 5"),
        (Account(_WHOLE, {"JAX is not installed": 2}), _WHOLE + 2, True, f"{_WHOLE} passed"),
        (Account(5, failed=["x: y"]), 6, False, "FAILED x: y"),
        (Account(5, {"tired": 1}), 6, False, "UNLISTED SKIP tired"),
        (Account(5), 6, False, "1 of 6 tests did not run"),
        (Account(5), 5, True, "fewer than the recorded minimum"),
    ],
)
def test_what_is_wrong_is_said(
    account: Account,
    collected: int,
    whole: bool,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = say(account, collected, 1.0, whole)
    assert said in capsys.readouterr().out
    assert wrong == (not said.split()[1].startswith("passed"))


def test_parts_share_the_devices_out_and_see_them_all() -> None:
    seen = [devices(part, 3)["CUDA_VISIBLE_DEVICES"] for part in range(4)]
    assert seen == ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]
    assert devices(5, 1) == {}
