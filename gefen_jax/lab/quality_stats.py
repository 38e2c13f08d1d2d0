"""From cells to conclusions: paired differences, best rates, and the gate of non-inferiority."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from gefen_jax.lab import quality_tasks
from gefen_jax.lab.quality_cells import CHOICE, STUDY, Cell, Setting, rounded

BASE = "adamw"  # what everything is compared with
POOLED_BOUND = 0.01  # nats
TASK_BOUND = 0.03  # nats
PAIRS = 48  # at least, for the gate
FAILED = 0.5  # nats above AdamW of the same seed and rate that count as divergence
CONFIDENCE = 0.95  # of the one-sided bounds


@dataclasses.dataclass(frozen=True)
class Gap:
    """Paired differences of the last validation loss to AdamW's, nats; minus is better than AdamW.

    Attributes:
      differences: one per pair; infinite where the optimizer's loss is not finite.
    """

    differences: tuple[float, ...]

    @property
    def pairs(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float:
        if not self.differences:
            return math.nan
        worst = max(self.differences)
        return worst if math.isinf(worst) else float(np.mean(self.differences))

    @property
    def error(self) -> float:
        """Standard error of the mean; not a number below two pairs."""
        if self.pairs < 2 or not math.isfinite(self.mean):
            return math.nan
        return float(np.std(self.differences, ddof=1)) / math.sqrt(self.pairs)

    @property
    def upper(self) -> float:
        """One-sided upper 95 % confidence bound of the mean, by Student's t.

        >>> gap = Gap((0.0, 0.01, 0.02, 0.01))
        >>> round(gap.mean, 4), round(gap.error, 5), round(gap.upper, 4)
        (0.01, 0.00408, 0.0196)
        """
        return self.mean if math.isinf(self.mean) else self.mean + self._margin

    @property
    def lower(self) -> float:
        """One-sided lower 95 % confidence bound of the mean."""
        return self.mean if math.isinf(self.mean) else self.mean - self._margin

    @property
    def _margin(self) -> float:
        return float(stats.t.ppf(CONFIDENCE, self.pairs - 1)) * self.error if self.pairs > 1 else math.nan


def pool(gaps: Iterable[Gap]) -> Gap:
    """All pairs of several tasks as one sample."""
    return Gap(tuple(difference for gap in gaps for difference in gap.differences))


@dataclasses.dataclass(frozen=True)
class Best:
    """The best rate of an optimizer, and how it was found."""

    rate: float
    independent: bool  # chosen on seeds that are not compared
    edge: bool  # the lowest or the highest of those tried: a better one may lie beyond


def best_rate(cells: Sequence[Cell]) -> float:
    """The rate with the lowest mean loss over the seeds that all rates have.

    Raises:
      ValueError: there are no cells, or no seed that all rates have.
    """
    rates = sorted({cell.rate for cell in cells})
    losses = {(cell.rate, cell.seed): cell.loss for cell in cells}
    seeds = [seed for seed in sorted({cell.seed for cell in cells}) if all((rate, seed) in losses for rate in rates)]
    if not seeds:
        raise ValueError(f"no seed was run at all of the rates {rates}")
    means = {rate: np.mean([losses[rate, seed] for seed in seeds]) for rate in rates}
    return min(rates, key=lambda rate: (math.isnan(means[rate]), means[rate]))


def choose_best(cells: Sequence[Cell], optimizer: str) -> Best | None:
    """The best rate of an optimizer among cells of one setting: from "choice" cells, else from the study's own."""
    for purpose in (CHOICE, STUDY):
        mine = [cell for cell in cells if cell.optimizer == optimizer and cell.purpose == purpose]
        rates = sorted({cell.rate for cell in mine})
        if len(rates) > 1:
            try:
                best = best_rate(mine)
            except ValueError:
                continue
            return Best(best, purpose == CHOICE, best in (rates[0], rates[-1]))
    rates = sorted({cell.rate for cell in cells if cell.optimizer == optimizer})
    return Best(rates[0], independent=False, edge=True) if len(rates) == 1 else None


def gap(cells: Iterable[Cell], optimizer: str, rate: float, base_rate: float) -> Gap:
    """Differences of the study's pairs at these rates, seed by seed, among cells of one setting."""
    mine, base = {}, {}
    for cell in cells:
        if cell.purpose == STUDY:
            if (cell.optimizer, cell.rate) == (optimizer, rate):
                mine[cell.seed] = cell.loss
            if (cell.optimizer, cell.rate) == (BASE, base_rate):
                base[cell.seed] = cell.loss
    return Gap(tuple(_difference(mine[seed], base[seed]) for seed in sorted(mine.keys() & base.keys())))


