"""Writes the notebooks of ``examples``: the text of a script in cells, and what they print.

A module's docstring and every comment that begins with a heading (``# ## ...``) become Markdown
cells, and what stands between them becomes code cells. The cells run here, with NumPy. Run it
after a change of the scripts or of ``SHOWN``: ``python tools/write_notebooks.py``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples"
#: Cells that the notebook has and the script has not, by script and heading.
SHOWN = {
    "transformer_block": {
        "Data, weights and Adam": "draw_tokens(np.random.default_rng(0), 2, 20, np)",
        "Is the gradient right?": "gradient_error(np)",
    },
    "paged_generation": {
        "The cache": (
            "cache = PagedCache(np.random.default_rng(0), 5, 2, (4, 2, 16), np)\n"
            "weights = draw_weights(np.random.default_rng(1), (4, 2, 16), np)\n"
            "cache.extend(weights, np.arange(20)[None], [1])  # the second text reads 20 tokens\n"
            "cache.table"
        ),
    },
}
#: The last lines of a script, and what the last cell has in their place.
_MAIN, _CALL = 'if __name__ == "__main__":\n    main()\n', 'result = main(["--arrays", "numpy"])'
_HEADING = re.compile(r"^# ## (.*)\n((?:#.*\n)*)", re.MULTILINE)


def cells(script: str, shown: dict[str, str]) -> list[tuple[str, str]]:
    """Kind and text of every cell of a notebook; ``shown`` has further cells by heading."""
    doc = ast.get_docstring(ast.parse(script))
    title, _, body = (doc or "").partition("\n")
    found = [("markdown", f"# {title}\n{body}")]
    code = script.removesuffix(_MAIN).split('"""', 2)[2]
    opening, *sections = re.split(r"(?m)^(?=# ## )", code)
    found.append(("code", opening.strip()))
    for section in sections:
        said = _HEADING.match(section)
        if said is None:
            raise ValueError(f"a section without a heading: {section[:60]!r}")
        text = re.sub(r"(?m)^# ?", "", said[0])
        found += [("markdown", text.strip()), ("code", section[said.end() :].strip())]
        if said[1] in shown:
            found.append(("code", shown[said[1]]))
    return [*found, ("code", _CALL)]


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute a cell; its outputs are what it prints and the value of a last expression."""
    tree, printed, outputs = ast.parse(source), io.StringIO(), []
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if printed.getvalue():
        stream = {"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())}
        outputs.append(stream)
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        outputs.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return outputs


def notebook(script: str, shown: dict[str, str]) -> dict[str, Any]:
    """The notebook of a script, in nbformat 4.5, with its outputs."""
    names: dict[str, Any] = {"__name__": "__main__", "__doc__": "A notebook."}
    made, count = [], 0
    for number, (kind, source) in enumerate(cells(script, shown)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = _lines(source)
        if kind == "code":
            count += 1
            outputs = run(source, names)
            for output in outputs:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = count
            cell |= {"execution_count": count, "outputs": outputs}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Write every notebook."""
    for name, shown in SHOWN.items():
        script = (FOLDER / f"{name}.py").read_text("utf-8")
        text = json.dumps(notebook(script, shown), indent=1, sort_keys=True) + "\n"
        (FOLDER / f"{name}.ipynb").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
