"""The compiled text: its digest, its constants, and the place of the sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuflash.cuda import source
from cuflash.cuda.parameters import PARAMETERS
from cuflash.errors import ToolchainError, UnsupportedError
from cuflash.features.table import FEATURES
from cuflash.planning.kernel import CompiledFeature, KernelConfig
from cuflash.planning.plan import plan

from ..architectures import LIMITS
from .test_plan import PLAIN


@pytest.fixture
def sources(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "cuda_src", tmp_path / "cuda_src"))


@pytest.fixture(params=["fa1", "fa2", "fa3"])
def config(request: pytest.FixtureRequest) -> KernelConfig:
    wanted = replace(PLAIN, alignment="tensor_map")
    return plan(wanted, LIMITS["90"], algorithm=request.param).launches[0].config


def test_an_edit_anywhere_in_the_closure_changes_the_text(
    sources: Path, config: KernelConfig
) -> None:
    before = source.translation_unit(config, sources)
    for path in source.include_closure(sources, sources / config.generation / "forward.cu"):
        text = path.read_text()
        path.write_text(text + "\n// edited\n")
        assert source.translation_unit(config, sources) != before, path
        path.write_text(text)
    assert source.translation_unit(config, sources) == before


def test_an_edit_of_the_instruction_that_waits_changes_the_text(
    sources: Path, config: KernelConfig
) -> None:
    waiting = replace(config, waits=True)
    before = source.translation_unit(waiting, sources)
    found = source.Sources(sources)
    found.digest_of(waiting)
    header = sources / "ptx" / "dependent_launch.cuh"
    header.write_text(header.read_text() + "// edited\n")
    assert found.changed()
    assert source.translation_unit(waiting, sources) != before


def test_an_edit_elsewhere_changes_nothing(sources: Path, config: KernelConfig) -> None:
    before = source.translation_unit(config, sources)
    (sources / config.generation / "backward.cu").write_text("// nothing left\n")
    assert source.translation_unit(config, sources) == before


def test_an_edit_with_an_older_time_is_noticed(sources: Path) -> None:
    before = source.source_digest(sources, "fa1", "forward")
    kernel = sources / "fa1" / "forward.cu"
    kernel.write_text(kernel.read_text() + "// edited\n")
    os.utime(kernel, ns=(0, 0))
    assert source.source_digest(sources, "fa1", "forward") != before


def test_a_deleted_header_is_noticed(sources: Path) -> None:
    source.source_digest(sources, "fa1", "forward")
    closure = source.include_closure(sources, sources / "fa1" / "forward.cu")
    oldest = min(closure, key=lambda path: path.stat().st_mtime_ns)
    oldest.unlink()
    with pytest.raises(FileNotFoundError):
        source.source_digest(sources, "fa1", "forward")


def test_a_header_that_comes_back_is_noticed(sources: Path) -> None:
    before = source.source_digest(sources, "fa1", "forward")
    header = sources / "tile" / "mask.cuh"
    text = header.read_text()
    header.unlink()
    with pytest.raises(FileNotFoundError):
        source.source_digest(sources, "fa1", "forward")
    header.write_text(f'#include "more.cuh"\n{text}')
    (sources / "tile" / "more.cuh").write_text("")
    assert source.source_digest(sources, "fa1", "forward") != before


def test_the_digest_is_of_the_names_and_texts_of_the_closure(sources: Path) -> None:
    """Stored results and CuPy's cache identify the sources by this digest."""
    for generation, kernel in PARAMETERS:
        digest = hashlib.sha256()
        paths = source.include_closure(sources, sources / generation / f"{kernel}.cu")
        names = sorted(path.relative_to(sources.resolve()).as_posix() for path in paths)
        for name in names:
            digest.update(name.encode() + b"\0" + (sources / name).read_bytes() + b"\0")
        found = source.source_digest(sources, generation, kernel)
        assert found == digest.hexdigest()[:16]


