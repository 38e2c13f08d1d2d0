"""The plots of a quality study."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gefen_jax.lab import plots, quality_stats
from gefen_jax.lab.quality_cells import CHOICE, STUDY
from gefen_jax.lab.quality_stats import BASE
from gefen_jax.lab.quality_variants import VARIANTS

if TYPE_CHECKING:
    from gefen_jax.lab.quality_report import TaskResult

DPI = 80  # the report is committed: small files
ACROSS = 3  # panels side by side


def draw(results: Sequence["TaskResult"], folder: Path) -> list[Path]:
    """Draw everything there is something of; returns the files."""
    drawings = {"differences.png": draw_gaps, "curves.png": draw_curves, "rates.png": draw_rates}
    with plots.style():
        return [folder / name for name, drawing in drawings.items() if drawing(results, folder / name)]


def names_of(results: Sequence["TaskResult"]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.optimizers))


def label(name: str) -> str:
    return VARIANTS[name].label if name in VARIANTS else name


def rows_of(tasks: Sequence[str]) -> list[list[str]]:
    """Names of panels in rows; what is left of the last row stays empty.

    >>> rows_of(["a", "b", "c", "d"])
    [['a', 'b', 'c'], ['d', '.', '.']]
    """
    across = min(ACROSS, len(tasks))
    padded = [*tasks, *["."] * (-len(tasks) % across)]
    return [padded[i : i + across] for i in range(0, len(padded), across)]


def draw_gaps(results: Sequence["TaskResult"], path: Path) -> bool:
    """Mean differences at AdamW's best rate with the interval between both one-sided bounds, a panel per task."""
    shown = [result for result in results if any(gap.pairs for (rate, _), gap in result.gaps.items() if rate == "1x")]
    others = [name for name in names_of(shown) if name != BASE]
    if not shown or not others:
        return False
    look = plots.looks([BASE, *others])
    layout = rows_of([result.setting.task for result in shown])
    height = len(layout) * (0.26 * len(others) + 1)
    figure, axes = plots.panels(3.2 * len(layout[0]) + 1.6, height, layout, sharey=True)
    for result in shown:
        panel = axes[result.setting.task]
        panel.axvline(0, color=look[BASE].colour, linewidth=1.5)
        panel.axvspan(-quality_stats.POOLED_BOUND, quality_stats.POOLED_BOUND, color=plots.GRID, zorder=0)
        for row, name in enumerate(others):
            gap = result.gaps.get(("1x", name))
            if gap is None or not gap.pairs or math.isinf(gap.mean):
                continue
            colour, _, marker = look[name]
            reach = gap.upper - gap.mean if gap.pairs > 1 else 0.0
            panel.errorbar(gap.mean, row, xerr=reach, color=colour, marker=marker, linestyle="", capsize=3)
        panel.set_yticks(range(len(others)), [label(name) for name in others])
        panel.set_ylim(len(others) - 0.5, -0.5)
        panel.set_title(result.setting.task)
        panel.set_xlabel("nats above AdamW")
        panel.xaxis.set_major_locator(MaxNLocator(5))
    figure.savefig(path, dpi=DPI)
    return True


