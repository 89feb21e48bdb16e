"""The errors this library raises.

Every one is a :class:`CuflashError` and also the built-in exception a caller
would expect. An error about an argument names it, says what it got and what
would have been right; it is raised before anything is compiled, launched or
written.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendUnavailableError",
    "CompileError",
    "CuflashError",
    "JaxUnavailableError",
    "LaunchError",
    "ToolchainError",
    "UnsupportedError",
    "install",
    "shown",
]


class CuflashError(Exception):
    """Base class of every error of this library."""


class _ArgumentError(CuflashError):
    """An argument that cannot be used.

    Parameters
    ----------
    argument : str
        Its name in the call.
    got, expected : str
        What it was and what is needed.
    """

    def __init__(self, argument: str, got: str, expected: str) -> None:
        super().__init__(f"{argument}: got {got}; expected {expected}")
        self.argument = argument
        self.got = got
        self.expected = expected

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.argument, self.got, self.expected)


class ArgumentValueError(_ArgumentError, ValueError):
    """An argument of the right type with a shape or value that cannot be used."""


class ArgumentTypeError(_ArgumentError, TypeError):
    """An argument of a kind or dtype that cannot be used."""


class UnsupportedError(CuflashError, ValueError):
    """The algorithm, the device or a pair of features cannot do this problem."""


class BackendUnavailableError(CuflashError, RuntimeError):
    """CUDA was asked for and cannot be used here."""


class JaxUnavailableError(BackendUnavailableError, ImportError):
    """``cuflash.jax`` was imported and JAX cannot be; the message says what to install."""


class ToolchainError(CuflashError, RuntimeError):
    """A GPU is there, but NVRTC or the CUDA headers are not."""


class CompileError(CuflashError, RuntimeError):
    """NVRTC or the driver refused a kernel; the message says why and holds the configuration."""


class LaunchError(CuflashError, RuntimeError):
    """The driver refused a launch; the message holds the configuration."""


def install(extra: str, option: str = "") -> str:
    """The command that brings an extra, to users of the package and of a checkout."""
    return f"pip install {option}'cuflash[{extra}]', or '.[{extra}]' in a checkout"


def shown(value: Any) -> str:
    """What an error says it got: short, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # whatever a caller's object raises; ints of thousands of digits too
        return f"a value of type {type(value).__qualname__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
