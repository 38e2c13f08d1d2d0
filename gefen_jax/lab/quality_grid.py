"""Which cells a study runs, and in which order.

A rate is a number, or relative to a best rate that is chosen first, on seeds of its own ("choice" cells): "1x" and
"2x" are multiples of AdamW's best rate of the task, "best" is the optimizer's own. The study's cells come seed by
seed, so that a part of them is a smaller study.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

from gefen_jax.lab import quality_stats, quality_tasks, quality_variants
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.quality_cells import CHOICE, STUDY, Cell, Key, rounded
from gefen_jax.lab.quality_stats import BASE


@dataclasses.dataclass(frozen=True)
class Grid:
    """What was asked for.

    Attributes:
      tasks, optimizers: names.
      rates: numbers as words, multiples of AdamW's best such as "2x", or "best".
      seeds: of the study.
      choice_rates, choice_seeds: among which and on which best rates are chosen.
      steps, weight_decay, b2: of every run.
    """

    tasks: tuple[str, ...]
    optimizers: tuple[str, ...]
    rates: tuple[str, ...]
    seeds: tuple[int, ...]
    choice_rates: tuple[float, ...]
    choice_seeds: tuple[int, ...]
    steps: int = 400
    weight_decay: float = 0.1
    b2: float = 0.99

    def __post_init__(self) -> None:
        for name in self.tasks:
            quality_tasks.choose(name)
        for name in self.optimizers:
            quality_variants.choose(name)
        for rate in self.rates:
            if rate != "best" and _multiple(rate) is None and _number(rate) is None:
                raise UsageError(f"--rates: found {rate!r}, expected a number above 0, a multiple such as 2x, or best")
        if both := set(self.seeds) & set(self.choice_seeds):
            raise UsageError(f"--seeds and --choice-seeds share {min(both)}: rates must be chosen on other seeds")
        if self.chosen() and not (self.choice_seeds and self.choice_rates):
            raise UsageError("--rates with x or best need --choice-rates and --choice-seeds")
        if self.steps < 1:
            raise UsageError(f"--steps: found {self.steps}, expected at least 1")

    def chosen(self) -> tuple[str, ...]:
        """The optimizers whose best rate is needed."""
        needed = [BASE] if any(_multiple(rate) is not None for rate in self.rates) else []
        if "best" in self.rates:
            needed += [BASE, *self.optimizers]
        return tuple(dict.fromkeys(needed))

    def choice_keys(self, data: Callable[[str], str]) -> Iterator[Key]:
        """The cells from which rates are chosen; ``data`` is the fingerprint of a task's data."""
        for seed in self.choice_seeds if self.chosen() else ():
            for task in self.tasks:
                for optimizer in self.chosen():
                    for rate in self.choice_rates:
                        yield self.key(task, optimizer, rate, seed, data)

    def study_keys(self, data: Callable[[str], str], cells: Sequence[Cell]) -> Iterator[Key]:
        """The study's cells; ``cells`` holds those of `choice_keys`."""
        for seed in self.seeds:
            for task in self.tasks:
                seen = set()
                for word in self.rates:
                    for optimizer in self.optimizers:
                        key = self.key(task, optimizer, self.rate(word, task, optimizer, data, cells), seed, data)
                        if key not in seen:
                            seen.add(key)
                            yield key

    def rate(self, word: str, task: str, optimizer: str, data: Callable[[str], str], cells: Sequence[Cell]) -> float:
        """A rate word as a number."""
        multiple, number = _multiple(word), _number(word)
        if number is not None:
            return number
        subject = optimizer if multiple is None else BASE
        setting = self.key(task, subject, 1.0, 0, data)
        mine = [
            cell
            for cell in cells
            if cell.purpose == CHOICE
            and cell.key._replace(rate=1.0, seed=0) == setting
            and cell.rate in self.choice_rates
            and cell.seed in self.choice_seeds
        ]
        return rounded((multiple or 1.0) * quality_stats.best_rate(mine))

    def key(self, task: str, optimizer: str, rate: float, seed: int, data: Callable[[str], str]) -> Key:
        batch = quality_tasks.choose(task).batch
        return Key(task, optimizer, rounded(rate), seed, self.steps, batch, self.weight_decay, self.b2, data(task))

    def purposes(self, data: Callable[[str], str], cells: Sequence[Cell]) -> dict[Key, str]:
        """Every cell in order, with its purpose. Before the choice is made only its cells are known."""
        choice = dict.fromkeys(self.choice_keys(data), CHOICE)
        if set(choice) - {cell.key for cell in cells}:
            return choice
        return choice | dict.fromkeys(self.study_keys(data, cells), STUDY)


def _multiple(word: str) -> float | None:
    return _number(word[:-1]) if word.endswith("x") else None


def _number(word: str) -> float | None:
    try:
        found = float(word)
    except ValueError:
        return None
    return found if 0 < found < math.inf else None


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from words such as "0-7,10".

    >>> parse_seeds("0-3,10")
    (0, 1, 2, 3, 10)
    """
    found: list[int] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"seeds: found {word!r}, expected numbers and ranges such as 0-7,10")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))


def parse_names(text: str, option: str) -> tuple[str, ...]:
    """Comma-separated words, each once.

    >>> parse_names("gpt, llama,gpt", "--tasks")
    ('gpt', 'llama')
    """
    found = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    if not found:
        raise UsageError(f"{option}: found nothing; give one or more names, separated by commas")
    return found
