"""Progress of several runs in lockstep: a live panel in a terminal, a line now and then elsewhere."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gefen_jax.lab.record import Record

REFRESH = 0.1  # seconds between two drawings of the live panel
BLOCKS = "▁▂▃▄▅▆▇█"


class Progress:
    """`update()` after every round of steps. Drawing happens only there, never beside a timed step."""

    def __init__(self, console: Console, records: list[Record], steps: int, live: Live | None) -> None:
        self.console, self.records, self.steps, self.live = console, records, steps, live
        self.start = self.drawn = time.monotonic()
        self.printed = -1  # step of the last printed line

    def update(self) -> None:
        now = time.monotonic()
        if self.live is None:
            validated = min(record.validation[-1][0] for record in self.records)
            if validated > self.printed:
                self.printed = validated
                self.console.print(self.line(validated), highlight=False, soft_wrap=True)
        elif now - self.drawn >= REFRESH or self.done == self.steps:
            self.drawn = now
            self.live.update(self.panel(), refresh=True)

    @property
    def done(self) -> int:
        return min(record.steps for record in self.records)

    def line(self, step: int) -> str:
        losses = "  ".join(f"{record.label} {record.validation_losses()[step]:.4f}" for record in self.records)
        elapsed = duration(time.monotonic() - self.start)
        return f"step {step:>{len(str(self.steps))}}/{self.steps}  {elapsed}  validation loss: {losses}"

    def panel(self) -> Group:
        elapsed = time.monotonic() - self.start
        left = f", {duration(elapsed / self.done * (self.steps - self.done))} left" if self.done else ""
        head = Table.grid(padding=(0, 1))
        head.add_row(
            f"step {self.done}/{self.steps}",
            ProgressBar(total=self.steps, completed=self.done, width=30),
            f"{duration(elapsed)}{left}",
        )
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for title in ("train loss", "validation loss", "ms/step"):
            table.add_column(title, justify="right")
        table.add_column("training loss so far")
        for record in self.records:
            recent = record.train_loss[-20:]
            timing = record.step_time()
            table.add_row(
                record.label,
                f"{sum(recent) / len(recent):.4f}" if recent else "",
                f"{record.validation[-1][1]:.4f}",
                f"{1000 * timing.median:.0f}" if timing else "",
                sparkline(record.train_loss),
            )
        return Group(head, table, Text("Ctrl-C ends it and keeps what was measured", style="dim"))


@contextmanager
def progress(console: Console, records: list[Record], steps: int) -> Iterator[Progress]:
    """A progress display on that console; nothing but plain lines if it is not a terminal."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Progress(console, records, steps, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Progress(console, records, steps, live)


def duration(seconds: float) -> str:
    """
    >>> duration(75.4)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def sparkline(values: list[float], width: int = 24) -> str:
    """The values as a row of at most `width` bars: means of equal parts, lowest to highest.

    >>> sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    '█▇▆▅▄▃▂▁'
    """
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] if mean in finite else "!" for mean in means)
