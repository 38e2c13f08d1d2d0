"""The picture of a demo: losses, their difference, optimizer state, peak memory, the state of a real model."""

import math
from pathlib import Path

from matplotlib.axes import Axes

from gefen_jax.lab import plots
from gefen_jax.lab.record import Record
from gefen_jax.lab.report import NAMES

SHOWN = "llama3-1.5b"  # the real model
MIB, GIB = 2**20, 2**30

Looks = dict[str, plots.Look]


def draw(records: list[Record], step: int, real: dict[str, dict[str, int]], caption: str, path: Path) -> None:
    """Draw a run and save it.

    Args:
      records: one per optimizer; the first is what the others are compared with.
      step: the last at which all have a validation loss.
      real: bytes of optimizer state by model and optimizer.
      caption: what was run where.
      path: of the PNG file.
    """
    with plots.style():
        figure, axes = plots.panels(
            13,
            7.2 + 0.8 * max(0, len(records) - 3),
            [["loss", "state"], ["loss", "real"], ["gap", "peak"]],
            width_ratios=[1.35, 1],
            height_ratios=[1, 1, 1],
        )
        look = plots.looks([record.name for record in records])
        draw_losses(axes["loss"], records, step, look)
        draw_gaps(axes["gap"], records, step, look)
        draw_state(axes["state"], records, look)
        draw_peak(axes["peak"], records)
        draw_real(axes["real"], records, real[SHOWN], look)
        figure.suptitle(caption, x=0.008, ha="left", fontsize=9, color=plots.MUTED)
        plots.save(figure, path)


def draw_losses(axes: Axes, records: list[Record], step: int, look: Looks) -> None:
    for record in records:
        colour, dash, marker = look[record.name]
        losses = record.validation_losses()
        if record.train_loss:
            smoothed = plots.smooth(record.train_loss, max(1, record.steps // 40))
            axes.plot(range(1, record.steps + 1), smoothed, color=colour, alpha=0.35, linewidth=1)
        axes.plot(*zip(*losses.items()), color=colour, linestyle=dash, marker=marker, label=record.label)
    ends = [f"{record.label} {record.validation_losses()[step]:.3f}" for record in records]
    axes.set_title(f"Loss after {step} steps: {listed(ends)} nats per byte")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_ylim(*visible([loss for record in records for _, loss, _ in record.validation]))
    axes.legend(loc="upper right", title="validation (faint: training, smoothed)")


def draw_gaps(axes: Axes, records: list[Record], step: int, look: Looks) -> None:
    base, *others = records
    axes.axhline(0, color=look[base.name].colour, linewidth=1.5)
    losses = base.validation_losses()
    ends: list[str] = []
    reaches: list[float] = []
    for record in others:
        colour, dash, marker = look[record.name]
        gaps = {at: loss - losses[at] for at, loss in record.validation_losses().items() if at in losses}
        axes.plot(*zip(*gaps.items()), color=colour, linestyle=dash, marker=marker)
        ends.append(f"{record.label} {gaps[step]:+.4f}")
        reaches += map(abs, gaps.values())
    axes.set_title(f"Difference to {base.label}, same batches: {listed(ends) or 'nothing to compare'}")
    axes.set_ylim(*around_zero(reaches))
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")


def draw_state(axes: Axes, records: list[Record], look: Looks) -> None:
    values = [record.state_bytes_per_parameter for record in records]
    plots.horizontal_bars(axes, labels(records), values, colours(records, look))
    plots.note_bars(axes, [f"{v:.2f}  ({r.state_bytes / MIB:.2f} MiB)" for v, r in zip(values, records)], values)
    axes.set_title(f"Optimizer state: {instead(values, '.2f')} bytes per parameter")
    axes.set_xlabel("bytes per parameter")


def draw_peak(axes: Axes, records: list[Record]) -> None:
    peaks = [record.peak_bytes / MIB for record in records]
    parameters = [record.device_parameter_bytes / MIB for record in records]
    states = [record.device_state_bytes / MIB for record in records]
    rest = [peak - p - s for peak, p, s in zip(peaks, parameters, states)]
    parts = {"parameters": parameters, "optimizer state": states, "gradients, activations": rest}
    plots.stacked_bars(axes, labels(records), parts)
    plots.note_bars(axes, [f"{peak:.1f} MiB" for peak in peaks], peaks)
    several = any(record.device_state_bytes < record.state_bytes for record in records)
    where = " on one of the devices" if several else ""
    axes.set_title(f"Peak memory of a training step{where}: {instead(peaks, '.1f')} MiB")
    axes.set_xlabel("MiB, by XLA's analysis of the compiled step")


def draw_real(axes: Axes, records: list[Record], states: dict[str, int], look: Looks) -> None:
    values = [states[record.name] / GIB for record in records]
    plots.horizontal_bars(axes, labels(records), values, colours(records, look))
    plots.note_bars(axes, [f"{value:.2f} GiB" for value in values], values)
    axes.set_title(f"The same for a {NAMES[SHOWN]}: {instead(values, '.1f')} GiB")
    axes.set_xlabel("GiB, from the model's shapes")


def labels(records: list[Record]) -> list[str]:
    return [record.label for record in records]


def colours(records: list[Record], look: Looks) -> list[str]:
    return [look[record.name].colour for record in records]


def listed(words: list[str]) -> str:
    return ", ".join(words[:2]) + (", ..." if words[2:] else "")


def instead(values: list[float], form: str) -> str:
    """The values in words.

    >>> instead([8.0, 1.0], ".1f"), instead([8.0, 1.0, 9.0], ".0f"), instead([8.0], ".0f")
    ('1.0 instead of 8.0', '1 to 9', '8')
    """
    first, *rest = (format(value, form) for value in values)
    if len(rest) == 1:
        return f"{rest[0]} instead of {first}"
    return f"{format(min(values), form)} to {format(max(values), form)}" if rest else first


def visible(losses: list[float]) -> tuple[float, float]:
    """Limits that show where the curves end, and leave the fall from the untrained model above the picture.

    >>> visible([5.0, 3.0, 2.0, 1.9, float("nan")])
    (1.79, 3.2)
    """
    finite = sorted(loss for loss in losses if math.isfinite(loss)) or [0.0]
    low, high = finite[0], finite[int(0.85 * (len(finite) - 1))]
    span = (high - low) or 0.1
    return round(low - 0.1 * span, 4), round(high + 0.1 * span + 0.09, 4)


def around_zero(reaches: list[float]) -> tuple[float, float]:
    """Limits symmetric around zero: nine tenths of the points are inside, and at least 0.01 nats to either side."""
    finite = sorted(reach for reach in reaches if math.isfinite(reach)) or [0.0]
    reach = 1.3 * max(finite[int(0.9 * (len(finite) - 1))], 0.01)
    return -reach, reach
