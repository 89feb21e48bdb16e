"""Adds rows to the table of features for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from cuflash import calls
from cuflash.features.feature import Feature
from cuflash.features.table import FEATURES

__all__ = ["registered"]


@contextlib.contextmanager
def registered(*features: Feature) -> Iterator[None]:
    """Inside the ``with`` block the table ends with these rows; earlier calls are forgotten."""
    with mock.patch.dict(FEATURES, {feature.name: feature for feature in features}):
        calls.forget()
        try:
            yield
        finally:
            calls.forget()
