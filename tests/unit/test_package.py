"""The shipped files: the wheel holds the tree, and works without the checkout."""

from __future__ import annotations

import configparser
import email
import importlib
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cuflash
from cuflash import cli


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    done = subprocess.run([*command, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def _tree(root: Path) -> set[str]:
    files = {
        path.relative_to(root).as_posix()
        for path in (root / "cuflash").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    sources = {
        f"cuflash/{path.relative_to(root).as_posix()}"
        for path in (root / "cuda_src").rglob("*")
        if path.is_file()
    }
    return files | sources


def test_the_wheel_holds_exactly_the_tree(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert names == _tree(root)
    assert "cuflash/py.typed" in names
    assert licences


_FROM_WHEEL = """
import sys
sys.path.insert(0, sys.argv[1])
import cuflash
from cuflash.cuda.source import find_sources
assert cuflash.__file__.startswith(sys.argv[1]), cuflash.__file__
assert str(find_sources()).startswith(sys.argv[1]), find_sources()
import numpy
q = numpy.random.default_rng(0).standard_normal((1, 9, 2, 8))
out = cuflash.attention(q, q, q, backend="numpy")
assert abs(out - cuflash.reference.attention(q, q, q)[0]).max() < 1e-12
print("works")
"""


def test_it_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "-c", _FROM_WHEEL, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "works", done.stderr


def test_the_public_names_are_documented() -> None:
    for name in cuflash.__all__:
        value = getattr(cuflash, name)
        assert (value.__doc__ or "").strip(), name


def test_the_version_is_one(root: Path) -> None:
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text()
    assert cuflash.__version__.count(".") == 2
    assert f"\nversion: {cuflash.__version__}\n" in (root / "CITATION.cff").read_text("utf-8")


def _shipped(wheel: Path, name: str) -> str:
    """A file of the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_the_wheel_installs_the_command(wheel: Path) -> None:
    described = configparser.ConfigParser()
    described.read_string(_shipped(wheel, "entry_points.txt"))
    module, _, function = described["console_scripts"]["cuflash"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    said = email.message_from_string(_shipped(wheel, "METADATA"))
    assert said["Version"] == cuflash.__version__
    assert said["License-Expression"] == "BSD-3-Clause"
    assert said["Requires-Python"] == ">=3.10"
    classifiers = said.get_all("Classifier", [])
    python = "Programming Language :: Python :: 3."
    versions = [one.removeprefix(python) for one in classifiers if one.startswith(python)]
    assert versions == ["10", "11", "12", "13", "14"]
    assert not [one for one in classifiers if one.startswith("License ::")]


def test_the_public_names_are_what_is_listed(root: Path) -> None:
    """``dir`` has no names of internal modules, and ``jax`` only after its first use."""
    program = "import cuflash; print([name for name in dir(cuflash) if name[0] != '_'])"
    listed = _printed(root, program)
    assert listed == str(sorted(cuflash.__all__))
    assert {name for name in dir(cuflash) if name[0] != "_"} - {"jax"} == set(cuflash.__all__)
    assert {"__doc__", "__file__", "__version__"} <= set(dir(cuflash))


def _printed(root: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_jax_is_imported_when_it_is_asked_for(root: Path) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    program = """
import sys, cuflash
assert "jax" not in sys.modules and "jax" not in dir(cuflash)
print(cuflash.jax.attention.__module__, "jax" in dir(cuflash))
"""
    assert _printed(root, program) == "cuflash.jax True"


_WITHOUT_JAX = """
import sys
sys.modules["jax"] = None  # an import of it raises ImportError
import inspect, cuflash
inspect.getmembers(cuflash)
try:
    cuflash.jax
except cuflash.JaxUnavailableError as error:
    print(error)
"""


def test_without_jax_it_says_what_to_install(root: Path) -> None:
    assert "pip install 'cuflash[jax]'" in _printed(root, _WITHOUT_JAX)


def test_what_it_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'cuflash' has no attribute 'flash'"):
        cuflash.flash  # noqa: B018
    assert not hasattr(cuflash, "torch")


def test_info_is_a_record_that_can_be_a_key() -> None:
    one, other = cuflash.info(), cuflash.info()
    assert isinstance(one, cuflash.Info)
    assert one == other
    assert len({one, other, pickle.loads(pickle.dumps(one))}) == 1
    assert one.versions["numpy"] in str(one)
    assert dict(one.versions)["cuflash"] == one.versions.get("cuflash")
    assert eval(repr(one.environment)) == one.environment == dict(one.environment)
    with pytest.raises(TypeError, match="does not support item assignment"):
        one.versions["numpy"] = "0"  # type: ignore[index]
    changed = type(one.versions)({**one.versions, "numpy": "0"})
    assert changed != one.versions
    assert hash(changed) != hash(one.versions)
