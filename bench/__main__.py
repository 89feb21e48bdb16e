"""``python -m bench COMMAND``: measures, stores and reports; ``--help`` lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuflash.errors import BackendUnavailableError


def main() -> int:
    """Run the command of the command line."""
    arguments = _parser().parse_args()
    try:
        with ended_as_by_an_error():
            return _do(arguments)
    except BackendUnavailableError as error:
        print(f"python -m bench {arguments.command}: {error}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def ended_as_by_an_error() -> Iterator[None]:
    """Make a terminated run (SIGTERM, a time limit) keep its measurements."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


#: Commands whose only option is ``--output``, and the functions that run them.
_OF_AN_OUTPUT = {
    "jit": "run_jit",
    "jitted": "run_jitted",
    "training_step": "run_training_step",
    "cold": "run_cold",
    "residual": "run_residual",
}


def _do(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        from .pooled import summary
        from .run import run as run_cases

        given = (arguments.cases, arguments.protocol, arguments.output, arguments.peers)
        rows = [row for _ in range(arguments.runs) for row in run_cases(*given)]
        print("\n".join(summary(rows)))
    elif arguments.command == "latency":
        from .latency import run_latency

        run_latency(arguments.output, arguments.peers)
    elif arguments.command in _OF_AN_OUTPUT:
        module = importlib.import_module(f".{arguments.command}", __package__)
        getattr(module, _OF_AN_OUTPUT[arguments.command])(arguments.output)
    elif arguments.command == "flash3":
        from .flash3 import run_flash3

        run_flash3(arguments.cases, arguments.output)
    elif arguments.command == "cpu":
        from .cpu import run_cpu

        run_cpu(arguments.cases, arguments.conditions, arguments.output)
    elif arguments.command == "tune":
        from .tune import tune

        beside = [name for name in arguments.beside.split(",") if name]
        tune(arguments.cases, arguments.op, arguments.dtype, beside, arguments.output)
    elif arguments.command == "story":
        from .story.run import run as run_story

        run_story(arguments.parts, arguments.output, arguments.peers)
    else:
        return _report(arguments.write)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time cases on the GPU and store the rows")
    run.add_argument("--cases", default="fa1", help="sets of cases, comma-separated")
    run.add_argument("--peers", help="peers, comma-separated; by default all that are importable")
    run.add_argument("--protocol", default="rested,turns", help="rested, turns or both")
    run.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    run.add_argument("--runs", type=int, default=1, help="number of runs, one after another")
    latency = commands.add_parser("latency", help="time the host's work for a call on the GPU")
    latency.add_argument("--peers", help="peers, comma-separated; by default those it can time")
    latency.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    jit = commands.add_parser("jit", help="time gradients under jax.jit beside the plain calls")
    jit.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    jitted = commands.add_parser("jitted", help="time programs under jax.jit, ours and others")
    jitted.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    step = commands.add_parser("training_step", help="time a step of a model under jax.jit")
    step.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    flash3 = commands.add_parser("flash3", help="time FlashAttention-3 beside ours under jax.jit")
    flash3.add_argument("--cases", default="windows,windows-backward", help="sets of cases")
    flash3.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    cold = commands.add_parser("cold", help="time the first call of a kind on the GPU")
    cold.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    residual = commands.add_parser("residual", help="measure the value of a float32 residual")
    residual.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    cpu = commands.add_parser("cpu", help="time the tiled NumPy backend on this CPU")
    cpu.add_argument("--cases", default="8192,2048,float16,bfloat16,decoding,small")
    cpu.add_argument("--conditions", default="alone,loaded")
    cpu.add_argument("--output", type=Path)
    story = commands.add_parser("story", help="measure the papers' claims on the GPU")
    story.add_argument("--parts", default="memory,share,io,speed", help="comma-separated")
    story.add_argument("--peers", help="peers of the part speed; by default the best ones")
    story.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    report = commands.add_parser("report", help="check the pages against the results")
    report.add_argument("--write", action="store_true", help="bring pages and charts up to date")
    _add_tune(commands)
    return parser


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser("tune", help="time the candidate tiles and the plan's tile")
    tune.add_argument("--cases", default="fa2", help="sets of cases, comma-separated")
    tune.add_argument("--op", choices=("forward", "backward"))
    tune.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"))
    tune.add_argument("--beside", default="", help="other generations to time, comma-separated")
    tune.add_argument("--output", type=Path, help="a file that the rows are appended to")


def _report(write: bool) -> int:
    from . import report

    if write:
        report.write()
        try:
            report.draw_charts()
        except ModuleNotFoundError as error:
            print(f"no charts: {error}; they need the extra 'bench'")
    wrong = report.faults() + report.wrong_charts()
    for line in (*report.outdated(), *wrong):
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
