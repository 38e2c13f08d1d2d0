"""What the demo says."""

import math
from typing import Any

from rich.table import Table

from gefen_jax.accounting.report import format_bytes
from gefen_jax.lab.data import Text
from gefen_jax.lab.record import Record
from gefen_jax.lab.tasks import Task

NAMES = {"gpt2-124m": "GPT-2 124M", "llama3-1.5b": "Llama-3-style 1.5B", "qwen3-1.7b": "Qwen3-style 1.7B"}


def heading(settings: Any, task: Task, text: Text) -> str:
    """What is about to run."""
    return (
        f"{settings.model}: {settings.steps} steps of {settings.batch} x {task.length} bytes, "
        f"peak learning rate {settings.learning_rate:g}, seed {settings.seed}{divided(settings)}\n"
        f"text: {text.source}: {text.train.size:,} bytes to train and {text.validation.size:,} to validate on\n"
        "compiling a training step for each optimizer ..."
    )


def caption(settings: Any, parameters: int, task: Task, text: Text, env: dict[str, Any]) -> str:
    """What was run where, for the head of the picture."""
    return (
        f"{settings.model}, {parameters:,} parameters, on {text.source}; {settings.batch} x {task.length} "
        f"bytes a step, peak learning rate {settings.learning_rate:g}, seed {settings.seed}{divided(settings)}; "
        f"{env['device']} ({env['threads']} threads), jax {env['packages']['jax']}"
    )


def divided(settings: Any) -> str:
    """On how many devices, if on several."""
    return f", fully sharded over {settings.devices} devices" if settings.devices > 1 else ""


def results(records: list[Record], step: int, devices: int = 1) -> Table:
    """One row per optimizer: loss, state, peak, time; the first is what the others are compared with."""
    base = records[0]
    table = Table(title=f"After {step} steps", title_justify="left", title_style="bold", box=None)
    table.add_column("")
    for title in (
        "validation\nloss, nats",
        f"minus\n{base.label}",
        "optimizer\nstate",
        "bytes per\nparameter",
        *(["state on\none device"] if devices > 1 else []),
        "peak of\na step" if devices == 1 else "peak on\none device",
        "step\ntime",
        f"over\n{base.label}",
    ):
        table.add_column(title, justify="right")
    for record in records:
        loss, times, base_times = record.validation_losses()[step], record.step_time(), base.step_time()
        table.add_row(
            record.label,
            f"{loss:.4f}",
            "" if record is base else f"{loss - base.validation_losses()[step]:+.4f}",
            format_bytes(record.state_bytes),
            f"{record.state_bytes_per_parameter:.2f}",
            *([format_bytes(record.device_state_bytes)] if devices > 1 else []),
            format_bytes(record.peak_bytes),
            f"{1000 * times.median:.0f} ms" if times else "",
            f"{times.median / base_times.median:.2f}x" if times and base_times and record is not base else "",
        )
    return table


def real_models(states: dict[str, dict[str, int]], records: list[Record]) -> Table:
    """The optimizer state of models too large to train here."""
    title = "\nOptimizer state of real models, from their shapes"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("")
    for model in states:
        table.add_column(NAMES[model], justify="right")
    for record in records:
        table.add_row(record.label, *(format_bytes(state[record.name]) for state in states.values()))
    return table


def finding(records: list[Record], step: int) -> str:
    """The result in a sentence per optimizer, and what one run cannot say."""
    base = records[0]
    lines = [""]
    for record in records[1:]:
        gap = record.validation_losses()[step] - base.validation_losses()[step]
        state = f"with {record.state_bytes / base.state_bytes:.2f} times its optimizer state"
        if math.isfinite(gap):
            side = "above" if gap >= 0 else "below"
            lines.append(f"{record.label} is {abs(gap):.4f} nats per byte {side} {base.label}, {state}.")
        else:
            lines.append(f"The loss of {record.label} or {base.label} is not finite: a lower --lr may help.")
    if len(records) > 1:
        lines.append("One seed and one learning rate say little about a small difference: try others (--seed, --lr).")
    return "\n".join(lines)
