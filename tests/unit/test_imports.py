"""Calls flow one way: a module imports only modules above it in ``ORDER``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .import_order import APPLICATIONS, ORDER

#: Packages whose __init__ holds no code.
PACKAGES = ("planning", "planning.tiles", "cuda", "arrays", "features", "caches")


def _modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def _imported(name: str, path: Path, known: set[str]) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    here = [part for part in here if part]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("cuflash")}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            if (node.module or "").split(".")[0] == "cuflash":
                found.add(node.module or "")
            continue
        base = here[: len(here) - (node.level - 1)] + (node.module or "").split(".")
        module = ".".join(part for part in base if part)
        for alias in node.names:
            deeper = f"{module}.{alias.name}".lstrip(".")
            found.add(deeper if deeper in known else module)
    return found


@pytest.fixture(scope="module")
def modules(root: Path) -> dict[str, Path]:
    return _modules(root / "cuflash")


def test_every_module_has_its_place(modules: dict[str, Path]) -> None:
    placed = {*ORDER, *PACKAGES, "", "reference"}
    others = {m for m in modules if m not in placed and m.split(".")[0] not in APPLICATIONS}
    assert not others, f"give these a place in the order: {others}"
    assert placed <= set(modules), f"not there: {placed - set(modules)}"


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_above(name: str, modules: dict[str, Path]) -> None:
    above = {*ORDER[: ORDER.index(name)], *PACKAGES}
    imported = _imported(name, modules[name], set(modules))
    assert imported <= above, f"{name} imports {imported - above}"


def test_the_reference_stands_alone(modules: dict[str, Path]) -> None:
    assert _imported("reference", modules["reference"], set(modules)) == {
        "reference_caches",
        "reference_checks",
        "reference_heads",
        "reference_packed",
        "reference_scores",
    }
    users = {
        name for name, path in modules.items() if "reference" in _imported(name, path, set(modules))
    }
    # The package exports the reference, and the demo checks its gradients with it.
    assert {user.split(".")[0] for user in users} <= {"", "demo"}
    for part in ("reference_caches", "reference_checks", "reference_heads", "reference_packed"):
        users = {n for n, p in modules.items() if part in _imported(n, p, set(modules))}
        assert users == {"reference"}, part
    for part, user in (("dropout", "heads"), ("packed_caches", "caches")):
        whole = f"reference_{part}"
        users = {n for n, p in modules.items() if whole in _imported(n, p, set(modules))}
        assert users == {f"reference_{user}"}


def test_nothing_imports_the_applications(modules: dict[str, Path]) -> None:
    for name in (*ORDER, "", "reference"):
        roots = {m.split(".")[0] for m in _imported(name, modules[name], set(modules))}
        assert not roots & set(APPLICATIONS), name


def test_empty_packages_hold_no_code(modules: dict[str, Path]) -> None:
    for name in PACKAGES:
        body = ast.parse(modules[name].read_text("utf-8")).body
        assert len(body) == 1, name
        assert isinstance(body[0], ast.Expr), name
