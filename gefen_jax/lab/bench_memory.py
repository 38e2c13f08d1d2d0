"""Bytes of optimizer state on real model shapes, against other optimizers.

State is counted by `jax.eval_shape` of ``tx.init``, so no memory is used. With ``--calibrated`` a plan is learned
first, from synthetic bfloat16 gradients whose squares have row and column structure: that takes 2 bytes per
parameter, and time.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import gefen, learn_plan
from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.lab import models, optimizers
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.language import LlamaConfig
from gefen_jax.lab.results import Result, check_file, table, write

NAME = "bench memory"
MODELS = ("gpt2-124m", "llama3-1.5b", "llama3-1.5b-scanned", "qwen3-1.7b")
GOALS = {"gpt2-124m": 1.05}
GOAL = 1.025
PEERS = ("adamw", "adamw_bf16", "adam_mini", "adam8bit", "adam4bit", "adafactor", "sm3", "lion", "muon")


def model_config(name: str) -> models.LanguageConfig:
    """A preset; the suffix "-scanned" stacks its layers along a leading axis."""
    if name.removesuffix("-scanned") not in models.LANGUAGE:
        known = ", ".join(models.LANGUAGE)
        raise UsageError(f"unknown model {name!r}; choose among: {known} (llama models also with -scanned)")
    config = models.preset(name.removesuffix("-scanned"))
    if not name.endswith("-scanned"):
        return config
    if not isinstance(config, LlamaConfig):
        raise UsageError(f"{name}: only llama models can stack their layers")
    return dataclasses.replace(config, scan=True)


def state_bytes(tx: optax.GradientTransformation, shapes: Any) -> int:
    """Bytes of ``tx``'s state for parameters of these shapes."""
    return tree_bytes(jax.eval_shape(tx.init, shapes))


def structured_gradients(shapes: Any, seed: int = 0) -> Any:
    """bfloat16 gradients with log-normal row and column scales: structure that a plan finds."""
    random = np.random.default_rng(seed)

    def leaf(s: Any) -> Any:
        columns = np.exp(random.normal(0, 1, s.shape[-1:] or ())).astype(np.float32)
        out = np.empty(s.shape, jnp.bfloat16)
        for index in np.ndindex(s.shape[:-2]):
            rows = np.exp(random.normal(0, 1, s.shape[-2:-1] + (1,))).astype(np.float32) if len(s.shape) > 1 else 1.0
            noise = random.standard_normal(s.shape[-2:], np.float32)
            out[index] = (noise * rows * columns).astype(jnp.bfloat16)
        return out

    return jax.tree.map(leaf, shapes)


def study(name: str, calibrated: bool, peers: bool) -> list[Result]:
    """All results of one model."""
    shapes = models.shapes(model_config(name))
    count = models.count(shapes)
    leaves = len(jax.tree.leaves(shapes))
    config = {"model": name, "parameters": count, "leaves": leaves}
    goal = {"goal": GOALS.get(name, GOAL)}
    bound = 8 + (20 * leaves + 1.1 * 1024) / count
    variants: dict[str, Any] = {"gefen": gefen(1e-3), "gefen, 4 bits": gefen(1e-3, bits=4)}
    if calibrated:
        plan = learn_plan(structured_gradients(shapes))
        variants["gefen, calibrated"] = gefen(1e-3, plan=plan)
    results = []
    for subject, tx in variants.items():
        per = state_bytes(tx, shapes) / count
        goals = {"goal": 0.55} if "4 bits" in subject else goal
        results.append(Result.of(NAME, subject, "state", "B/param", per, config=config | goals | {"bound": bound}))
    if peers and not name.endswith("-scanned"):  # stacked layers change nothing for them but need rules of their own
        for peer in PEERS:
            tx = optimizers.build(peer, model_config(name), 1e-3, steps=100)
            per = state_bytes(tx, shapes) / count
            results.append(Result.of(NAME, peer, "state", "B/param", per, config=config))
    return results


def show(results: list[Result]) -> str:
    """The table of one model."""
    config = results[0].config
    rows = []
    for result in results:
        goal = result.config.get("goal")
        verdict = "" if goal is None else f"<= {goal}: " + ("met" if result.median <= goal else "MISSED")
        rows.append(
            [result.subject, f"{result.median:.4f}", f"{result.median * config['parameters'] / 2**30:.3f}", verdict]
        )
    head = f"{config['model']}: {config['parameters']:,} parameters in {config['leaves']} leaves"
    return head + "\n" + table(["optimizer", "state B/param", "GiB", "goal"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated presets (default: %(default)s)")
    parser.add_argument("--calibrated", action="store_true", help="also learn a plan first; takes memory and time")
    parser.add_argument("--no-peers", action="store_true", help="leave out the other optimizers")
    parser.add_argument("--out", default="gefen-bench.jsonl", help="JSON-lines file to append to")


def run(args: argparse.Namespace) -> int:
    names = args.models.split(",")
    for name in names:  # wrong names are found before anything runs
        model_config(name)
    check_file(args.out)
    for name in names:
        results = study(name, args.calibrated, not args.no_peers)
        print(show(results) + "\n", flush=True)
        write(args.out, results)
    print(f"written to {args.out}")
    return 0
