"""The report of a quality study: one Markdown file and a few plots, made from the cells alone."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gefen_jax.lab import quality_momentum, quality_plots, quality_stats, quality_tasks, quality_variants
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.quality_cells import STUDY, Cell, Setting, rounded
from gefen_jax.lab.quality_stats import BASE, Best, Gap, Verdict
from gefen_jax.lab.results import Result

REPORT = "README.md"


class Column(NamedTuple):
    """A kind of comparison: the optimizer's and AdamW's rate, from their best rates."""

    title: str
    rate: str  # "1x", "2x" or "best"


COLUMNS = (
    Column("at AdamW's best rate", "1x"),
    Column("at twice AdamW's best rate", "2x"),
    Column("each at its best rate", "best"),
)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Everything that the report says of one setting.

    Attributes:
      cells: its cells.
      bests: best rate by optimizer, where it is known.
      gaps: paired differences by (rate of the column, optimizer).
    """

    setting: Setting
    cells: list[Cell]
    bests: Mapping[str, Best]
    gaps: Mapping[tuple[str, str], Gap]

    @property
    def optimizers(self) -> list[str]:
        return ordered({cell.optimizer for cell in self.cells})

    @property
    def language(self) -> bool:
        return quality_tasks.choose(self.setting.task).language


def analyse(cells: Sequence[Cell]) -> list[TaskResult]:
    """The results by setting."""
    found = []
    for setting, mine in quality_stats.by_setting(cells).items():
        names = ordered({cell.optimizer for cell in mine})
        bests = {name: best for name in names if (best := quality_stats.choose_best(mine, name)) is not None}
        gaps = {}
        base = bests.get(BASE)
        for name in names:
            if base is None:
                continue
            twice = rounded(2 * base.rate)
            gaps["1x", name] = quality_stats.gap(mine, name, base.rate, base.rate)
            gaps["2x", name] = quality_stats.gap(mine, name, twice, twice)
            if name in bests:
                gaps["best", name] = quality_stats.gap(mine, name, bests[name].rate, base.rate)
        found.append(TaskResult(setting, mine, bests, gaps))
    return found


