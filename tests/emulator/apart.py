"""Runs a function in a process of its own: the emulator aborts where device code goes wrong."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from ..kit.blas import forget_control
from ..kit.compare import REGISTRY
from . import build

__all__ = ["apart"]

T = TypeVar("T")

#: Seconds after which a process is killed; no test takes nearly as long.
SECONDS = 600


def apart(run: Callable[[], T]) -> T:
    """Run a function in a child of this process and return its result.

    Raises
    ------
    AssertionError
        With the child's traceback if it raised, with its signal and last output if it died.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as answer:
        build._folder()  # one for all children
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about threads that a child does not have
            child = os.fork()
        if child == 0:
            _child(run, said.fileno(), answer.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        answer.seek(0)
        words = said.read().decode(errors="replace")
        told = answer.read()
    if status != 0 or not told:
        name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        raise AssertionError(f"the process ended by {name}: {words[-2000:]}")
    result, skipped, error, REGISTRY.worst = pickle.loads(told)
    sys.stdout.write(words)
    if skipped is not None:
        pytest.skip(skipped)
    if error is not None:
        raise AssertionError(error)
    return result  # type: ignore[no-any-return]


def _child(run: Callable[[], Any], said: int, answer: int) -> None:
    """Run the function, write its result and end the child; it never returns."""
    try:
        faulthandler.disable()  # the emulator's own message is enough
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout = sys.stderr = open(said, "w", closefd=False)  # noqa: SIM115
        signal.alarm(SECONDS)
        build.forget_threads()
        forget_control()
        outcome = _outcome(run)
        with os.fdopen(answer, "wb", closefd=False) as file:
            pickle.dump((*outcome, REGISTRY.worst), file)
        sys.stdout.flush()
    finally:
        os._exit(0)


def _outcome(run: Callable[[], Any]) -> tuple[Any, str | None, str | None]:
    """The result, the reason of a skip, and the traceback of a failure."""
    try:
        return run(), None, None
    except pytest.skip.Exception as skip:
        return None, str(skip), None
    except BaseException as error:
        lines = traceback.format_exception(error)
        return None, None, f"{type(error).__name__}: {error}\n{''.join(lines)[-6000:]}"
