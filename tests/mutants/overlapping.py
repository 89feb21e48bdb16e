"""Bugs of kernels that begin before the kernel before them has ended."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_OVERLAPPING = "cuflash/planning/overlapping.py"
_FA3 = "cuflash/planning/fa3.py"
_SOURCE = "cuflash/cuda/source.py"

_UNIT = "tests/unit/test_overlap.py::test_"
_EVERY = _UNIT + "every_kernel_of_a_plain_backward_pass_but_the_first_begins_early"
_TEXT = _UNIT + "the_text_of_a_kernel_waits_before_it_does_anything"

BUGS = (
    Bug(
        "early kernels: the first one begins before earlier work of the stream has ended",
        _OVERLAPPING,
        "    return first, *(",
        "    return replace(first, overlaps=True), *(",
        _EVERY,
    ),
    Bug(
        "early kernels: they do not wait",
        _OVERLAPPING,
        "config=replace(one.config, waits=True), overlaps=True)",
        "overlaps=True)",
        _EVERY,
    ),
    Bug(
        "early kernels: they wait and begin late",
        _OVERLAPPING,
        "waits=True), overlaps=True)",
        "waits=True))",
        _EVERY,
    ),
    Bug(
        "early kernels: those of passes with features",
        _FA3,
        "    every = every if problem.uses else overlapping(every)\n",
        "    every = overlapping(every)\n",
        _UNIT + "no_kernel_of_a_pass_with_features_begins_early",
    ),
    Bug(
        "early kernels: sums of parts begin late",
        _FA3,
        "    every = *every, *keys.after\n"
        "    every = every if problem.uses else overlapping(every)\n",
        "    every = every if problem.uses else overlapping(every)\n"
        "    every = *every, *keys.after\n",
        _EVERY,
    ),
    Bug(
        "early kernels: none for few queries",
        "cuflash/planning/fa3_few.py",
        "overlapping(rows.around(main))",
        "rows.around(main)",
        _EVERY,
    ),
    Bug(
        "early kernels: none for short heads",
        "cuflash/planning/fa3_short.py",
        "overlapping(rows.around(main))",
        "rows.around(main)",
        _EVERY,
    ),
    Bug(
        "early kernels: they wait at their end",
        _SOURCE,
        '            *["  cuflash::ptx::wait_for_kernel_before();"] * config.waits,\n'
        '            f"  cuflash::{config.generation}::{config.kernel}<Config>(params);",\n',
        '            f"  cuflash::{config.generation}::{config.kernel}<Config>(params);",\n'
        '            *["  cuflash::ptx::wait_for_kernel_before();"] * config.waits,\n',
        _TEXT,
    ),
    Bug(
        "early kernels: every kernel waits",
        _SOURCE,
        'wait_for_kernel_before();"] * config.waits,',
        'wait_for_kernel_before();"],',
        _TEXT,
    ),
    Bug(
        "early kernels: an edit of the wait is not noticed",
        _SOURCE,
        "        headers += [_WAIT] * config.waits\n",
        "",
        "tests/unit/test_source.py::test_an_edit_of_the_instruction_that_waits_changes_the_text",
    ),
)
