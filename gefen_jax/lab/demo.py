"""Train a small byte-level language model on real text with AdamW and with Gefen, and compare.

Both start from the same parameters and see the same batches, step by step in turn. Prints validation loss,
optimizer-state bytes, peak bytes and step time of each; writes demo.png and demo.json to --out. Ctrl-C ends it
early: everything measured so far is printed and written, and the exit code is 130. With --devices the parameters,
gradients and optimizer states are divided among several devices (FSDP), and the bytes of one are reported too.
"""

import argparse
import dataclasses
import datetime
import math
import os
import sys
import tempfile
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.lab import models, optimizers, picture, report
from gefen_jax.lab.data import fingerprint, load_text
from gefen_jax.lab.display import progress
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.machine import environment
from gefen_jax.lab.record import SCHEMA, Record, last_common_step, write_json
from gefen_jax.lab.sharded import data_mesh, divided, fsdp
from gefen_jax.lab.tasks import Task, text_task
from gefen_jax.lab.train import Run, fit, prepare

VALIDATIONS = 16  # during a run
TRAINABLE = 50_000_000  # parameters; larger presets exist to be counted, not trained
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run."""

    model: str
    data: str
    optimizers: tuple[str, ...]
    steps: int
    batch: int
    devices: int
    learning_rate: float  # AdamW's peak; others by `optimizers.Choice.rate`
    weight_decay: float
    b2: float
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--data",
        default=os.environ.get("GEFEN_DATA", "stdlib"),
        metavar="SPEC",
        help="text to learn: stdlib (the sources of Python's standard library), a file, a glob or "
        "module:callable; default: the environment variable GEFEN_DATA, else stdlib",
    )
    add("--model", default="llama", help=f"{', '.join(trainable_models())}; default: %(default)s")
    add(
        "--optimizers",
        default="adamw,gefen",
        metavar="A,B,...",
        help=f"the first is what the others are compared with; {', '.join(optimizers.OPTIMIZERS)}; "
        "default: %(default)s",
    )
    add("--steps", type=positive_int, default=600, help="default: %(default)s")
    add("--batch", type=positive_int, default=8, help="windows of text per step; default: %(default)s")
    add(
        "--devices",
        type=positive_int,
        default=1,
        metavar="N",
        help="train fully sharded over N devices, parts of the processor if there are no others; default: %(default)s",
    )
    add("--lr", type=positive_float, default=2e-3, help="AdamW's peak learning rate; default: %(default)s")
    add("--seed", type=seed, default=0, help="of parameters and batches; default: %(default)s")
    add(
        "--out",
        type=Path,
        default=Path("gefen-demo"),
        metavar="FOLDER",
        help="where demo.png and demo.json are written; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """The subcommand. Returns the exit code: 0, or 130 after Ctrl-C."""
    settings = settings_of(args)
    out = writable_folder(args.out)
    console = Console(width=None if sys.stdout.isatty() else 100)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    mesh = data_mesh(settings.devices) if settings.devices > 1 else None  # before anything else uses JAX
    text = load_text(settings.data)
    task = text_task(models.preset(settings.model), text)
    task = task if mesh is None else divided(task, mesh)
    console.print(report.heading(settings, task, text), highlight=False)
    runs, records = compile_all(settings, task, mesh)
    complete = train_in_lockstep(settings, task, runs, records, console)

    step = last_common_step(records)
    if step is None:
        raise KeyboardInterrupt  # Ctrl-C before anything was measured
    real = state_of_real_models(settings)
    env = environment()
    result = {
        "schema": SCHEMA,
        "kind": "demo",
        "started": started,
        "complete": complete,
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(task.config),
        "data": {
            "source": text.source,
            "train_bytes": text.train.size,
            "validation_bytes": text.validation.size,
            "sha256": fingerprint(text.train, text.validation),
        },
        "environment": env,
        "optimizers": [record.as_dict() for record in records],
        "state_of_real_models": real,
    }
    write_json(out / "demo.json", result)
    caption = report.caption(settings, records[0].parameters, task, text, env)
    picture.draw(records, step, real, caption, out / "demo.png")
    console.print(report.results(records, step, settings.devices), report.real_models(real, records))
    console.print(report.finding(records, step), highlight=False)
    if not complete:
        console.print(f"Stopped by Ctrl-C: compared at step {step} of {settings.steps}.", highlight=False)
    console.print(f"\nwrote {out / 'demo.png'} and {out / 'demo.json'}", highlight=False, soft_wrap=True)
    return 0 if complete else INTERRUPTED


def compile_all(settings: Settings, task: Task, mesh: Mesh | None) -> tuple[list[Run], list[Record]]:
    """One compiled run and one empty record per optimizer, all from the same parameters."""
    params = models.init(task.config, jax.random.key(settings.seed))
    shardings = None if mesh is None else fsdp(params, mesh)
    params = params if shardings is None else jax.device_put(params, shardings)
    first = next(task.batches(1, settings.batch, settings.seed))
    runs, records = [], []
    for name in settings.optimizers:
        choice = optimizers.choose(name)
        tx = optimizers.build(
            name,
            task.config,
            settings.learning_rate,
            settings.steps,
            weight_decay=settings.weight_decay,
            b2=settings.b2,
        )
        runs.append(prepare(task, tx, params, first, choice.prepare, shardings=shardings))
        rate = choice.rate * settings.learning_rate
        records.append(Record.of(name, choice.label, rate, models.count(params), runs[-1]))
    return runs, records


def train_in_lockstep(settings: Settings, task: Task, runs: list[Run], records: list[Record], console: Console) -> bool:
    """Step all runs in turn on the same batches, filling the records; False if Ctrl-C ended it.

    In turn, so that all meet the same state of the machine: their step times compare.
    """
    every = math.ceil(settings.steps / VALIDATIONS)
    fits = [
        fit(task, run, task.batches(settings.steps, settings.batch, settings.seed), settings.steps, every)
        for run in runs
    ]
    try:
        with progress(console, records, settings.steps) as display:
            for events in zip(*fits):
                for record, event in zip(records, events):
                    record.add(event)
                display.update()
    except KeyboardInterrupt:
        return False
    return True


def state_of_real_models(settings: Settings) -> dict[str, dict[str, int]]:
    """Bytes of optimizer state of models too large to train here, from their shapes alone."""
    found: dict[str, dict[str, int]] = {}
    for name in models.LANGUAGE:
        if name not in trainable_models():
            config = models.preset(name)
            shapes = models.shapes(config)
            found[name] = {"parameters": models.count(shapes)}
            for optimizer in settings.optimizers:
                tx = optimizers.build(optimizer, config, settings.learning_rate, settings.steps)
                found[name][optimizer] = tree_bytes(jax.eval_shape(tx.init, shapes))
    return found


def trainable_models() -> list[str]:
    return [name for name, config in models.LANGUAGE.items() if models.count(models.shapes(config)) < TRAINABLE]


def settings_of(args: argparse.Namespace) -> Settings:
    """The checked settings; raises `UsageError`."""
    names = tuple(name.strip() for name in args.optimizers.split(",") if name.strip())
    for name in names:
        optimizers.choose(name)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--optimizers {args.optimizers!r}: give one or more names, each once")
    models.preset(args.model)
    if args.model not in trainable_models():
        raise UsageError(
            f"--model {args.model}: too large for the demo; choose one of: {', '.join(trainable_models())}"
        )
    if args.batch % args.devices:
        raise UsageError(f"--batch {args.batch}: not a multiple of --devices {args.devices}")
    return Settings(
        model=args.model,
        data=args.data,
        optimizers=names,
        steps=args.steps,
        batch=args.batch,
        devices=args.devices,
        learning_rate=args.lr,
        weight_decay=0.1,
        b2=0.99,
        seed=args.seed,
    )


def writable_folder(path: Path) -> Path:
    """The folder, made if need be; refused now rather than after the training."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"--out {str(path)!r}: cannot write there ({error.strerror})") from error
    return path


def positive_int(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def positive_float(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0")
    return value


def seed(word: str) -> int:
    if not word.isdecimal() or int(word) >= 2**32:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 0 to 2^32 - 1")
    return int(word)
