"""One paragraph from the numbers: what dominates the memory of a step, and which change would help most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gefen_jax.accounting.report import format_bytes, format_percent, format_seconds

__all__ = ["Change", "advise", "changes"]


@dataclass(frozen=True)
class Change:
    """Something to change: bytes saved at the peak (an estimate), and the sentence that says it."""

    saves: int
    sentence: str


def changes(
    parts: Mapping[str, int],
    *,
    undonated: int = 0,
    alternatives: Mapping[str, int] | None = None,
) -> list[Change]:
    """Changes that would lower the peak, the most helpful first.

    Args:
      parts: category -> bytes at the peak; "optimizer state", "activations" and "temporaries" are understood.
      undonated: bytes of parameters and state that exist twice because they are not donated.
      alternatives: optimizer -> bytes of its state, to compare with the present one.

    Examples:
      >>> found = changes({"optimizer state": 800, "activations": 100}, alternatives={"gefen": 103, "lion": 400})
      >>> found[0].saves
      697
    """
    found = []
    if undonated:
        found.append(
            Change(
                undonated,
                "donate the parameters and the optimizer state (jax.jit(step, donate_argnums=...)), which now exist"
                f" twice: saves {format_bytes(undonated)}",
            )
        )
    state = parts.get("optimizer state", 0)
    if alternatives:
        # the three smallest: the very smallest may be one without momentum, which is another algorithm
        ranked = sorted(alternatives, key=lambda key: alternatives[key])[:3]
        saved = state - alternatives[ranked[0]]
        listed = ", ".join(f"{key} {format_bytes(alternatives[key])}" for key in ranked)
        if saved > 0:
            found.append(Change(saved, f"an optimizer with a smaller state ({listed}; now {format_bytes(state)})"))
    activations = parts.get("activations", 0)
    if activations:
        found.append(
            Change(
                activations // 2,
                f"half the microbatch, with gradient accumulation (saves about {format_bytes(activations // 2)}), or"
                " jax.checkpoint on each layer (saves most of the activations for a third more FLOPs)",
            )
        )
    temporaries = parts.get("temporaries", 0)
    if temporaries and not activations:
        found.append(
            Change(
                temporaries // 2,
                "half the microbatch, or jax.checkpoint on each layer: temporaries (activations, gradients, work"
                f" space) would shrink by up to {format_bytes(temporaries // 2)}",
            )
        )
    return sorted(found, key=lambda change: -change.saves)


def advise(
    parts: Mapping[str, int],
    peak: int,
    *,
    undonated: int = 0,
    alternatives: Mapping[str, int] | None = None,
    events_per_step: float | None = None,
    seconds: float | None = None,
    mfu: float | None = None,
) -> str:
    """One paragraph: what dominates, and what would help most.

    Args:
      parts, undonated, alternatives: as in `changes`.
      peak: bytes at the peak.
      events_per_step: launches or executor events of a step, if profiled.
      seconds: time of a step, if measured.
      mfu: model FLOPs utilization, if known.

    Examples:
      >>> print(advise({"optimizer state": 800, "parameters": 400}, 1300, alternatives={"gefen": 103}))
      The peak is 1.27 KiB, of which optimizer state 800 B (61.5 %), parameters 400 B (30.8 %). The change that
      would help most: an optimizer with a smaller state (gefen 103 B; now 800 B).
    """
    ordered = sorted(((size, name) for name, size in parts.items() if size > 0), reverse=True)
    shares = ", ".join(
        f"{name} {format_bytes(size)} ({format_percent(size / peak if peak else None)})" for size, name in ordered[:4]
    )
    text = f"The peak is {format_bytes(peak)}, of which {shares}."
    found = changes(parts, undonated=undonated, alternatives=alternatives)
    if found:
        text += f" The change that would help most: {found[0].sentence}."
    if len(found) > 1:
        text += f" Next: {found[1].sentence}."
    # 20 us is a few times what a launch costs on a GPU and what a thread hand-over costs on a CPU
    if events_per_step and seconds and seconds / events_per_step < 20e-6:
        text += (
            f" The step is launch-bound: {events_per_step:g} events of"
            f" {format_seconds(seconds / events_per_step)} each;"
            " larger arrays (a larger microbatch, stacked layers, a fused optimizer) would use the device better."
        )
    elif mfu is not None and mfu < 0.2:
        text += f" MFU is only {format_percent(mfu)}: look at the times of the phases before the memory."
    return text
