"""The picture of a ladder: time over size per rung, operations per rung, the optimizer's share of a train step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gefen_jax.lab import plots
from gefen_jax.lab.ladder_rungs import RUNGS
from gefen_jax.lab.results import Result

LABELS = {"adamw": "AdamW", "gefen": "Gefen"}


def label(name: str) -> str:
    """An optimizer's name for people."""
    return LABELS.get(name, name)


def draw(results: Sequence[Result], path: Path | None = None) -> Figure:
    """Draw a ladder's results, of one or more optimizers; saved if there is a path."""
    optimizers = list(dict.fromkeys(r.config["optimizer"] for r in results))
    widest = max(2, len(optimizers))
    top = [f"time {name}" for name in optimizers] + ["."] * (widest - len(optimizers))
    bottom = ["events"] + ["share"] * (widest - 1)
    with plots.style():
        figure, axes = plots.panels(6.5 * widest, 8.4, [top, bottom])
        look = plots.looks(list(RUNGS))
        low = min(r.median for r in results if r.metric == "time")
        high = max(r.median for r in results if r.metric == "time")
        for name in optimizers:
            draw_times(axes[f"time {name}"], results, name, look)
            axes[f"time {name}"].set_ylim(low / 2, high * 6)  # and room for the legend
        draw_events(axes["events"], results, optimizers)
        draw_share(axes["share"], results, optimizers)
        if path is not None:
            plots.save(figure, path)
    return figure


def draw_times(axes: Axes, results: Sequence[Result], name: str, look: Mapping[str, plots.Look]) -> None:
    """Time per step over the number of parameters, a line per rung, a band from the 20th to the 80th percentile."""
    mine = [r for r in results if r.metric == "time" and r.config["optimizer"] == name]
    curves = {rung: [r for r in mine if r.config["rung"] == rung] for rung in RUNGS}
    for rung, found in curves.items():
        if found:
            sizes = [r.config["parameters"] for r in found]
            colour, dash, marker = look[rung]
            axes.plot(sizes, [r.median for r in found], dash, marker=marker, color=colour, label=rung)
            axes.fill_between(sizes, [r.p20 for r in found], [r.p80 for r in found], color=colour, alpha=0.15, lw=0)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms per step")
    best = "fused" if curves["fused"] else "whole step"
    gains = [a.median / b.median for a, b in zip(curves["eager"], curves[best])]
    axes.set_title(
        f"{label(name)}: {best} is {gains[0]:.0f}x faster than eager when small, {gains[-1]:.1f}x when large"
    )
    axes.legend(fontsize=9, loc="upper left", ncols=3)


def draw_events(axes: Axes, results: Sequence[Result], optimizers: Sequence[str]) -> None:
    """Operations that the executor ran in a step of the smallest size, a bar per rung and optimizer."""
    chosen = [r for r in results if r.metric == "events"] or [r for r in results if r.metric == "launches"]
    smallest = min((r.config["parameters"] for r in chosen), default=0)
    values = {(r.config["optimizer"], r.config["rung"]): r for r in chosen if r.config["parameters"] == smallest}
    look, height = plots.looks(list(optimizers)), 0.8 / len(optimizers)
    for turn, name in enumerate(optimizers):
        axes.barh(0, 0, color=look[name].colour, label=label(name))
        for row, rung in enumerate(RUNGS):
            if (name, rung) in values:
                place, value = row - 0.4 + (turn + 0.5) * height, values[name, rung].median
                axes.barh(place, value, 0.9 * height, color=look[name].colour)
                axes.text(1.1 * value, place, f"{value:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(RUNGS)), list(RUNGS))
    axes.tick_params(axis="y", length=0, labelcolor=plots.INK)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    tensors = max((r.config["tensors"] for r in values.values()), default=0)
    found = [r.median for r in values.values()] or [1.0]
    axes.set(xscale="log", xlim=(min(found) / 2, 3 * max(found)), xlabel="operations per step")
    axes.legend(fontsize=9, loc="lower right")
    axes.set_title(f"{tensors} tensors: what one step makes the executor do")


def draw_share(axes: Axes, results: Sequence[Result], optimizers: Sequence[str]) -> None:
    """The optimizer's share of a train step over the number of parameters."""
    look = plots.looks(list(optimizers))
    tokens = 0
    for name in optimizers:
        found = [r for r in results if r.metric == "share of a train step" and r.config["optimizer"] == name]
        if found:
            colour, dash, marker = look[name]
            sizes, tokens = [r.config["parameters"] for r in found], found[0].config["tokens"]
            text = f"{label(name)}, {found[0].config['rung']}"
            axes.plot(sizes, [100 * r.median for r in found], dash, marker=marker, color=colour, label=text)
    axes.set(xscale="log", ylim=(0, None), xlabel="parameters", ylabel="% of forward + backward + step")
    axes.set_title(f"The optimizer's share of a train step of {tokens} tokens")
    axes.legend(fontsize=9)
