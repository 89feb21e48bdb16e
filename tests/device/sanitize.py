"""compute-sanitizer over small problems of every algorithm, dtype and feature, in both passes.

``python -m tests.device.sanitize`` runs memcheck, racecheck, synccheck and initcheck in parallel
processes, without CuPy's pool, so that every array is an allocation. It exits 1 if a tool finds
anything that ``racecheck`` does not list as harmless. The tools run this program with ``--inside``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any
from unittest import mock

from . import racecheck
from .sanitized_features import SANITIZED_FEATURES, one_feature

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ALGORITHMS = ("fa1", "fa2", "fa3")
#: Dtypes of the problems below, and features, each with one problem.
KINDS = ("float16", "bfloat16", "float32", "float64", *SANITIZED_FEATURES)

#: The most reports that a tool prints; racecheck prints all, because each is examined.
_PRINTED = {tool: "1000000" if tool == "racecheck" else "5" for tool in TOOLS}
#: The tool's exit status if it finds something.
_FOUND = 9
#: The last line of the program.
_ENDED = r"^\d+ problems?$"

#: (batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, head_dim_v, causal): full and
#: causal, tails on both sides, grouped heads, dead rows, rows that are not whole 16 bytes, and
#: enough heads for the tiles of a full device.
PROBLEMS = (
    (1, 70, 200, 2, 1, 64, 64, False),
    (1, 150, 90, 1, 1, 64, 64, True),
    (1, 40, 600, 2, 2, 16, 16, True),
    (1, 33, 47, 1, 1, 5, 13, True),
    (1, 50, 130, 1, 1, 128, 96, False),
    (72, 100, 70, 4, 2, 64, 64, True),
)
#: More problems for FlashAttention-3: several q tiles of every head, so that blocks draw more than
#: one, and heads so wide that warpgroups share the keys of the backward pass.
MORE_OF_FA3 = ((6, 700, 300, 8, 2, 128, 128, True), (2, 300, 150, 4, 2, 256, 192, True))
#: More problems for FlashAttention-2: pairs of warps, and K and V in one stage.
MORE_OF_FA2 = (
    (6, 290, 1100, 12, 6, 256, 256, True),
    (6, 290, 1100, 12, 6, 256, 64, False),
    (6, 290, 150, 12, 6, 192, 192, True),
    (6, 290, 150, 12, 6, 256, 256, False),
)


def inside(algorithm: str, dtype: str) -> None:
    """Run every problem with line information in the kernels, whose machine code is the same."""
    from cuflash.cuda import compile as compiling

    plain = compiling.compile_options

    def with_lines(*given: Any) -> tuple[str, ...]:
        return (*plain(*given), "-lineinfo")

    with mock.patch.object(compiling, "compile_options", with_lines):
        _every_problem(algorithm, dtype)


def _every_problem(algorithm: str, dtype: str) -> None:
    """Run both passes of every problem and read every result back."""
    import cupy
    import ml_dtypes
    import numpy as np

    import cuflash

    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    if dtype in SANITIZED_FEATURES:
        one_feature(cupy, algorithm, dtype)
        print("1 problem", flush=True)
        return
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    call: dict[str, Any] = {"algorithm": algorithm}

    def normal(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape).astype(np.float32).astype(kind))

    problems = PROBLEMS
    if algorithm == "fa3":
        problems = (*(sizes for sizes in PROBLEMS if sizes[5] % 8 == 0), *MORE_OF_FA3)
    if algorithm == "fa2" and dtype in ("float16", "bfloat16"):
        problems = (*PROBLEMS, *MORE_OF_FA2)
    for batch, sq, sk, hq, hk, d, dv, causal in problems:
        call["causal"] = causal
        qkv = normal(batch, sq, hq, d), normal(batch, sk, hk, d), normal(batch, sk, hk, dv)
        out, lse = cuflash.attention(*qkv, return_lse=True, **call)
        results = [out, lse]
        for deterministic in {False, algorithm != "fa1"}:
            results += cuflash.attention_backward(
                out, *qkv, out, lse, deterministic=deterministic, **call
            )
        cupy.cuda.Device().synchronize()
        for array in results:
            array.get()
    print(f"{len(problems)} problems", flush=True)


def check(tool: str, algorithm: str, dtype: str) -> bool:
    """Run one tool on one kind of problems and print the result; return whether it found
    nothing."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    done = subprocess.run(
        [*command, "--print-limit", _PRINTED[tool], *_program(algorithm, dtype)],
        capture_output=True,
        text=True,
        check=False,
    )
    clean, found = judge(tool, done.returncode, done.stdout)
    print(f"{tool} {algorithm} {dtype}: exit {done.returncode}; {found}", flush=True)
    return clean


def judge(tool: str, status: int, output: str) -> tuple[bool, str]:
    """Whether a tool found nothing, and the text about it."""
    lines = " ".join(line for line in output.splitlines() if "SUMMARY" in line)
    if status == 0:
        return True, lines
    if tool != "racecheck" or status != _FOUND or not re.search(_ENDED, output, re.MULTILINE):
        return False, output[-3000:]
    verdict = racecheck.judge(output)
    if not verdict.known and not verdict.faults:
        return False, output[-3000:]
    aside = f"{verdict.known} known races set aside"
    return not verdict.faults, "\n".join([f"{lines}; {aside}", *verdict.faults[:20]])


def served(algorithm: str, dtype: str) -> bool:
    """Whether this device can run the kernels; prints a line if not."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    if algorithm == "fa3" and capability != "90":
        print(f"fa3 {dtype}: left out, it is for compute capability 9.0, this is {capability}")
        return False
    return algorithm != "fa3" or dtype in ("float16", "bfloat16", *SANITIZED_FEATURES)


def _program(algorithm: str, dtype: str) -> tuple[str, ...]:
    """The program that runs under a tool."""
    return (sys.executable, "-m", "tests.device.sanitize", "--inside", algorithm, dtype)


def main() -> int:
    """Run every tool and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--inside", nargs=2, metavar=("ALGORITHM", "KIND"))
    arguments = parser.parse_args()
    if arguments.inside:
        inside(*arguments.inside)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not installed")
        return 2
    kinds = [kind for kind in product(arguments.algorithms, arguments.kinds) if served(*kind)]
    with ThreadPoolExecutor() as pool:  # compile first: under a tool it takes long
        list(pool.map(lambda kind: subprocess.run(_program(*kind), check=True), kinds))
        clean = list(pool.map(lambda run: check(run[0], *run[1]), product(arguments.tools, kinds)))
    return 0 if all(clean) else 1


if __name__ == "__main__":
    raise SystemExit(main())
