"""Compiles what the selected tests will run, beside the first of them."""

from __future__ import annotations

import pytest

from .build import begin, compiler
from .rows import Row


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> None:
    if compiler() is None:
        return
    given = [getattr(item, "callspec", None) for item in request.session.items]
    rows = [spec.params.get("row") for spec in given if spec is not None]
    for row in dict.fromkeys(row for row in rows if isinstance(row, Row)):
        for config in row.runner.configs(row.cases()[0]):
            begin(config)
