"""The errors that this library raises.

Each is a :class:`CuflashError` and also the built-in exception that a caller expects. An error
about an argument names it, says what it got and what it expected; it is raised before anything is
compiled, launched or written.
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
    """An argument with an unusable value.

    Parameters
    ----------
    argument : str
        The name in the call.
    got, expected : str
        The value, and what is needed.
    """

    def __init__(self, argument: str, got: str, expected: str) -> None:
        super().__init__(f"{argument}: got {got}; expected {expected}")
        self.argument = argument
        self.got = got
        self.expected = expected

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.argument, self.got, self.expected)


class ArgumentValueError(_ArgumentError, ValueError):
    """An argument of the right type whose shape or value is unusable."""


class ArgumentTypeError(_ArgumentError, TypeError):
    """An argument of the wrong kind or dtype."""


class UnsupportedError(CuflashError, ValueError):
    """The algorithm, the device or a pair of features does not support the problem."""


class BackendUnavailableError(CuflashError, RuntimeError):
    """CUDA was requested but is unusable here."""


class JaxUnavailableError(BackendUnavailableError, ImportError):
    """JAX cannot be imported, which ``cuflash.jax`` needs; the message says what to install."""


class ToolchainError(CuflashError, RuntimeError):
    """There is a GPU, but NVRTC or the CUDA headers are missing."""


class CompileError(CuflashError, RuntimeError):
    """NVRTC or the driver refused a kernel; the message has the reason and the configuration."""


class LaunchError(CuflashError, RuntimeError):
    """The driver refused a launch; the message has the configuration."""


def install(extra: str, option: str = "") -> str:
    """The command that installs an extra, for users of the package and of a checkout."""
    return f"pip install {option}'cuflash[{extra}]', or '.[{extra}]' in a checkout"


def shown(value: Any) -> str:
    """A value as an error message shows it: short, and never an error itself."""
    try:
        text = repr(value)
    except Exception:  # a caller's object may raise anything; so do ints of thousands of digits
        return f"a value of type {type(value).__qualname__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
