"""Hand-made cells of the quality study."""

import numpy as np

from gefen_jax.lab.quality_cells import CHOICE, STUDY, Cell

ENVIRONMENT = {
    "python": "3.13.0",
    "packages": {"gefen-jax": "0.1.0", "jax": "0.12.0", "optax": "0.2.8"},
    "backend": "cpu",
    "device": "cpu",
    "commit": "0123456",
}


def cell(optimizer="adamw", **change):
    fields = {
        "task": "gpt",
        "optimizer": optimizer,
        "rate": 1e-3,
        "seed": 0,
        "steps": 40,
        "batch": 16,
        "weight_decay": 0.1,
        "b2": 0.99,
        "data": "abc",
        "purpose": STUDY,
        "loss": 2.0,
        "accuracy": 0.5,
        "validation": [(20, 2.5), (40, 2.0)],
        "training": [(20, 3.0), (40, 2.25)],
        "diverged": False,
        "parameters": 1000,
        "state_bytes": 8000 if optimizer == "adamw" else 1250,
        "peak_bytes": 20000 if optimizer == "adamw" else 15000,
        "step_seconds": 0.5,
        "step_cpu_seconds": 0.25 if optimizer == "adamw" else 0.3,
        "compile_seconds": 0.0,
        "environment": ENVIRONMENT,
        "time": 0.0,
    }
    return Cell(**(fields | change))


def study(task="gpt", *, gap, noise=0.005, seeds=range(16), rates=(1e-3, 2e-3), choice=None):
    """AdamW and Gefen over seeds and rates, Gefen's mean difference exactly `gap`, after a choice of rates."""
    choice = {5e-4: 2.0, 1e-3: 1.9, 2e-3: 2.0} if choice is None else choice
    cells = [cell(task=task, purpose=CHOICE, seed=100, rate=rate, loss=loss) for rate, loss in choice.items()]
    random = np.random.default_rng(0)
    for rate in rates:
        levels, noises = random.normal(2.0, 0.1, len(seeds)), random.normal(0, noise, len(seeds))
        noises -= noises.mean() - gap
        for seed, level, difference in zip(seeds, levels.tolist(), noises.tolist()):
            cells.append(cell(task=task, seed=seed, rate=rate, loss=level))
            cells.append(cell("gefen", task=task, seed=seed, rate=rate, loss=level + difference))
    return cells
