"""A test whose emulator process dies fails with its last output, and the run continues."""

from __future__ import annotations

import os
import sys

import pytest

from .apart import apart

pytestmark = pytest.mark.here


def test_what_it_gives() -> None:
    assert apart(lambda: [os.getpid()]) != [os.getpid()]


def test_an_abort_is_an_error_with_its_message() -> None:
    def run() -> None:
        os.write(2, b"emulated block 3 thread 5: reads past the end\n")
        os.abort()

    with pytest.raises(AssertionError, match="SIGABRT: emulated block 3 thread 5: reads past"):
        apart(run)


def test_a_failure_is_one_with_its_place() -> None:
    def run() -> None:
        raise ValueError("no such tile")

    with pytest.raises(AssertionError, match=r"ValueError: no such tile(.|\n)*in run"):
        apart(run)


def test_a_process_that_exits_is_no_success() -> None:
    with pytest.raises(AssertionError, match="exit code 3"):
        apart(lambda: os._exit(3))


def test_a_skip_is_a_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        apart(lambda: pytest.skip("not here"))


def test_what_it_prints_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        print("said")
        sys.stdout.flush()

    apart(run)
    assert "said" in capsys.readouterr().out
