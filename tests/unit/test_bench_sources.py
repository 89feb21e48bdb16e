"""A stored row is current while the sources of all kernels that it timed are unchanged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import sources
from bench.cases import Case, select
from bench.inputs import make_inputs
from bench.sources import (
    FEATURE_HEADERS,
    KERNELS,
    KERNELS_OF_LENGTHS,
    SAME_CODE,
    digest,
    features_of,
    is_current,
    kernels_of,
)
from bench.stored import gpu_files, load
from cuflash.cuda.source import find_sources
from cuflash.features.table import FEATURES, with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS


@pytest.mark.parametrize("which", KERNELS)
def test_the_digest_is_of_every_kernel_of_the_plan(which: tuple[str, str]) -> None:
    """Also of the plans of few queries and of short heads."""
    found = set()
    for heads_kv, keys in ((1, 64), (16, 64), *[(16, 4096)] * (which[1] == "backward")):
        sizes = 1, 16, heads_kv, 64, keys, 64, 64
        wanted = AttentionProblem(which[1], *sizes, "float16", "float16", "full", 1.0, 0)
        wanted = replace(wanted, alignment="tensor_map")
        launches = plan(wanted, LIMITS["90"], algorithm=which[0]).launches
        found |= {(x.config.generation, x.config.kernel) for x in launches}
    assert found == {*KERNELS[which], *KERNELS_OF_LENGTHS.get(which, ())}


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize(
    "extra",
    [
        {"softcap": 1.0},
        {"alibi": True},
        {"bias": True},
        {"bias": True, "dbias": True},
        {"mask": "blocks"},
        {"mask": "padding"},
    ],
)
def test_the_digest_is_of_every_file_that_a_feature_brings(
    which: tuple[str, str], extra: dict[str, Any]
) -> None:
    algorithm, op = which
    if op == "forward" and "dbias" in extra:
        return
    case = Case(op, "bfloat16", 1, 16, 1, 64, 64, 64, 64, False, algorithm, **extra)
    launches = _launches(case)
    kernels = {(launch.config.generation, launch.config.kernel) for launch in launches}
    added = [kernels_of(feature, algorithm, op) for feature in case.features]
    assert kernels == {*KERNELS[which], *(kernel for some in added for kernel in some)}
    parts = [feature.device for launch in launches for feature in launch.config.features]
    headers = [FEATURES[f].device for f in case.features if f in FEATURES]
    counted = {part.header for part in headers if part is not None}
    for feature in case.features:
        counted.update(FEATURE_HEADERS.get((feature, algorithm), ()))
    assert {part.header for part in parts} <= counted


def _launches(case: Case) -> list[Any]:
    """The launches of the plan for a case, with the limits of sm_90 and without a device."""
    inputs = make_inputs(case, np)
    operands = {
        name: Operand(name, array.dtype.name, array.shape)
        for name, array in inputs.features(case).items()
    }
    shape = case.batch, case.heads_q, case.heads_kv, case.seqlen_q, case.seqlen_kv
    problem = AttentionProblem(
        case.op, *shape, case.head_dim, case.head_dim, case.dtype, case.dtype, "full", 1.0, 0
    )
    problem = replace(problem, alignment="tensor_map", wrt=("q", "k", "v", *case.gradients))
    keywords = {} if case.softcap is None else {"softcap": case.softcap}
    problem = with_features(problem, keywords, operands)
    return list(plan(problem, LIMITS["90"], algorithm=case.algorithm).launches)


def test_digests_differ() -> None:
    every = [*KERNELS, *((name, "forward and backward") for name in ("fa1", "fa2", "fa3"))]
    assert len({digest(find_sources(), *which) for which in every}) == len(every)


def test_a_comment_changes_no_digest_and_a_number_does(tmp_path: Path) -> None:
    root = tmp_path / "cuda_src"
    shutil.copytree(find_sources(), root)
    mask = root / "tile" / "mask.cuh"
    before = {which: digest(root, *which) for which in KERNELS}
    mask.write_text("// Another word.\n" + mask.read_text().replace("\n\n", "\n/* and\n one */\n"))
    assert {which: digest(root, *which) for which in KERNELS} == before
    mask.write_text(mask.read_text().replace("q_last + 1", "q_last + 2"))
    after = {which: digest(root, *which) for which in KERNELS}
    of_masks = {which for which in KERNELS if which[0] != "steps"}
    assert {which for which in KERNELS if after[which] != before[which]} == of_masks


def test_a_feature_counts_where_a_row_has_it(tmp_path: Path) -> None:
    root = tmp_path / "cuda_src"
    shutil.copytree(find_sources(), root)
    plain, windowed = ({"options": {}}, {"options": {"window_size": [3, 0]}})
    rows = [
        {**row, "sources": digest(root, "fa3", "forward", features_of(row))}
        for row in (plain, windowed)
    ]
    assert [features_of(row) for row in rows] == [(), ("window",)]
    assert [is_current(root, "fa3", "forward", row) for row in rows] == [True, True]
    header = root / "features" / "window.cuh"
    header.write_text(header.read_text().replace("window.first", "window.first + 1"))
    assert [is_current(root, "fa3", "forward", row) for row in rows] == [True, False]


def test_rows_say_the_features_of_their_cases() -> None:
    for case in select("windows,sinks,softcap,alibi,bias-backward,mask,features-elsewhere"):
        assert features_of({"options": json.loads(json.dumps(case.options))}) == case.features


def test_a_row_of_other_sources_is_current_where_the_machine_code_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = find_sources()
    now = digest(root, "fa3", "backward")
    row = {"sources": "of then", "dtype": "float16", "heads_kv": 2}
    same = {"algorithm": "fa3", "op": "backward", "of": "of then", "as": now}
    only = {"only": {"dtype": "float16"}, "but": {"heads_kv": 1}}

    def says(**changed: object) -> bool:
        sources._same_code.cache_clear()
        path = tmp_path / "same_code.json"
        path.write_text(json.dumps([{**same, **only, **changed}]))
        monkeypatch.setattr(sources, "SAME_CODE", path)
        return is_current(root, "fa3", "backward", row)

    assert says()
    assert not says(of="something else")
    assert not says(**{"as": "what came before"})  # the sources changed after that entry
    assert not says(op="forward")
    assert not says(algorithm="fa2")
    assert not says(only={"dtype": "bfloat16"})
    assert not says(but={"heads_kv": 2})
    assert is_current(root, "fa3", "backward", {"sources": now})
    sources._same_code.cache_clear()


def test_what_is_said_to_be_the_same_is_of_stored_rows() -> None:
    """Each entry names the sources of a stored row, and says that machine code was compared."""
    stored = {row["sources"] for path in gpu_files() for row in load(path.name)}
    for same in json.loads(SAME_CODE.read_text()):
        assert (same["algorithm"], same["op"]) in KERNELS
        assert same["of"] in stored
        assert "machine code" in same["compared"]
