"""The notebooks of ``examples`` match the scripts, and print what they show."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The keys of a cell of nbformat 4.5, all needed and no others allowed.
KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}


def _writer() -> ModuleType:
    path = ROOT / "tools" / "write_notebooks.py"
    spec = importlib.util.spec_from_file_location("write_notebooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = _writer()


def _stored(name: str) -> Any:
    return json.loads((ROOT / "examples" / f"{name}.ipynb").read_text("utf-8"))


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _without_numbers(outputs: list[dict[str, Any]]) -> list[Any]:
    """Outputs without the numbers, and bars of them, that rounding may change on another CPU."""
    texts = ["".join(o.get("text", o.get("data", {}).get("text/plain"))) for o in outputs]
    masked = [re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "0", text) for text in texts]
    return [re.sub(r"[ #]+", " ", text) for text in masked]


@pytest.mark.parametrize("name", WRITER.SHOWN)
def test_it_has_the_cells_of_the_script(name: str) -> None:
    script = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
    expected = WRITER.cells(script, WRITER.SHOWN[name])
    assert [(cell["cell_type"], _source(cell)) for cell in _stored(name)["cells"]] == expected
    # Nothing of the script is lost on the way.
    code = "\n".join(text for kind, text in expected if kind == "code")
    assert all(f"def {f}(" in code for f in re.findall(r"(?m)^def (\w+)\(", script))
    assert set(WRITER.SHOWN[name].values()) < {text for _, text in expected}


@pytest.mark.parametrize("name", WRITER.SHOWN)
def test_its_cells_run_and_print_what_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    names: dict[str, Any] = {"__name__": "__main__", "__doc__": "A notebook."}
    code = [cell for cell in _stored(name)["cells"] if cell["cell_type"] == "code"]
    shown = 0
    for cell in code:
        outputs = WRITER.run(_source(cell), names)
        assert _without_numbers(outputs) == _without_numbers(cell["outputs"])
        shown += bool(outputs)
    assert shown == len(WRITER.SHOWN[name]) + 1  # these and the last cell
    assert code[-1]["outputs"][0]["name"] == "stdout"
    assert names["result"]


@pytest.mark.parametrize("name", WRITER.SHOWN)
def test_it_is_in_the_format_of_notebooks(name: str) -> None:
    stored = _stored(name)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    assert set(stored) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", one) for one in ids)
    for cell in stored["cells"]:
        assert set(cell) == KEYS[cell["cell_type"]]
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))


def test_a_section_has_to_have_a_heading() -> None:
    with pytest.raises(ValueError, match="without a heading"):
        WRITER.cells('"""A script."""\n\n# ## ', {})
