"""Calls flow one way: a module imports only modules above it in ``ORDER``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

#: The modules of the library. Each imports only modules above it in this list.
ORDER = [
    "errors",
    "reference_checks",
    "reference_scores",
    "reference_dropout",
    "reference_heads",
    "reference_packed",
    "reference_packed_caches",
    "reference_caches",
    "config",
    "bounded_cache",
    "html_table",
    "philox",
    "features.device",
    "features.host",
    "features.use",
    "features.draws",
    "features.refused",
    "planning.visibility",
    "planning.elements",
    "planning.problem",
    "features.kv_chunks",
    "features.packed_group",
    "planning.cores",
    "planning.device",
    "planning.step_time",
    "planning.tiles.common",
    "planning.tiles.steps",
    "planning.tiles.fa1",
    "planning.tiles.fa2_tables",
    "planning.tiles.fa2",
    "planning.tiles.fa3_tables",
    "planning.tiles.operand_tiles",
    "planning.tiles.panels",
    "planning.tiles.sum_parts",
    "planning.tiles.fa3_registers",
    "planning.tiles.fa3_few",
    "planning.tiles.fa3",
    "planning.tiles.bias",
    "planning.tiles.host",
    "planning.kernel",
    "planning.hopper",
    "planning.decision",
    "planning.head_groups",
    "planning.row_order",
    "planning.row_steps",
    "planning.key_parts",
    "planning.mask_bits",
    "planning.block_bits",
    "planning.item_lists",
    "planning.argument_gradients",
    "planning.key_chunks",
    "planning.forward_time",
    "planning.fa1",
    "planning.fa2",
    "planning.fa3_choice",
    "planning.fa3_few",
    "planning.fa3",
    "planning.plan",
    "planning.invariant",
    "planning.append_step",
    "cuda.parameters",
    "cuda.source",
    "cuda.available",
    "cuda.compile",
    "cuda.kernel_cache",
    "cuda.tensor_map",
    "cuda.current",
    "cuda.tile_counter",
    "cuda.launch",
    "tiled_numpy.blas",
    "tiled_numpy.threads",
    "tiled_numpy.blocks",
    "tiled_numpy.heads",
    "tiled_numpy.steps",
    "tiled_numpy.common_part",
    "tiled_numpy.terms",
    "tiled_numpy.operands",
    "tiled_numpy.few_rows",
    "tiled_numpy.outputs",
    "tiled_numpy.own_lse",
    "tiled_numpy.key_sums",
    "tiled_numpy.gradient_rows",
    "tiled_numpy.gradients",
    "tiled_numpy.by_entry",
    "tiled_numpy.bias_gradient",
    "tiled_numpy.fa1",
    "tiled_numpy.fa2",
    "tiled_numpy",
    "arrays.spec",
    "arrays.dlpack",
    "arrays.meaning",
    "arrays.adopt",
    "arrays.sums",
    "arrays.mapped",
    "arrays.overlap",
    "arrays.cast",
    "features.feature",
    "features.window",
    "features.used_lengths",
    "features.packed_queries",
    "features.cached_keys",
    "features.float8",
    "features.packed_lengths",
    "features.softcap",
    "features.dual",
    "features.score_text",
    "features.score_mod",
    "features.added",
    "features.alibi",
    "features.pairs",
    "features.bias",
    "features.mask",
    "features.block_mask",
    "features.sinks",
    "features.dropout",
    "features.table",
    "block_mask",
    "tensors",
    "options",
    "score_mod",
    "given",
    "telling",
    "calls_to_come",
    "compile_ahead",
    "checks",
    "pipeline",
    "caches.float8",
    "caches.given",
    "caches.packed",
    "caches.checks",
    "caches.rotary",
    "caches.lengths",
    "caches.host_packed",
    "caches.host",
    "caches.device",
    "states",
    "calls",
    "dispatch",
    "caches.as_attention",
    "caches.attend",
    "addresses",
    "signature",
    "caches.described",
    "caches.planned",
    "namespace",
    "merging",
    "resuming",
    "api.available",
    "api.forward",
    "api.backward",
    "api.cache",
    "api.pullback",
    "api.vjp",
    "api",
    "dropout",
    "packing",
    "prepared",
    "explanation",
    "info",
    "jax.axes",
    "jax.entries",
    "jax.passes",
    "jax.call",
    "jax.cached",
    "jax.host",
    "jax.native.frame",
    "jax.native.layout",
    "jax.native.limits",
    "jax.native.registry",
    "jax.native.stamp",
    "jax.native.table",
    "jax.native.driver",
    "jax.native.machine",
    "jax.native.said",
    "jax.native.launching",
    "jax.native.handler",
    "jax.native.registration",
    "jax.native",
    "jax.device",
    "jax.types",
    "jax.site",
    "jax.lowering",
    "jax.partition",
    "jax.primitive",
    "jax.cache_primitive",
    "jax.derivative",
    "jax.keywords",
    "jax.arguments",
    "jax.functions",
    "jax.lengths",
    "jax.float8",
    "jax.cache",
    "jax",
]
#: Applications: they may import every module of the library, and no module imports them.
APPLICATIONS = (
    "cli",
    "command_output",
    "compile_command",
    "demo",
    "explain_command",
    "info_command",
    "__main__",
)
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
