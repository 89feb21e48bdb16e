"""The emulator itself aborts at uses of barriers, copies and products that no GPU allows."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from .build import HERE, UNHARDENED, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Code that the 64 threads of a block run, by name, and the error; empty if the code is right.
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
    "a_product_is_waited_for": ("multiply(); wgmma_wait<0>();", ""),
    "a_product_is_not_waited_for": ("multiply();", "products that nobody waits for"),
    "an_operand_changes": ("multiply(); a[0] = 1; wgmma_wait<0>();", "an operand that changes"),
    "sums_change": ("multiply(); d[0][1][1] = 1; wgmma_wait<0>();", "sums that change"),
    "sums_of_two_products": ("multiply(); multiply(); wgmma_wait<0>(); is(0);", ""),
    "sums_change_once_they_are_there": (
        "multiply(); wgmma_wait<0>(); d[0][0][0] = 1; multiply(); wgmma_wait<0>(); is(1);",
        "",
    ),
    "registers_are_not_fenced": ("add(); wgmma_commit(); wgmma_wait<0>();", "without a fence"),
    "a_fence_is_of_one_group": ("multiply(); add(); wgmma_wait<0>();", "without a fence"),
    "one_warp_multiplies": (
        "if (first) { multiply(); wgmma_wait<0>(); }",
        "a part of a warpgroup",
    ),
    "warps_multiply_in_another_order": (
        "wgmma_fence(); add(first ? 0 : 64); add(first ? 64 : 0); wgmma_commit(); wgmma_wait<0>();",
        "a part of a warpgroup",
    ),
    "a_store_is_not_waited_for": ("store();", "stores of the copy engine"),
    # Writes of threads, and which of them copies and products see.
    "a_thread_writes_for_a_product": (
        "write(); fence_async_shared(); __syncthreads(); multiply(); wgmma_wait<0>(); is(0);",
        "",
    ),
    "a_product_without_a_fence": (
        "write(); __syncthreads(); multiply(); wgmma_wait<0>(); is(0);",
        "another sum",
    ),
    "a_product_that_nobody_looks_at": (
        "write(); __syncthreads(); multiply(); wgmma_wait<0>();",
        "",
    ),
    "the_fence_of_another_thread": (
        "if (!one) write(); if (one) fence_async_shared(); __syncthreads();"
        "multiply(); wgmma_wait<0>(); is(0);",
        "another sum",
    ),
    "a_fence_before_it_is_written": (
        "fence_async_shared(); write(); __syncthreads(); multiply(); wgmma_wait<0>(); is(0);",
        "another sum",
    ),
    "a_store_of_what_is_fenced": (
        "if (one) { write(); fence_async_shared(); store(); bulk_wait(); }",
        "",
    ),
    "a_store_without_a_fence": ("if (one) { write(); store(); bulk_wait(); }", "behind it"),
    "a_copy_over_what_is_not_fenced": (
        "begin(1); if (one) { write(); copy(); } mbarrier_wait(0, 0);",
        "behind it",
    ),
    "a_turn_behind_a_fence": (
        "if (one) { store(); bulk_wait(); fence_async_global(); pass_turn(&counter); }",
        "",
    ),
    "a_turn_without_a_fence": (
        "if (one) { store(); bulk_wait(); pass_turn(&counter); }",
        "stores of the copy engine without a fence",
    ),
    "a_fence_before_stores_are_done": (
        "if (one) { store(); fence_async_global(); bulk_wait(); }",
        "a fence behind stores that are under way",
    ),
}


_PROGRAM = """\
#include "ptx/barrier_arrive.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/turn.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler.hpp"
using namespace cuflash::ptx;
alignas(1024) unsigned char shared[4096];
alignas(16) unsigned char memory[16] = {{1}};
constexpr unsigned kPlace = 1024;  // of what is copied or multiplied
bool one_thread() {{ return threadIdx.x == 0; }}
void begin(int arrivals) {{
  if (one_thread()) mbarrier_init(0, arrivals);
  __syncthreads();
}}
void copy() {{
  mbarrier_arrive_expecting(0, 16);
  bulk_load(kPlace, memory, 16, 0);
}}
void read() {{
  if (shared[kPlace] != 1) emulated::fail("not there");
}}
void store() {{
  bulk_store(memory, kPlace, 16);
  bulk_commit();
}}
// By a thread, some of a matrix.
void write() {{
  *reinterpret_cast<uint4*>(shared + kPlace + threadIdx.x % 2 * 16) = make_uint4(0, 0, 0, 0);
}}
// A thread's part of a product with what shared memory holds, zeros here.
struct Product {{
  float d[1][2][2] = {{}};
  unsigned a[4] = {{}};

  void add(unsigned row = 0) {{
    wgmma<false>(__half{{}}, d, a, 1ull << 62 | 64ull << 32 | (kPlace + row) / 16);
  }}
  void multiply() {{
    wgmma_fence();
    add();
    wgmma_commit();
  }}
  void is(float sum) const {{
    if (d[0][0][0] != sum) emulated::fail("another sum");
  }}
}};
int main(int, char** arguments) {{
  const int which = std::atoi(arguments[1]);
  emulated::launch(4, 64, sizeof shared, shared, {{true, false}}, [=] {{
    static int counter = 0;
    Product product;
    auto& [d, a] = product;
    const auto add = [&](unsigned row = 0) {{ product.add(row); }};
    const auto multiply = [&] {{ product.multiply(); }};
    const auto is = [&](float sum) {{ product.is(sum); }};
    std::memset(shared, 0, sizeof shared);
    __syncthreads();
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
    """A program that runs the use with the given number."""
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
