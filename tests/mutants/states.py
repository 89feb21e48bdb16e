"""Planted bugs in states of rows, which resumed calls merge."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_KERNEL = "cuda_src/steps/merge_states.cu"
_EMULATED = "test_resume.py::test_"
_DEAD = _EMULATED + "states_of_no_key_do_not_count"
_PARTS = _EMULATED + "three_parts[fa1-False]"
_ARGUMENTS = "tests/unit/test_resume_arguments.py::test_"


def _shown(name: str, find: str, replace: str, test: str) -> Bug:
    """A bug of the kernel that a test of the emulator kills, also where there is a GPU."""
    return Bug(name, _KERNEL, find, replace, f"tests/emulator/{test}", test)


BUGS = (
    _shown(
        "a state of no key counts what it holds",
        "before == -infinity<Compute>() ? 0 : out_before[column];",
        "out_before[column];",
        _DEAD,
    ),
    _shown(
        "two states of no key have a weight",
        "  if (before == dead && now == dead) return {0, 0, dead};\n",
        "",
        _DEAD,
    ),
    _shown(
        "states have the weights of each other",
        "return {of_before / sum, of_now / sum,",
        "return {of_now / sum, of_before / sum,",
        _PARTS,
    ),
    _shown(
        "the log-sum-exp of two states is relative to the larger one",
        "log_of(sum) + origin}",
        "log_of(sum)}",
        _PARTS,
    ),
    Bug(
        "a graph keeps nothing of a merge",
        "cuflash/states.py",
        "_kept_for_graphs.extend(a for a in given.values() if id(a) not in own)",
        "pass",
        f"tests/emulator/{_EMULATED}a_graph_runs_when_the_call_is_long_over",
    ),
    Bug(
        "a merged state stays beside its destination",
        "cuflash/states.py",
        "                fill(array, given[name])\n",
        "                pass\n",
        f"tests/emulator/{_EMULATED}arrays_of_any_strides",
    ),
    Bug(
        "a destination may overlap a state without being it",
        "cuflash/resuming.py",
        'apart[f"resume[{i}]"] = before[name]',
        "pass",
        _ARGUMENTS + "what_is_refused_before_anything_is_written",
    ),
)