def ordered(names: Iterable[str]) -> list[str]:
    """Optimizers in the order of their registry."""
    order = {name: i for i, name in enumerate(quality_variants.VARIANTS)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def label(name: str) -> str:
    """An optimizer's name for people."""
    return quality_variants.VARIANTS[name].label if name in quality_variants.VARIANTS else name


def write(cells: Sequence[Cell], folder: Path, codebooks: Sequence[Result] = ()) -> list[Path]:
    """Write the report; returns the files.

    Raises:
      UsageError: there are no cells, or the folder cannot be written.
    """
    if not any(cell.purpose == STUDY for cell in cells):
        raise UsageError("there is no finished run of a study in these files yet")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {str(folder)!r}: cannot write there ({error.strerror})") from error
    results = analyse(cells)
    plots = quality_plots.draw(results, folder)
    path = folder / REPORT
    path.write_text(markdown(results, cells, [plot.name for plot in plots], codebooks), encoding="utf-8")
    return [path, *plots]


def language_table(cells: Sequence[Cell]) -> str:
    """The Markdown table of the language-model tasks; raises `UsageError` without any."""
    language = [result for result in analyse(cells) if result.language]
    if not language:
        raise UsageError("there is no run of a language-model task in these files yet")
    return pooled_table(language)


def markdown(
    results: Sequence[TaskResult], cells: Sequence[Cell], plots: Sequence[str], codebooks: Sequence[Result]
) -> str:
    """The report's text."""
    language = [result for result in results if result.language]
    parts = ["# Quality study", introduction(cells)]
    if language:
        parts += ["## No worse than AdamW?", gate_section(cells, ordered({c.optimizer for c in cells}))]
        parts += [f"## {len(language)} language-model tasks together", pooled_table(language)]
    parts += [f"![{name}]({name})" for name in plots]
    for result in results:
        parts += [f"## {heading(result.setting, results)}", task_table(result)]
    if codebooks:
        parts += ["## Codebooks", codebook_section(codebooks)]
    parts += ["## Missing", missing_section(results)]
    return "\n\n".join(parts) + "\n"


def introduction(cells: Sequence[Cell]) -> str:
    """What was run, with what, and how to read the numbers."""
    environments = [cell.environment for cell in cells]

    def all_of(*path: str) -> str:
        found = []
        for environment in environments:
            value = environment
            for name in path:
                value = value[name]
            found.append(str(value))
        return ", ".join(dict.fromkeys(found))

    commits = all_of("commit")
    return (
        f"{len(cells)} runs: every optimizer from the same initial parameters, on the same batches, with gradients "
        f"clipped to norm 1, warm-up and cosine decay, weight decay {cells[0].weight_decay:g}, b2 {cells[0].b2:g}. "
        "Differences are last validation losses minus AdamW's of the same seed, in nats per prediction: mean, plus or "
        "minus its standard error, and in parentheses the one-sided upper 95 % confidence bound of the mean; minus is "
        "better than AdamW. Step time is that of the whole training step, CPU time where it ran on a CPU.\n\n"
        f"gefen-jax {all_of('packages', 'gefen-jax')} at commit {commits}; jax {all_of('packages', 'jax')}, optax "
        f"{all_of('packages', 'optax')}, Python {all_of('python')}, {all_of('device')}. Written by "
        "`gefen-jax bench quality report`."
    )


def heading(setting: Setting, results: Sequence[TaskResult]) -> str:
    """A setting's name for people; what tells it from others of the same task is added."""
    same = [result.setting for result in results if result.setting.task == setting.task]
    extra = [f"{setting.steps} steps of {setting.batch}"]
    if len({other.data for other in same}) > 1:
        extra.append(f"data {setting.data}")
    if len({(other.weight_decay, other.b2) for other in same}) > 1:
        extra.append(f"weight decay {setting.weight_decay:g}, b2 {setting.b2:g}")
    return f"{setting.task}: {quality_tasks.choose(setting.task).label} ({', '.join(extra)})"


def gate_section(cells: Sequence[Cell], optimizers: Sequence[str]) -> str:
    """The verdict on every optimizer, with the reasons."""
    verdicts = {name: quality_stats.gate(cells, name) for name in optimizers if name != BASE}
    rows = [
        [label(name), answer(verdict), format_gap(verdict.pooled), "; ".join(reasons(verdict)) or "nothing"]
        for name, verdict in verdicts.items()
    ]
    rule = (
        "Over the language-model tasks, at AdamW's best learning rate, chosen on other seeds: the upper 95 % bound of "
        f"the mean difference is at most {quality_stats.POOLED_BOUND} nats over all pairs (at least "
        f"{quality_stats.PAIRS}, one task among them that had no part in any decision) and "
        f"{quality_stats.TASK_BOUND} in each task, and nothing diverges there or at twice that rate."
    )
    return rule + "\n\n" + table(["", "verdict", "difference", "against it, or missing"], rows)


def answer(verdict: Verdict) -> str:
    """The verdict in a word."""
    return {True: "**yes**", False: "no", None: "open"}[verdict.passed]


def reasons(verdict: Verdict) -> list[str]:
    """What speaks against it, and what is missing."""
    return [*verdict.failures, *(f"missing: {what}" for what in verdict.missing)]


def pooled_table(results: Sequence[TaskResult]) -> str:
    """Differences over all pairs of these tasks, and costs."""
    names = ordered({name for result in results for name in result.optimizers})
    rows = []
    for name in names:
        gaps = [
            quality_stats.pool(result.gaps.get((column.rate, name), Gap(())) for result in results)
            for column in COLUMNS
        ]
        cells = [cell for result in results for cell in result.cells]
        rows.append([label(name), *costs(cells, name), *(("" if name == BASE else format_gap(gap)) for gap in gaps)])
    return table(["", "state, B/param", "peak", "step time", *(column.title for column in COLUMNS)], rows)


def task_table(result: TaskResult) -> str:
    """Losses and differences of one task."""
    rows = []
    for name in result.optimizers:
        best = result.bests.get(name)
        shown = "" if best is None else f"{best.rate:g}" + ("" if best.independent else "*")
        loss = mean_loss(result, name)
        gaps = [result.gaps.get((column.rate, name), Gap(())) for column in COLUMNS]
        rows.append(
            [
                label(name),
                shown,
                loss,
                *costs(result.cells, name),
                *(("" if name == BASE else format_gap(gap)) for gap in gaps),
            ]
        )
    head = ["", "best rate", "loss at AdamW's best rate", "state, B/param", "peak", "step time"]
    notes = failures(result)
    if any(not best.independent for best in result.bests.values()):
        notes.append("\\* chosen among the compared runs themselves, or the only rate")
    return "\n\n".join([table([*head, *(column.title for column in COLUMNS)], rows), *notes])


def mean_loss(result: TaskResult, name: str) -> str:
    """Mean of the last validation losses at AdamW's best rate."""
    base = result.bests.get(BASE)
    losses = [
        cell.loss
        for cell in result.cells
        if base is not None and (cell.optimizer, cell.rate, cell.purpose) == (name, base.rate, STUDY)
    ]
    return f"{np.mean(losses):.4f}" if losses else ""


def failures(result: TaskResult) -> list[str]:
    """A line for every optimizer and rate that diverged."""
    lines = []
    for name in result.optimizers:
        for rate in sorted({cell.rate for cell in result.cells if cell.optimizer == name}):
            if seeds := quality_stats.failures(result.cells, name, rate):
                lines.append(f"{label(name)} diverged at {rate:g} with seeds {', '.join(map(str, seeds))}.")
    return lines


def costs(cells: Sequence[Cell], name: str) -> list[str]:
    """State bytes per parameter, and peak and step time relative to AdamW's, as medians over pairs."""
    mine = [cell for cell in cells if cell.optimizer == name]
    base = {(cell.setting, cell.seed, cell.rate): cell for cell in cells if cell.optimizer == BASE}
    state = sorted({round(cell.state_bytes / cell.parameters, 3) for cell in mine})
    pairs = [(cell, base[pair]) for cell in mine if (pair := (cell.setting, cell.seed, cell.rate)) in base]

    def ratio(field: str) -> str:
        found = [getattr(cell, field) / getattr(other, field) for cell, other in pairs]
        return f"{np.median(found):.2f}x" if found else ""

    on_cpu = all(cell.environment["backend"] == "cpu" for cell in mine)
    shown = f"{state[0]:.2f}" if state[-1] - state[0] < 0.01 else f"{state[0]:.2f} to {state[-1]:.2f}"
    return [shown, ratio("peak_bytes"), ratio("step_cpu_seconds" if on_cpu else "step_seconds")]


def codebook_section(results: Sequence[Result]) -> str:
    """How well families of codebooks fit momentum, and for how long."""
    samples = ", ".join(str(count) for count in sorted({result.samples for result in results}))
    text = (
        "Squared error of codebooks on the first moment of AdamW, in the blocks of the shape rule, relative to that of "
        "words learned from the same moment: 1 means that calibrating again would gain nothing. Medians over "
        f"{samples} seeds."
    )
    parts = [text]
    for title, head, rows in quality_momentum.tables(results):
        parts += [f"**{title}**", table(head, rows)]
    return "\n\n".join(parts)


def missing_section(results: Sequence[TaskResult]) -> str:
    """What a complete study of these optimizers would have beyond these runs."""
    lines = []
    for result in results:
        base = result.bests.get(BASE)
        name = result.setting.task
        if base is None:
            lines.append(f"{name}: no run of AdamW.")
            continue
        if not base.independent:
            lines.append(f"{name}: AdamW's best rate was not chosen on seeds of its own.")
        elif base.edge:
            lines.append(f"{name}: AdamW's best rate {base.rate:g} is at the edge of those tried.")
        most = max((gap.pairs for gap in result.gaps.values()), default=0)
        for column in COLUMNS[:2]:
            short = [
                f"{label(optimizer)} {gap.pairs}"
                for optimizer in result.optimizers
                if (gap := result.gaps[column.rate, optimizer]).pairs < most
            ]
            if short:
                lines.append(f"{name}, {column.title}, fewer pairs than {most}: {'; '.join(short)}.")
        untuned = [label(o) for o in result.optimizers if o not in result.bests or not result.bests[o].independent]
        if untuned:
            lines.append(f"{name}: own best rate not chosen on seeds of its own: {'; '.join(untuned)}.")
    present = {result.setting.task for result in results}
    absent = [name for name, task in quality_tasks.TASKS.items() if name not in present and not task.trial]
    if absent:
        lines.append(f"Tasks without a run: {', '.join(absent)}.")
    return "\n".join(f"* {line}" for line in lines) or "Nothing."


def format_gap(gap: Gap) -> str:
    """A difference for people.

    >>> format_gap(Gap((0.0, 0.01, 0.02, 0.01))), format_gap(Gap(()))
    ('+0.0100 ± 0.0041 (+0.0196), 4 pairs', '')
    """
    if not gap.pairs:
        return ""
    if math.isinf(gap.mean):
        return f"not finite, {gap.pairs} pairs"
    if gap.pairs == 1:
        return f"{gap.mean:+.4f}, 1 pair"
    return f"{gap.mean:+.4f} ± {gap.error:.4f} ({gap.upper:+.4f}), {gap.pairs} pairs"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
