"""The examples in the docstrings of ``cuflash.jax`` run, and give what they show."""

from __future__ import annotations

import pytest

from .jax_case import jax
from .test_docstring_examples import check_examples

of_jax = pytest.importorskip("cuflash.jax", reason="JAX is not installed")


@pytest.mark.parametrize("name", of_jax.__all__)
def test_an_example_gives_what_it_shows(name: str) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        check_examples(name, getattr(of_jax, name))