def test_a_link_to_the_sources_is_the_sources(sources: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(sources)
    ours, same = (source.source_digest(x, "fa3", "backward") for x in (sources, link))
    assert ours == same
    closures = [source.include_closure(x, x / "fa3" / "backward.cu") for x in (sources, link)]
    assert closures[0] == closures[1]


def test_kernels_of_a_plan_look_at_every_file_once(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = os.stat

    def look(path: str) -> os.stat_result:
        seen.append(path)
        return real(path)

    monkeypatch.setattr(os, "stat", look)
    found = source.Sources(sources)
    digests = [found.digest(*kernel) for kernel in PARAMETERS]
    monkeypatch.undo()
    assert len(seen) == len(set(seen)) > len(PARAMETERS)
    assert digests == [source.source_digest(sources, *kernel) for kernel in PARAMETERS]


def test_a_file_is_read_again_only_when_it_changed(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def count(path: str, mode: str) -> Any:
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(source, "open", count, raising=False)
    first = source.source_digest(sources, "fa2", "forward")
    assert opened
    opened.clear()
    assert source.source_digest(sources, "fa2", "forward") == first
    assert opened == []
    mask = sources / "tile" / "mask.cuh"
    mask.write_text(mask.read_text() + "// edited\n")
    assert source.source_digest(sources, "fa2", "forward") != first
    assert opened == [str(mask)]


def test_the_closure_reaches_every_header(root: Path) -> None:
    """A header that no kernel includes is dead."""
    folder = (root / "cuda_src").resolve()
    reached = {
        path
        for generation, kernel in PARAMETERS
        for path in source.include_closure(folder, folder / generation / f"{kernel}.cu")
    }
    for feature in FEATURES.values():
        if feature.device is not None:
            reached.update(source.include_closure(folder, folder / feature.device.header))
    # Headers that the table does not name: for kernels that stage or pack an array of pairs, for
    # score modifications, whose code is generated, and for what a plan or a cache adds.
    plans = "kv_chunks", "packed_group", "cached_keys", "float8", "packed_queries", "packed_tokens"
    for name in ("bias_staged", "mask_packed", "score_mod", *plans):
        reached.update(source.include_closure(folder, folder / "features" / f"{name}.cuh"))
    assert reached == set(folder.rglob("*.cu*"))


def test_the_text_holds_the_plan_and_nothing_of_the_call(config: KernelConfig, root: Path) -> None:
    text = source.translation_unit(config, root / "cuda_src")
    for name, value in config.constants:
        assert f"static constexpr int {name} = {value};" in text
    assert f"static constexpr int shared_bytes = {config.shared_bytes};" in text
    assert f"__launch_bounds__({config.threads}, {config.blocks_per_sm})" in text
    assert "1000" not in re.sub(r"//.*|static_assert.*", "", text)


def test_every_field_of_the_parameters_is_asserted(config: KernelConfig, root: Path) -> None:
    text = source.translation_unit(config, root / "cuda_src")
    struct = PARAMETERS[config.generation, "forward"]
    offsets = dict(struct.offsets())
    own = {
        "fa1": {"q.data", "row_max"},
        "fa2": {"q.data", "head_group"},
        "fa3": {"q_map.opaque", "tile_counter"},
    }[config.generation]
    assert own | {"lse.row_stride", "scale", "shape.q_offset"} <= set(offsets)
    assert text.count("static_assert(") == len(offsets) + 1


_PLAIN_SEAMS = ("FixedLengths", "ScoreChain<>", "RowChain<>")
_OF_WINDOWS = ("WindowedLengths", "ScoreChain<>", "RowChain<>")
_OF_SINKS = ("FixedLengths", "ScoreChain<>", "RowChain<cuflash::Sinks<float>>")


def _featured(config: KernelConfig, *names: str) -> KernelConfig:
    """A configuration with features of the table, sinks in float32."""
    constants = {"sinks": (("sinks_dtype", "float32"),)}
    parts = {name: feature.device for name, feature in FEATURES.items()}
    features = tuple(
        CompiledFeature(name, part, constants.get(name, ()))
        for name in names
        if (part := parts[name]) is not None
    )
    return replace(config, features=features)


@pytest.mark.parametrize(
    ("names", "types"),
    [
        ((), _PLAIN_SEAMS),
        (("window",), _OF_WINDOWS),
        (("sinks",), _OF_SINKS),
        (("window", "sinks"), (_OF_WINDOWS[0], *_OF_SINKS[1:])),
    ],
)
def test_features_name_types_of_config_and_bring_headers_and_parameters(
    config: KernelConfig, root: Path, names: tuple[str, ...], types: tuple[str, ...]
) -> None:
    text = source.translation_unit(_featured(config, *names), root / "cuda_src")
    for name, kind in zip(("Lengths", "Score", "Rows"), types, strict=True):
        assert f"using {name} = cuflash::{kind};" in text
    structs = {"window": "WindowParams", "sinks": "SinksParams"}
    for name, struct in structs.items():
        assert (f'#include "features/{name}.cuh"' in text) == (name in names)
        assert (f"  cuflash::{struct} {name};" in text) == (name in names)
    assert ("using Params = cuflash::" in text) == (not names)


def test_an_edited_header_of_a_feature_changes_the_text_of_its_kernels_alone(
    sources: Path, config: KernelConfig
) -> None:
    plain, with_sinks = config, _featured(config, "sinks")
    before = [source.translation_unit(one, sources) for one in (plain, with_sinks)]
    header = sources / "features" / "sinks.cuh"
    header.write_text(header.read_text() + "// edited\n")
    after = [source.translation_unit(one, sources) for one in (plain, with_sinks)]
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


@pytest.mark.parametrize("seam", ["Lengths", "Nothing"])
def test_what_two_features_cannot_both_be_is_refused(
    config: KernelConfig, root: Path, seam: str
) -> None:
    window = _featured(config, "window").features[0]
    other = replace(window, device=replace(window.device, seams=((seam, "Other"),)))
    with pytest.raises(UnsupportedError, match=seam):
        source.translation_unit(replace(config, features=(window, other)), root / "cuda_src")


def test_jitter_is_a_constant(config: KernelConfig, root: Path) -> None:
    """It is in the text, so that CuPy's cache on disk keeps both builds."""
    for jitter, said in ((False, "false"), (True, "true")):
        text = source.translation_unit(config, root / "cuda_src", jitter)
        assert f"static constexpr bool jitter = {said};" in text


def test_sources_are_found_beside_the_package(root: Path) -> None:
    assert source.find_sources() == root / "cuda_src"


def test_the_environment_names_another_folder(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_CUDA_SRC", str(sources))
    assert source.find_sources() == sources


def test_missing_sources_name_the_places_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_CUDA_SRC", str(tmp_path))
    with pytest.raises(ToolchainError) as caught:
        source.find_sources()
    assert str(tmp_path) in str(caught.value)
    assert "reinstall" in str(caught.value)


def test_every_ptx_wrapper_names_its_manual_section(root: Path) -> None:
    for path in (root / "cuda_src" / "ptx").glob("*.cuh"):
        if path.name != "opaque.cuh":  # no instruction
            assert "PTX ISA" in path.read_text(), path
