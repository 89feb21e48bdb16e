"""Statements of the pages about features and refused pairs match the tables.

``python -m tests.unit.test_readme_features`` prints the block.
"""

from __future__ import annotations

import pytest

from cuflash.features import refused
from cuflash.features.refused import Refusal
from cuflash.features.table import FEATURES

from .documents import read

BEGIN, END = "<!-- features -->\n", "<!-- end of features -->\n"


def block() -> str:
    """A row for each feature, and every refused pair."""
    lines = ["| feature | arguments | gradients (`wrt`) | is refused with |", "|---|---|---|---|"]
    for feature in FEATURES.values():
        arguments = [*feature.arguments]
        gradients = [name for name, rule in feature.arrays.items() if rule.differentiable]
        pairs = [pair for pair in refused.REFUSED if feature.name in (pair.first, pair.second)]
        cells = [_code(arguments), _code(gradients), _refusals(feature.name, pairs)]
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _refusals(name: str, pairs: list[Refusal]) -> str:
    others = [(p.second if p.first == name else p.first, p.reason) for p in pairs]
    return "; ".join(f"{other}: {reason}" for other, reason in others) or "nothing"


@pytest.mark.parametrize("page", ["README.md", "docs/guide/masks-and-scores.md"])
def test_a_page_shows_the_table(page: str) -> None:
    text = read(page)
    assert text.count(BEGIN) == text.count(END) == 1, "python -m tests.unit.test_readme_features"
    assert text.split(BEGIN)[1].split(END)[0] == block()


def test_the_block_shows_every_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is on the rows of both features, with the reason."""
    rows = (
        Refusal("window", "sinks", "as a test has it"),
        Refusal("sinks", "fa1", "as another test has it"),
    )
    monkeypatch.setattr(refused, "REFUSED", rows)
    _, _, *lines = block().splitlines()
    of = {line.split()[1]: line for line in lines}
    assert of["window"].endswith("| none | sinks: as a test has it |")
    assert of["sinks"].endswith("| window: as a test has it; fa1: as another test has it |")


if __name__ == "__main__":
    print(f"{BEGIN}{block()}{END}", end="")
