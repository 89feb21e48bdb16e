"""The GPU tests in parallel processes, and one summary of all of them.

``python -m tests.device.side_by_side`` divides the tests among ``--parts`` processes and runs those
that need most of the memory after the others. It prints every failure and finally one line, and
exits 1 if a test fails, a part does not end, a skip is unlisted, or fewer tests ran than recorded.
Most of a test's time goes to its truth, which one or two CPU cores compute.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..conftest import LISTED_SKIPS, MINIMUM_GPU_TESTS

__all__ = ["Account", "deal", "read"]

ROOT = Path(__file__).resolve().parents[2]
#: Files whose tests need most of the device's memory.
ALONE = ("test_large.py",)
#: The number of slowest tests in the summary.
SLOWEST = 8
#: The environment of a process: otherwise each would use every core, and JAX most of the memory.
SHARED = {
    "OPENBLAS_NUM_THREADS": "2",
    "OMP_NUM_THREADS": "2",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


@dataclass
class Account:
    """The outcomes of tests."""

    passed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # by reason
    failed: list[str] = field(default_factory=list)  # names and messages
    seconds: dict[str, float] = field(default_factory=dict)  # by name

    def add(self, other: Account) -> None:
        """Add another account to this one."""
        self.passed += other.passed
        self.failed += other.failed
        self.seconds |= other.seconds
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count

    def unlisted(self) -> list[str]:
        """Reasons of skips that a GPU run may not have."""
        return [reason for reason in self.skipped if not any(x in reason for x in LISTED_SKIPS)]


def deal(tests: Sequence[str], parts: int) -> list[list[str]]:
    """Divide tests into parts that run at the same time; neighbours take equally long and are
    separated."""
    together = [test for test in tests if not any(name in test for name in ALONE)]
    return [part for part in (together[i::parts] for i in range(parts)) if part]


def read(report: Path) -> Account:
    """The account of a JUnit report; a missing report is a failure."""
    if not report.exists():
        return Account(failed=[f"{report.stem}: left no report"])
    account = Account()
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [*case.findall("failure"), *case.findall("error")]
        skip = case.find("skipped")
        account.seconds[name] = float(case.get("time", "0"))
        if wrong:
            account.failed += [f"{name}: {part.get('message', '')[:200]}" for part in wrong]
        elif skip is not None:
            reason = skip.get("message", "")
            account.skipped[reason] = account.skipped.get(reason, 0) + 1
        else:
            account.passed += 1
    return account


def collect(keyword: str) -> list[str]:
    """Identifiers of the GPU tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "-k", keyword]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "::" in line]


def devices(part: int, count: int) -> dict[str, str]:
    """The environment of a part: it sees ``count`` devices, and each part another one first."""
    if count < 2:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str((part + i) % count) for i in range(count))}


def run(
    name: str,
    tests: Sequence[str],
    folder: Path,
    seconds: float,
    seen: dict[str, str] | None = None,
) -> Account:
    """Run tests in a process of their own; its output goes to ``name``.txt."""
    listed, report = folder / f"{name}.list", folder / f"{name}.xml"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "--require-gpu", "--part", "-p", "no:cacheprovider"]
    command += ["--tb=short", f"--junitxml={report}", f"@{listed}"]
    with (folder / f"{name}.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **SHARED, **(seen or {})},
            stdout=output,
            stderr=output,
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            stop(process)
    account = read(report)
    if late:
        account.failed.append(f"{name}: did not end in {seconds:.0f} s")
    return account


def stop(process: subprocess.Popen[bytes], patience: float = 20.0) -> None:
    """Interrupt a process, so that pytest still reports the tests that it ran."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may hold on to it
            process.wait(patience)


def main() -> int:
    """Run all tests and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="keyword", default="", help="as pytest takes it")
    parser.add_argument("--parts", type=int, default=8, help="processes beside each other")
    parser.add_argument("--devices", type=int, default=1, help="of more than two the last is kept")
    parser.add_argument("--seconds", type=float, default=500.0, help="that a part may take")
    parser.add_argument("--folder", type=Path, help="for lists, reports and output")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    start, tests = time.monotonic(), collect(arguments.keyword)
    parts = deal(tests, arguments.parts)
    alone = [test for test in tests if any(name in test for name in ALONE)]
    account = Account()
    kept = arguments.devices > 2  # for tests that need a device's whole memory
    shared = arguments.devices - kept
    with ThreadPoolExecutor(max(1, len(parts)) + 1) as pool:

        def one(number: int) -> Account:
            seen = devices(number, shared)
            return run(f"part{number}", parts[number], folder, arguments.seconds, seen)

        def last() -> Account:
            seen = {"CUDA_VISIBLE_DEVICES": str(shared)} if kept else None
            return run("alone", alone, folder, arguments.seconds, seen)

        beside = [pool.submit(last)] if kept and alone else []
        for each in pool.map(one, range(len(parts))):
            account.add(each)
        if alone:
            account.add(beside[0].result() if beside else last())
    return say(account, len(tests), time.monotonic() - start, whole=not arguments.keyword)


def say(account: Account, collected: int, seconds: float, whole: bool) -> int:
    """Print the account; 1 if something is wrong with it."""
    wrong = [f"FAILED {line}" for line in account.failed]
    wrong += [f"UNLISTED SKIP {reason}" for reason in account.unlisted()]
    done = account.passed + len(account.failed) + sum(account.skipped.values())
    if done < collected:
        wrong.append(f"{collected - done} of {collected} tests did not run")
    if whole and account.passed + len(account.failed) < MINIMUM_GPU_TESTS:
        wrong.append(f"fewer than the recorded minimum of {MINIMUM_GPU_TESTS} GPU tests")
    for reason, count in sorted(account.skipped.items()):
        print(f"skipped {count}: {reason}")
    for name, taken in heapq.nlargest(SLOWEST, account.seconds.items(), key=lambda item: item[1]):
        print(f"{taken:.0f} s in {name}")
    for line in wrong:
        print(line)
    print(
        f"{account.passed} passed, {len(account.failed)} failed, "
        f"{sum(account.skipped.values())} skipped of {collected} in {seconds:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
