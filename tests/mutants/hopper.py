"""Planted bugs of FlashAttention-3 on a GPU, each in a process of its own, several at a time.

A bug may leave a kernel waiting for ever, so each process runs one bug and has a short time limit.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuflash

from .bug import Bug
from .hopper_problems import LISTS
from .hopper_run import BUILT, PATIENCE, End
from .record import HOPPER_RECORDS, emulator_digest, hopper_digest, store
from .tree import copy_tree, environment_of, plant

__all__ = ["digest_of", "digest_of_both", "pass_of", "run", "why_left_out"]

#: Seconds for a whole process, compilation included; the process's own limit is shorter.
SECONDS = PATIENCE + 60
#: The environment for BLAS, so that processes at the same time do not use every core each.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def why_left_out() -> str | None:
    """Why these bugs do not run here; None if they do."""
    if not cuflash.is_available():
        return "there is no CUDA device"
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return None if capability == "90" else f"this device has {capability[:-1]}.{capability[-1]}"


def run(bugs: Sequence[Bug], jobs: int, folder: Path) -> bool:
    """Judge bugs and record the killed ones. True if all are killed and no sound run fails."""
    reason = why_left_out()
    if reason is not None:
        print(f"left out: {len(bugs)} bugs of fa3 need compute capability 9.0, {reason}")
        return True
    with ThreadPoolExecutor(jobs) as pool:
        lists = sorted({bug.test for bug in bugs})
        sound = list(pool.map(_without_a_bug, lists))
        if not all(sound):
            return False
        killed = {}
        for bug, (dead, by) in zip(bugs, pool.map(judge, bugs), strict=True):
            print(f"{'killed  ' if dead else 'SURVIVED'} {bug.name}: {by}", flush=True)
            if dead:
                killed[bug.name] = by
    for name, path in HOPPER_RECORDS.items():
        of_pass = [bug for bug in bugs if pass_of(bug) == name]
        if of_pass:
            _write(folder / path.name, name, of_pass, killed)
    return len(killed) == len(bugs)


def pass_of(bug: Bug) -> str:
    """The pass whose kernel kills a bug."""
    return "backward" if LISTS[bug.test].backward else "forward"


def digest_of(name: str) -> str:
    """Digest of the code of a pass, and of the files that have its bugs."""
    from .bugs import HOPPER_BUGS

    return hopper_digest(name, {bug.file for bug in HOPPER_BUGS if pass_of(bug) == name})


def digest_of_both() -> str:
    """Digest of the code of both passes, and of the emulator that runs it."""
    return " ".join((*map(digest_of, HOPPER_RECORDS), emulator_digest()))


def judge(bug: Bug) -> tuple[bool, str]:
    """Whether the bug is killed, and by what."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        plant(bug, tree)
        code, output = _process(tree, bug.test)
    said = re.sub(r"/\S*/", "", output.splitlines()[-1]) if output else ""
    if code == End.RIGHT:
        return False, "survived"
    if code in (End.WRONG, End.ENDLESS):
        return True, said
    if code is None and BUILT in output:
        return True, f"its process did not end in {SECONDS:.0f} s"
    return False, f"exit {code}: {output[-600:]}"


def _without_a_bug(name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        code, output = _process(copy_tree(Path(folder)), name)
    print(f"without a bug, {name}: exit {code}", flush=True)
    if code != End.RIGHT:
        print(output[-3000:])
    return code == End.RIGHT


def _process(tree: Path, name: str) -> tuple[int | None, str]:
    """Exit code and output of a run in a copy of the tree; no code if it did not end."""
    command = [sys.executable, "-m", "tests.mutants.hopper_run", name]
    output = tree / "output.txt"
    with output.open("w") as file:
        environment = {**environment_of(tree), **ONE_THREAD}
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        code: int | None = None
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
                process.wait(10)
    return code, output.read_text()


def _write(path: Path, name: str, bugs: Sequence[Bug], killed: dict[str, str]) -> None:
    """Add the killed bugs to the record of a pass, which keeps the other bugs."""
    import cupy

    from .bugs import HOPPER_BUGS

    seen = {
        "ran_on": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "code": digest_of(name),
    }
    ran = {bug.name for bug in bugs}
    every = {bug.name for bug in HOPPER_BUGS if pass_of(bug) == name}
    store(path, seen, ran, {bug: by for bug, by in killed.items() if bug in ran}, every)
