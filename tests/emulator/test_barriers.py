"""The emulator itself: barriers that are used as no GPU allows abort."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from .build import HERE, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: What the 64 threads of a block do, by name, and what is said of it: nothing if it is right.
_USES = {
    "all_meet": ("named_barrier(1, 64);", ""),
    "one_warp_alone": ("if (first) named_barrier(1, 32);", ""),
    "one_arrives": ("if (first) named_barrier_arrive(1, 64); else named_barrier(1, 64);", ""),
    "another_number_once_it_has_opened": (
        "named_barrier(1, 64); if (first) named_barrier(1, 32);",
        "",
    ),
    "two_numbers": ("named_barrier(1, first ? 64 : 96);", "different numbers of threads"),
    "two_numbers_the_last_of_which_fits": (
        "named_barrier(1, first ? 96 : 64);",
        "different numbers of threads",
    ),
    "arrivals_of_another_number": (
        "if (first) named_barrier_arrive(1, 96); else named_barrier(1, 64);",
        "different numbers of threads",
    ),
    "arrivals_alone": ("if (first) named_barrier_arrive(3, 64);", "left half full"),
    "an_arrival_too_many": (
        "if (first) { named_barrier_arrive(1, 64); named_barrier_arrive(1, 64); }"
        "else named_barrier(1, 64);",
        "left half full",
    ),
    "nobody_else_comes": ("if (first) named_barrier(1, 64);", "some threads never reach"),
    "parts_of_warps": ("named_barrier(1, 40);", "parts of warps"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It takes the number of a use."""
    folder = tmp_path_factory.mktemp("barriers")
    cases = "".join(f"case {i}: {body} break;\n" for i, (body, _) in enumerate(_USES.values()))
    text = f"""
        #include "ptx/barrier_arrive.cuh"
        #include "ptx/barrier.cuh"
        using namespace cuflash::ptx;
        alignas(128) unsigned char shared[128];
        int main(int, char** arguments) {{
          const int which = std::atoi(arguments[1]);
          emulated::launch(4, 64, sizeof shared, shared, [=] {{
            const bool first = threadIdx.x < 32;
            switch (which) {{
              {cases}
            }}
          }});
        }}
    """
    (folder / "uses.cpp").write_text(text)
    command = ["g++", "-std=c++20", f"-I{HERE}", "uses.cpp", "-o", "uses"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "uses"


@pytest.mark.parametrize("use", list(_USES))
def test_named_barriers(program: Path, use: str) -> None:
    which = str(list(_USES).index(use))
    done = subprocess.run([program, which], capture_output=True, text=True)
    said = _USES[use][1]
    assert done.returncode == (-signal.SIGABRT if said else 0), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