def draw_curves(results: Sequence["TaskResult"], path: Path) -> bool:
    """Training losses at AdamW's best rate (band: a standard deviation over seeds), and paired differences below."""
    shown = [result for result in results if BASE in result.bests]
    if not shown:
        return False
    names = names_of(shown)
    look = plots.looks(names)
    tasks = [result.setting.task for result in shown]
    layout = [
        [cell if cell == "." else f"{cell} {what}" for cell in row]
        for row in rows_of(tasks)
        for what in ("loss", "gap")
    ]
    figure, axes = plots.panels(3.8 * len(layout[0]), 2.4 * len(layout) + 1, layout)
    handles: dict[str, Artist] = {}
    for task, result in zip(tasks, shown):
        steps = [step for step, _ in result.cells[0].training]
        curves = {name: curves_of(result, name) for name in names}
        base = curves[BASE]
        for name in names:
            if curves[name]:
                band(axes[f"{task} loss"], steps, list(curves[name].values()), look[name], label(name), error=False)
            if name != BASE and (pairs := curves[name].keys() & base.keys()):
                differences = [curves[name][seed] - base[seed] for seed in pairs]
                band(axes[f"{task} gap"], steps, differences, look[name], label(name), error=True)
        axes[f"{task} loss"].set_title(f"{task}: training loss, nats")
        axes[f"{task} loss"].set_ylim(*upper_part(np.concatenate([*base.values(), np.zeros(0)]).tolist()))
        axes[f"{task} gap"].set_title("minus AdamW's, ± standard error")
        axes[f"{task} gap"].axhline(0, color=look[BASE].colour, linewidth=1.5)
        axes[f"{task} gap"].set_xlabel("step")
        lines, labels = axes[f"{task} loss"].get_legend_handles_labels()
        handles |= dict(zip(labels, lines))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=DPI)
    return True


def curves_of(result: "TaskResult", name: str) -> dict[int, np.ndarray]:
    """Training losses by seed, of the study's runs at AdamW's best rate."""
    rate = result.bests[BASE].rate
    return {
        cell.seed: np.asarray([loss for _, loss in cell.training])
        for cell in result.cells
        if (cell.optimizer, cell.rate, cell.purpose) == (name, rate, STUDY)
    }


def band(
    axes: Axes, steps: Sequence[int], curves: Sequence[np.ndarray], look: plots.Look, name: str, *, error: bool
) -> None:
    """The mean of curves, and a band of their standard deviation, or of the mean's standard error."""
    values = np.stack(curves)
    mean = values.mean(axis=0)
    axes.plot(steps, mean, color=look.colour, linestyle=look.dash, linewidth=1.5, label=name)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1) / (math.sqrt(len(values)) if error else 1)
        axes.fill_between(steps, mean - spread, mean + spread, color=look.colour, alpha=0.18, linewidth=0)


def upper_part(losses: Sequence[float]) -> tuple[float, float]:
    """Limits that show where curves end rather than where they start."""
    finite = sorted(loss for loss in losses if math.isfinite(loss)) or [0.0, 1.0]
    low, high = finite[0], finite[int(0.8 * (len(finite) - 1))]
    margin = 0.1 * (high - low) + 0.01
    return low - margin, high + margin


def draw_rates(results: Sequence["TaskResult"], path: Path) -> bool:
    """Mean last validation loss over the learning rate, from the runs that choose the rates."""
    shown = [
        (result, names)
        for result in results
        if (names := [name for name in result.optimizers if len(choice_losses(result, name)) > 1])
    ]
    if not shown:
        return False
    look = plots.looks(list(dict.fromkeys(name for _, names in shown for name in names)))
    layout = rows_of([result.setting.task for result, _ in shown])
    figure, axes = plots.panels(3.6 * len(layout[0]), 2.8 * len(layout), layout)
    for result, names in shown:
        panel = axes[result.setting.task]
        for name in names:
            colour, dash, marker = look[name]
            losses = choice_losses(result, name)
            panel.plot(*zip(*sorted(losses.items())), color=colour, linestyle=dash, marker=marker, label=label(name))
        panel.set_xscale("log", base=2)
        ticks = sorted({rate for name in names for rate in choice_losses(result, name)})
        panel.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        panel.set_title(f"{result.setting.task}: loss by learning rate")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
    return True


def choice_losses(result: "TaskResult", name: str) -> dict[float, float]:
    """Mean last validation loss by rate."""
    found: dict[float, list[float]] = {}
    for cell in result.cells:
        if cell.optimizer == name and cell.purpose == CHOICE:
            found.setdefault(cell.rate, []).append(cell.loss)
    return {rate: float(np.mean(losses)) for rate, losses in found.items() if np.all(np.isfinite(losses))}
