"""The text of the wgmma functions matches their writer's, and every tile has one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from cuflash.planning.tiles.fa3_tables import BACKWARD, BUCKETS, FORWARD


@pytest.fixture(scope="module")
def writer(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_wgmma", root / "tools" / "write_wgmma.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_is_what_is_there(
    writer: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = root / "cuda_src" / "ptx" / "wgmma"
    assert there == writer.FOLDER
    monkeypatch.setattr(writer, "FOLDER", tmp_path / "wgmma")
    writer.main()
    written = {path.name: path.read_text("utf-8") for path in (tmp_path / "wgmma").iterdir()}
    assert written == {path.name: path.read_text("utf-8") for path in there.iterdir()}
    assert len(written) == len(writer.WIDTHS)


def test_every_tile_has_its_products(writer: ModuleType) -> None:
    """Scores have the columns of a block of keys, and the output has the columns of v.

    In a backward pass, scores have the columns of a block of queries, and a warpgroup may have half
    of the columns of dq.
    """
    halves = {row.widest // 2 for row in BACKWARD if row.block_q < row.block_kv}
    assert halves - set(BUCKETS)  # some halves are no width of a bucket
    blocks = {row.block_kv for row in FORWARD} | {row.block_q for row in BACKWARD}
    assert {*BUCKETS, *blocks, *halves} == set(writer.WIDTHS)


def test_every_operand_has_its_place(writer: ModuleType) -> None:
    """The operands are accumulators, a, b and flags, in this order; the text uses each of them."""
    for width in writer.WIDTHS:
        functions = re.split(r"(?=\ntemplate)", writer.text(width))[1:]
        assert len(functions) == 4
        for function in functions:
            count = width // 2
            assert function.count('"+f"') == count
            operands = count + len(re.findall(r'"[lrn]"\(', function))
            named = {int(number) for number in re.findall(r"%(\d+)", function)}
            assert named == set(range(operands))
            elements = re.findall(r"\(d\[(\d+)\]\[(\d)\]\[(\d)\]\)", function)
            assert len(set(elements)) == count
            assert elements == sorted(elements, key=lambda e: tuple(map(int, e)))
            assert f"float (&d)[{width // 8}][2][2]" in function
            assert f"m64n{width}k16.f32." in function
