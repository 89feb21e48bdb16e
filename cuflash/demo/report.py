"""Prints the results of the demo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text as Line

from ..explained import Explanation
from .generate import Generated
from .options import DTYPES, Options
from .text import Text
from .training import Trained

__all__ = ["MARGIN", "Report"]

#: Nats per byte by which the network must beat both baselines.
MARGIN = 0.1
#: Approximate number of rows of the table of losses.
_ROWS = 10


class Report:
    """Prints the parts of a run as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def setting(self, options: Options, text: Text, weights: int) -> None:
        """Print the text, the network and the training."""
        lines = {
            "text": f"{text.source}: {text.training.size:,} bytes to train on, "
            f"{text.held_out.size:,} held out",
            "network": f"{options.layers} layers, {options.heads} heads of {options.head_dim}, "
            f"{weights:,} weights; attention in {options.dtype}",
            "training": f"{options.steps:,} steps of {options.batch} sequences of "
            f"{options.seqlen} bytes, seed {options.seed}",
        }
        for name, line in lines.items():
            self._say(f"{name:<12} {line}")

    def plans(self, explanations: Mapping[str, Explanation]) -> None:
        """Print the plans of attention."""
        for explanation in explanations.values():
            self._say("")
            self._say(str(explanation))

    def gradients(self, errors: Mapping[str, float], dtype: str) -> bool:
        """Print the errors against the oracle; return whether all are within the tolerance."""
        tolerance = DTYPES[dtype]
        self._head("Gradients of one batch: worst error, relative to the float64 oracle's largest")
        by_layer: dict[str, dict[str, float]] = {}
        for name, error in errors.items():
            kind, _, layer = name.partition(" ")
            by_layer.setdefault(layer, {})[kind] = error
        whole = by_layer.pop("")
        table = Table("layer", *next(iter(by_layer.values())))
        for layer, kinds in by_layer.items():
            table.add_row(layer, *(_judged(f"{e:.1e}", e <= tolerance) for e in kinds.values()))
        self._console.print(table)
        self._say(", ".join(f"{name} {error:.1e}" for name, error in whole.items()))
        good = all(error <= tolerance for error in errors.values())
        self._say(
            f"{'all' if good else 'NOT all'} within the tolerance of {tolerance:g} for {dtype}"
        )
        return good

    @contextlib.contextmanager
    def progress(self, title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Show a progress bar; yields a function that takes the steps done and the loss."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as bars:
            task = bars.add_task(title, total=steps, loss="-")
            yield lambda done, loss: bars.update(task, completed=done, loss=f"{loss:.3f}")

    def speed(self, trained: Trained, ran: Mapping[tuple[str, str, str], int]) -> None:
        """Print how fast a network was trained, and the passes of attention that were observed."""
        self._say(f"{trained.seconds:.1f} s, {trained.tokens_per_second:,.0f} tokens per second")
        for (operation, algorithm, backend), count in ran.items():
            self._say(f"{count:,} {operation} passes ran {algorithm} on {backend}")

    def generations(self, rates: Mapping[str, float | str]) -> None:
        """Print tokens per second for each way of computing attention, or why it did not run."""
        self._head("The same network, trained through each, tokens per second")
        table = Table()
        for column in ("attention", "tokens per second", "times the slowest"):
            table.add_column(column, justify="left" if column == "attention" else "right")
        timed = {name: rate for name, rate in rates.items() if not isinstance(rate, str)}
        slowest = min(timed.values())
        for name, rate in timed.items():
            table.add_row(name, f"{rate:,.0f}", f"{rate / slowest:.2f}")
        self._console.print(table)
        for name, reason in rates.items():
            if isinstance(reason, str):
                self._say(f"without {name}: {reason}")

    def curves(self, trained: Mapping[str, Trained]) -> None:
        """Print the training losses side by side."""
        self._head("Training loss, nats per byte")
        table = Table()
        for column in ("step", *trained):
            table.add_column(column, justify="right")
        rows = list(zip(*(run.losses for run in trained.values()), strict=True))
        stride = max(1, len(rows) // _ROWS)
        for row in [*rows[:-1:stride], rows[-1]]:
            table.add_row(f"{row[0][0]:,}", *(f"{loss:.3f}" for _, loss in row))
        self._console.print(table)

    def losses(self, network: float, baselines: Mapping[str, float]) -> bool:
        """Print the held-out losses; return whether the network beats all baselines by MARGIN."""
        self._head("Held-out loss, nats per byte")
        table = Table()
        for column in ("", "loss", "behind"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("network with attention", f"{network:.3f}", "")
        for name, loss in baselines.items():
            lead = loss - network
            table.add_row(name, f"{loss:.3f}", _judged(f"{lead:.3f}", lead >= MARGIN))
        self._console.print(table)
        good = all(loss - network >= MARGIN for loss in baselines.values())
        verdict = "beats both" if good else "does NOT beat both"
        self._say(f"the network with attention {verdict} by at least {MARGIN}")
        return good

    def generated(self, generated: Generated) -> bool:
        """Print a text and how fast it was written; return whether both ways' logits agree."""
        count, wrong = len(generated.text), generated.wrong
        self._head(f"{count} bytes drawn from the network with attention")
        self._say(_printable(generated.prompt + generated.text))
        table = Table("keys and values", Column("tokens per second", justify="right"))
        for way, rate in generated.rates.items():
            table.add_row(way, f"{rate:,.0f}")
        self._console.print(table)
        if wrong:
            first = wrong[0]
            self._say(
                f"the cache is NOT right: logits of {len(wrong)} of {count} bytes differ by more "
                f"than the rounding, first those of byte {first}: by {generated.apart[first]:.2g}, "
                f"where {generated.rounding[first]:.2g} is allowed"
            )
        else:
            ties = f", but for {generated.ties} that are ties within the rounding"
            self._say(
                f"both ways choose the same {count} bytes{ties if generated.ties else ''}; "
                f"their logits differ by at most {generated.apart.max():.1g}"
            )
        return not wrong

    def _head(self, title: str) -> None:
        self._say("")
        self._console.print(Line(title, style="bold"), soft_wrap=True)

    def _say(self, line: str) -> None:
        self._console.print(Line(line), soft_wrap=True)


def _printable(text: bytes) -> str:
    return "".join(chr(b) if 32 <= b < 127 or b == 10 else f"\\x{b:02x}" for b in text)


def _judged(text: str, good: bool) -> Line:
    return Line(text, style="green" if good else "bold red")
