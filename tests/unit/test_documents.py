"""The code in README and the pages of docs runs, and their links have targets."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ..emulator.build import compiler
from .documents import ROOT, blocks, pages, read

#: Optional packages that a page may import.
OPTIONAL = ("jax", "flax", "equinox")
#: A block with one of these lines is compiled but not run.
NEEDS_A_GPU = ("import cupy", "from numba import cuda")

PAGES = [page for page in pages() if any(blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other on the CPU, and share their names."""
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    code = "\n".join(block.code for block in blocks(page))
    for name in OPTIONAL:
        if re.search(rf"^(import|from) {name}\b", code, re.MULTILINE):
            pytest.importorskip(name, reason=f"{name} is not installed")
    if "tests.emulator" in code and compiler() is None:
        pytest.skip("there is no g++ to compile with")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        compiled: Any = block.compiled()
        if block.marker is None:
            exec(compiled, names)


@pytest.mark.parametrize("page", PAGES)
def test_only_what_needs_a_gpu_is_not_run(page: str) -> None:
    text = read(page)
    assert text.count("\n```python\n") == len(list(blocks(page)))
    for block in blocks(page):
        assert block.marker in (None, "compile"), f"{page}:{block.line}"
        needs_a_gpu = any(line in block.code for line in NEEDS_A_GPU)
        assert (block.marker == "compile") == needs_a_gpu, f"{page}:{block.line}"


def test_there_is_code_to_run() -> None:
    assert {"README.md", "docs/guide/jax.md", "docs/coming-from.md"} <= set(PAGES)
    assert sum(block.marker is None for page in PAGES for block in blocks(page)) > 30


_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def _anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub name them."""
    headings = re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", one) for one in words}


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    """The links of README are checked too, although it is not a page of the site."""
    folder = (ROOT / page).parent
    for link in _LINK.findall(re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in _anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}"


def test_readme_is_a_page_that_one_reads() -> None:
    assert len(read("README.md").splitlines()) <= 160


def test_the_page_of_examples_shows_every_program() -> None:
    programs = {path.name for path in (ROOT / "examples").glob("*.py")}
    for page in ("docs/examples.md", "examples/README.md"):
        assert {name for name in programs if name in read(page)} == programs, page
    shown = re.findall(r'^--8<-- "examples/(.+)"$', read("docs/examples.md"), re.MULTILINE)
    assert sorted(shown) == sorted(programs)
