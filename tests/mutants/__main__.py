"""Plant every bug in a copy of the tree, run its test, and record what killed it.

``python -m tests.mutants [--only TEXT]``. Without a GPU the emulator runs bugs in
device code, with its own tests in place of the named one. Bugs of FlashAttention-3
(``--only fa3``) have one record of a GPU and one of the emulator; a GPU of another
compute capability than 9.0 does not run them. Exits 1 if a bug survives, or if a test
fails without any bug.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import cuflash

from ..emulator.build import KEPT, compiler
from . import hopper, hopper_emulated
from .bugs import BUGS, EMULATED_BUGS, HOPPER_BUGS, Bug
from .record import EMULATED_RECORD, RECORD, device_digest, store
from .tree import copy_tree, environment_of, plant

#: The tests that run device code without a GPU.
EMULATED = "tests/emulator/"
#: Seconds that a test may take on a GPU, where a kernel can wait forever, and in the emulator.
GPU_SECONDS, CPU_SECONDS = 180, 1800
#: Taken as the exit code of a test that did not end.
TIMED_OUT = 124
#: Signals with which a crashing program ends.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
#: Messages of a compiler about an edit that does not compile.
NO_PROGRAM = re.compile(r"CompileError|\berror: |static assertion failed")


def run_tests(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Pytest's exit code and output in a copy of the tree."""
    # Without capture: the emulator says what is wrong and aborts.
    command = [sys.executable, "-m", "pytest", "-qxs", "-p", "no:cacheprovider"]
    command += ["--hypothesis-profile=ci", *tests]  # the same examples whenever it is run
    options: dict[str, Any] = {"cwd": tree, "env": environment_of(tree), "capture_output": True}
    seconds = (GPU_SECONDS if cuflash.is_available() else CPU_SECONDS) * len(tests)
    try:
        done = subprocess.run(command, text=True, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"did not end in {seconds} s"
    return done.returncode, done.stdout + done.stderr


def killer(output: str) -> str:
    """What the failing test said, in a line."""
    lines = re.findall(r"^E +(\S.*)$", output, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    said = re.sub(r"/\S*/", "", lines[0])[:160] if lines else "?"  # without folders of this run
    return f"{failed[0] if failed else '?'}: {said}"


def tests_of(bug: Bug) -> list[str]:
    """The tests that run with a bug on this machine; one of them must fail."""
    if not is_emulated(bug):
        return [bug.test]
    tests = hopper_emulated.tests_of(bug) if bug not in BUGS else [bug.emulated]
    return [EMULATED + test for test in tests]


def is_emulated(bug: Bug) -> bool:
    """Whether the emulator runs a bug on this machine."""
    return bug.needs_gpu and not cuflash.is_available()


def judge(bug: Bug) -> tuple[bool, str]:
    """Whether the bug is killed, and by what."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        plant(bug, tree)
        tests = tests_of(bug)
        code, output = run_tests(tree, tests)
    if -code in CRASHES and is_emulated(bug):  # the emulator stopped, or died of a wrong address
        said = re.search(r"^.*emulated block \d+ thread \d+: (.+)$", output, re.MULTILINE)
        return True, f"the emulator: {said[1]}" if said else f"signal {-code}"
    if code == TIMED_OUT and not is_emulated(bug):
        return bug.needs_gpu, f"{tests[0]}: {output}"
    if code not in (0, 1) or NO_PROGRAM.search(output):
        return False, f"pytest exited {code}: {output[-600:]}"
    return code == 1, killer(output) if code == 1 else "survived"


def main() -> int:
    """Run the bugs and write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name or file holds this text")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--hopper-records", type=Path, default=RECORD.parent, help="a folder")
    parser.add_argument("--jobs", type=int, default=4, help="bugs at a time")
    parser.add_argument("--pass", dest="fa3_pass", default="", help="of fa3 alone, one of its two")
    arguments = parser.parse_args()
    only = arguments.only
    runs = cuflash.is_available() or compiler() is not None
    bugs = [b for b in BUGS if only in f"{b.name} {b.file}" and (runs or not b.needs_gpu)]
    bugs = [] if arguments.fa3_pass else bugs
    of_fa3 = [*HOPPER_BUGS, *(() if cuflash.is_available() else EMULATED_BUGS)]
    of_fa3 = [b for b in of_fa3 if only in f"fa3 {b.name} {b.file}"]
    if arguments.fa3_pass:
        of_fa3 = [b for b in of_fa3 if hopper.pass_of(b) == arguments.fa3_pass]
    right = not bugs or run_bugs(bugs, arguments.jobs, arguments.record if runs else None)
    if of_fa3 and cuflash.is_available():
        right &= hopper.run(of_fa3, arguments.jobs, arguments.hopper_records)
    elif of_fa3 and runs:
        shown = [bug for bug in of_fa3 if hopper_emulated.seen(bug)]
        right &= run_bugs(shown, arguments.jobs, arguments.hopper_records / EMULATED_RECORD.name)
        print("not expected to be killed:")
        others = [bug for bug in of_fa3 if bug not in shown and bug.needs_gpu]
        with kernels_kept():
            right &= not judge_all(others, arguments.jobs)
    return 0 if right else 1


@contextlib.contextmanager
def kernels_kept() -> Iterator[None]:
    """Within this context, kernels that a bug does not change are compiled once."""
    with tempfile.TemporaryDirectory() as kept, mock.patch.dict(os.environ, {KEPT: kept}):
        yield


def run_bugs(bugs: list[Bug], jobs: int, record: Path | None) -> bool:
    """Judge bugs and record the killed ones. True if all are killed and no sound test fails."""
    with kernels_kept():
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_tree(Path(folder))
            code, output = run_tests(tree, sorted({test for bug in bugs for test in tests_of(bug)}))
        print(f"without a bug: pytest exited {code}", flush=True)
        if code != 0:
            print(output[-3000:])
            return False
        killed = judge_all(bugs, jobs)
    if record is not None:
        write(record, bugs, killed)
    return len(killed) == len(bugs)


def judge_all(bugs: list[Bug], jobs: int) -> dict[str, str]:
    """The names of the killed bugs, and what killed each."""
    killed: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for bug, (dead, by) in zip(bugs, pool.map(judge, bugs), strict=True):
            print(f"{'killed  ' if dead else 'SURVIVED'} {bug.name}: {by}", flush=True)
            if dead:
                killed[bug.name] = by
    return killed


def write(path: Path, bugs: Sequence[Bug], killed: dict[str, str]) -> None:
    """Add the killed bugs to the record, which keeps the other bugs."""
    of_fa3 = path.name == EMULATED_RECORD.name
    code = hopper.digest_of_both() if of_fa3 else device_digest()
    every = filter(hopper_emulated.seen, (*HOPPER_BUGS, *EMULATED_BUGS)) if of_fa3 else BUGS
    name = "the emulator"
    if cuflash.is_available():
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    seen = {"ran_on": name, "device_code": code}
    store(path, seen, {bug.name for bug in bugs}, killed, {bug.name for bug in every})


if __name__ == "__main__":
    raise SystemExit(main())