def _difference(loss: float, base: float) -> float:
    if math.isfinite(loss) and math.isfinite(base):
        return loss - base
    return -math.inf if math.isfinite(loss) else math.inf


def failures(cells: Iterable[Cell], optimizer: str, rate: float) -> list[int]:
    """Seeds at which the optimizer diverged, or ended more than `FAILED` nats above AdamW, at the same rate."""
    cells = list(cells)
    base = {cell.seed: cell.loss for cell in cells if (cell.optimizer, cell.rate) == (BASE, rate)}
    return sorted(
        cell.seed
        for cell in cells
        if (cell.optimizer, cell.rate, cell.purpose) == (optimizer, rate, STUDY)
        and (cell.diverged or cell.loss - base.get(cell.seed, math.inf) > FAILED)
    )


def by_setting(cells: Iterable[Cell]) -> dict[Setting, list[Cell]]:
    """Cells that may be compared, in the order of the tasks."""
    found: dict[Setting, list[Cell]] = {}
    order = {name: i for i, name in enumerate(quality_tasks.TASKS)}
    for cell in sorted(cells, key=lambda cell: (order.get(cell.task, len(order)), cell.setting)):
        found.setdefault(cell.setting, []).append(cell)
    return found


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether an optimizer is no worse than AdamW at AdamW's best learning rate.

    Attributes:
      passed: None while evidence is missing, unless what there is refutes it already: a divergence, or a lower
        confidence bound above what the upper one may be.
      pooled: all pairs of the language-model tasks at AdamW's best rate.
      tasks: the same by setting.
      failures: what speaks against it.
      missing: what is not known yet.
    """

    passed: bool | None
    pooled: Gap
    tasks: Mapping[Setting, Gap]
    failures: tuple[str, ...]
    missing: tuple[str, ...]


def gate(cells: Iterable[Cell], optimizer: str) -> Verdict:
    """Non-inferiority to AdamW over the language-model tasks.

    At AdamW's best rate of each task, chosen on other seeds and between others: at least `PAIRS` pairs, one task at
    least that had no part in any decision, the upper bound of the mean gap at most `POOLED_BOUND` over all pairs and
    `TASK_BOUND` in each task; and no divergence at that rate and at twice it.
    """
    tasks: dict[Setting, Gap] = {}
    failed: list[str] = []
    missing: list[str] = []
    refuted = False
    for setting, mine in by_setting(cells).items():
        if not quality_tasks.choose(setting.task).language:
            continue
        best = choose_best(mine, BASE)
        if best is None or not best.independent:
            missing.append(f"{setting.task}: AdamW's best rate is not chosen on other seeds")
            continue
        if best.edge:
            missing.append(f"{setting.task}: AdamW's best rate {best.rate:g} is at the edge of those tried")
        twice = rounded(2 * best.rate)
        tasks[setting] = found = gap(mine, optimizer, best.rate, best.rate)
        if found.pairs < 2:
            missing.append(f"{setting.task}: fewer than 2 pairs at AdamW's best rate {best.rate:g}")
        elif not found.upper <= TASK_BOUND:
            failed.append(f"{setting.task}: upper bound {found.upper:+.4f} above {TASK_BOUND}")
            refuted |= found.lower > TASK_BOUND
        if not any((cell.optimizer, cell.rate, cell.purpose) == (optimizer, twice, STUDY) for cell in mine):
            missing.append(f"{setting.task}: no run at {twice:g}, twice AdamW's best rate")
        for rate in (best.rate, twice):
            if seeds := failures(mine, optimizer, rate):
                failed.append(f"{setting.task}: diverged at {rate:g} with seeds {', '.join(map(str, seeds))}")
                refuted = True
    pooled = pool(tasks.values())
    if pooled.pairs < PAIRS:
        missing.append(f"{pooled.pairs} pairs of {PAIRS}")
    if not any(found.pairs and quality_tasks.choose(setting.task).held_out for setting, found in tasks.items()):
        missing.append("no pair on a held-out task")
    if pooled.pairs > 1 and not pooled.upper <= POOLED_BOUND:
        failed.append(f"pooled: upper bound {pooled.upper:+.4f} above {POOLED_BOUND}")
        refuted |= pooled.lower > POOLED_BOUND
    passed = False if refuted or (failed and not missing) else None if missing else True
    return Verdict(passed, pooled, tasks, tuple(failed), tuple(missing))
