"""The emulator itself: barriers, copies and products that are used as no GPU allows abort."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from .build import HERE, UNHARDENED, compiler

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
    # Barriers with phases: one arrival of each warp.
    "a_phase_ends": ("begin(2); if (lane == 0) mbarrier_arrive(0); mbarrier_wait(0, 0);", ""),
    "the_phase_before_the_first_has_ended": ("begin(2); mbarrier_wait(0, 1);", ""),
    "bytes_are_waited_for": ("begin(1); if (one) copy(); mbarrier_wait(0, 0); read();", ""),
    "bytes_that_never_come": (
        "begin(1); if (one) mbarrier_arrive_expecting(0, 32); mbarrier_wait(0, 0);",
        "some threads never reach",
    ),
    "an_arrival_is_missing": ("begin(3); mbarrier_wait(0, 0);", "some threads never reach"),
    "a_copy_is_not_waited_for": ("begin(1); if (one) copy();", "copies that nobody waits for"),
    "no_barrier": ("mbarrier_wait(0, 0);", "not initialised"),
    "twice_a_barrier": ("begin(1); begin(1);", "initialised twice"),
    # Products of a warpgroup, and stores of the copy engine.
    "an_operand_changes": ("multiply(true, true);", "an operand that changes"),
    "a_product_is_waited_for": ("multiply(false, true);", ""),
    "a_product_is_not_waited_for": ("multiply(false, false);", "products that nobody waits for"),
    "a_store_is_not_waited_for": ("store();", "stores of the copy engine"),
}


_PROGRAM = """\
#include "ptx/barrier_arrive.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
using namespace cuflash::ptx;
alignas(1024) unsigned char shared[4096];
alignas(16) unsigned char memory[16] = {{1}};
bool one_thread() {{ return threadIdx.x == 0; }}
void begin(int arrivals) {{
  if (one_thread()) mbarrier_init(0, arrivals);
  __syncthreads();
}}
void copy() {{
  mbarrier_arrive_expecting(0, 16);
  bulk_load(64, memory, 16, 0);
}}
void read() {{
  if (shared[64] != 1) emulated::fail("not there");
}}
void store() {{
  bulk_store(memory, 64, 16);
  bulk_commit();
}}
void multiply(bool changes, bool waits) {{
  std::memset(shared, 0, sizeof shared);
  __syncthreads();
  float d[1][2][2] = {{}};
  unsigned a[4] = {{}};
  wgmma<false>(__half{{}}, d, a, 1ull << 62 | 64ull << 32);
  wgmma_commit();
  if (changes) a[0] = 1;
  if (waits) wgmma_wait<0>();
}}
int main(int, char** arguments) {{
  const int which = std::atoi(arguments[1]);
  emulated::launch(4, 64, sizeof shared, shared, {{}}, [=] {{
    const bool first = threadIdx.x < 32, one = one_thread();
    const int lane = emulated::lane();
    switch (which) {{
      {cases}
    }}
  }});
}}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It takes the number of a use."""
    folder = tmp_path_factory.mktemp("barriers")
    cases = "".join(f"case {i}: {body} break;\n" for i, (body, _) in enumerate(_USES.values()))
    text = _PROGRAM.format(cases=cases)
    (folder / "uses.cpp").write_text(text)
    command = ["g++", "-std=c++20", UNHARDENED, f"-I{HERE}", "uses.cpp", "-o", "uses"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "uses"


@pytest.mark.parametrize("use", list(_USES))
def test_a_use(program: Path, use: str) -> None:
    which = str(list(_USES).index(use))
    done = subprocess.run([program, which], capture_output=True, text=True)
    said = _USES[use][1]
    assert done.returncode == (-signal.SIGABRT if said else 0), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
