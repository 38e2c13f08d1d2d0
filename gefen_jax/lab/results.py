"""The one form of all measurements: a JSON line per number, with what it was measured on.

| field | meaning |
|---|---|
| schema | version of this form, 1 |
| benchmark | the command, such as "bench step" |
| subject | what was measured, such as "gefen" |
| baseline | what a ratio is relative to; null for plain numbers |
| metric, unit | such as "wall ratio", "1" |
| median, p20, p80, samples | of the samples; for a single number all three are it and samples is 1 |
| config | what was varied, an object |
| environment | versions, device, threads, commit; see `machine.environment` |
| time | seconds since 1970, UTC |
"""

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gefen_jax.lab import machine
from gefen_jax.lab.errors import UsageError

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured number; fields as in the module's table."""

    benchmark: str
    subject: str
    metric: str
    unit: str
    median: float
    p20: float
    p80: float
    samples: int
    baseline: str | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, benchmark: str, subject: str, metric: str, unit: str, samples: Iterable[float] | float, **other: Any
    ) -> "Result":
        """From samples, or from one number.

        Examples:
          >>> found = Result.of("bench step", "gefen", "wall ratio", "1", [1.0, 2.0, 4.0], baseline="adamw")
          >>> found.median, found.samples
          (2.0, 3)
        """
        values = np.atleast_1d(np.asarray(samples, np.float64))
        median, p20, p80 = (float(np.percentile(values, q)) for q in (50, 20, 80))
        return cls(benchmark, subject, metric, unit, median, p20, p80, int(values.size), **other)


def check_file(path: str | Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written before anything is measured; makes its folder, not the file.

    Raises:
      UsageError: names the option, the path and the system's reason.

    >>> check_file("/dev/null/x.jsonl")
    Traceback (most recent call last):
    gefen_jax.lab.errors.UsageError: --out '/dev/null/x.jsonl': cannot write there (/dev/null is no folder)
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        reason = f"{path.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"{option} {str(path)!r}: cannot write there ({reason})") from error


def write(path: str | Path, results: Iterable[Result]) -> None:
    """Append results to a JSON-lines file."""
    environment = machine.environment()
    with open(path, "a", encoding="utf-8") as file:
        for result in results:
            line = {"schema": SCHEMA, **dataclasses.asdict(result), "environment": environment, "time": time.time()}
            file.write(json.dumps(line) + "\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A text table: the first column left, the others right.

    Examples:
      >>> print(table(["a", "b"], [["x", "1.0"]]))
      a    b
      -  ---
      x  1.0
    """
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = ["-" * width for width in widths]

    def join(line: list[str]) -> str:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(join(line) for line in [head, rule, *rows])
