"""The quality study: does an optimizer reach AdamW's loss, at AdamW's learning rate?

gefen-jax bench quality run --tasks gpt,llama --optimizers adamw,gefen --seeds 0-7 --out study.jsonl
gefen-jax bench quality codebooks --tasks gpt --out codebooks.jsonl
gefen-jax bench quality report study.jsonl codebooks.jsonl --out report

`run` trains tasks x optimizers x rates x seeds, each run from the same initial parameters and on the same batches for
all optimizers, and appends a JSON line for each. It may be stopped and started again: finished runs are skipped. Rates
such as 1x and 2x are multiples of AdamW's best, which is chosen first, on seeds of its own. `codebooks` measures how
well families of codebooks fit momentum, and for how long. `report` writes it all up: Markdown with tables and plots.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gefen_jax.lab import quality_cells, quality_momentum, quality_report, quality_tasks
from gefen_jax.lab.display import duration
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.quality_cells import Cell, Key
from gefen_jax.lab.quality_grid import Grid, parse_names, parse_seeds
from gefen_jax.lab.quality_runner import Runner
from gefen_jax.lab.quality_tasks import TASKS
from gefen_jax.lab.quality_variants import VARIANTS
from gefen_jax.lab.results import check_file, write
from gefen_jax.lab.results import table as results_table

STUDIES = Path(__file__).parent / "studies"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gefen-jax bench quality`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|codebooks|report")
    run = actions.add_parser("run", help="train, and append to a file", description="Train, and append to a file.")
    run.add_argument("--tasks", default="gpt,llama", metavar="NAMES", help=f"of {', '.join(TASKS)}; %(default)s")
    run.add_argument(
        "--optimizers",
        default="adamw,gefen,gefen_shapes,gefen_reference",
        metavar="NAMES",
        help=f"of {', '.join(VARIANTS)}; %(default)s",
    )
    run.add_argument(
        "--rates",
        default="1x,2x",
        metavar="RATES",
        help="peak learning rates: numbers, multiples of AdamW's best such as 2x, or best: each optimizer's own; "
        "%(default)s",
    )
    run.add_argument("--seeds", default="0-7", help="of the study; %(default)s")
    run.add_argument("--choice-rates", default="1e-3,2e-3,4e-3,8e-3", metavar="RATES", help="tried; %(default)s")
    run.add_argument("--choice-seeds", default="100-103", metavar="SEEDS", help="to choose rates; %(default)s")
    run.add_argument("--steps", type=int, default=400, help="of each run; %(default)s")
    run.add_argument("--data", metavar="SPEC", help="a text or images of your own, for all tasks; default: the task's")
    run.add_argument("--out", type=Path, default=Path("gefen-quality.jsonl"), metavar="FILE", help="%(default)s")
    books = actions.add_parser(
        "codebooks", help="compare families of codebooks", description="Compare families of codebooks."
    )
    books.add_argument("--tasks", default="gpt,llama", metavar="NAMES", help="%(default)s")
    books.add_argument("--rate", type=float, default=2e-3, help="AdamW's; %(default)s")
    books.add_argument("--seeds", default="0-2", help="%(default)s")
    books.add_argument("--steps", type=int, default=400, help="%(default)s")
    books.add_argument("--data", metavar="SPEC", help="a text or images of your own; default: the task's")
    books.add_argument("--out", type=Path, default=Path("gefen-codebooks.jsonl"), metavar="FILE", help="%(default)s")
    report = actions.add_parser("report", help="write tables and plots", description="Write tables and plots.")
    report.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="what `run` and `codebooks` wrote; default: the package's",
    )
    report.add_argument("--table", action="store_true", help="print the table of the language-model tasks instead")
    report.add_argument("--out", type=Path, default=Path("gefen-quality"), metavar="FOLDER", help="%(default)s")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    if args.action == "report":
        files = args.files or shipped()
        cells = quality_cells.read(files)
        if args.table:
            print(quality_report.language_table(cells))
            return 0
        written = quality_report.write(cells, args.out, quality_momentum.read(files))
        console.print(f"wrote {', '.join(map(str, written))}", highlight=False, soft_wrap=True)
        return 0
    if args.action == "codebooks":
        codebooks(args, console)
        return 0
    train(grid_of(args), args.data, args.out, console)
    return 0


def shipped() -> list[Path]:
    """The studies in this package."""
    return sorted(STUDIES.glob("*.jsonl"))


def codebooks(args: argparse.Namespace, console: Console) -> None:
    """Study codebooks, show the tables, append the results to the file."""
    seeds, tasks = parse_seeds(args.seeds), parse_names(args.tasks, "--tasks")
    for task in tasks:
        quality_tasks.choose(task)
    if not seeds or args.steps < 1 or not args.rate > 0:
        raise UsageError("--seeds, --steps and --rate: give at least one seed, one step and a rate above 0")
    check_file(args.out)
    for task in tasks:
        results = quality_momentum.study(
            task,
            rate=args.rate,
            seeds=seeds,
            steps=args.steps,
            data=args.data,
            progress=lambda seed: console.print(f"{task} seed {seed} done", highlight=False),  # noqa: B023
        )
        for title, head, rows in quality_momentum.tables(results):
            console.print(f"\n{title}\n{results_table(head, rows)}", highlight=False, soft_wrap=True)
        write(args.out, results)


def grid_of(args: argparse.Namespace) -> Grid:
    """The checked grid; raises `UsageError`."""
    rates = parse_names(args.choice_rates, "--choice-rates")
    try:
        choice_rates = tuple(quality_cells.rounded(float(rate)) for rate in rates)
    except ValueError as error:
        raise UsageError(f"--choice-rates: {error}") from error
    return Grid(
        tasks=parse_names(args.tasks, "--tasks"),
        optimizers=parse_names(args.optimizers, "--optimizers"),
        rates=parse_names(args.rates, "--rates"),
        seeds=parse_seeds(args.seeds),
        choice_rates=choice_rates,
        choice_seeds=parse_seeds(args.choice_seeds),
        steps=args.steps,
    )


def train(grid: Grid, data: str | None, out: Path, console: Console) -> None:
    """Run what is missing of a grid, appending to the file."""
    cells = quality_cells.read([out]) if out.exists() else []
    check_file(out)
    runner = Runner(data)

    def fingerprint(task: str) -> str:
        return runner.task(task).fingerprint

    with _display(console) as display:
        bar = display.add_task("", total=None)
        while todo := missing(grid, cells, fingerprint):
            for key in {(key.task, key.optimizer): key for key in todo}.values():
                runner.check(key)
            done = len(grid.purposes(fingerprint, cells)) - len(todo)
            for number, (key, purpose) in enumerate(todo.items(), 1):
                name = f"{key.task} {key.optimizer} {key.rate:g} seed {key.seed}"
                total = done + len(todo)
                before = (done + number - 1) * key.steps
                display.update(bar, description=name, total=total * key.steps, completed=before)
                start = time.perf_counter()
                cell = runner.run(key, purpose, lambda steps: display.update(bar, completed=before + steps))  # noqa: B023
                quality_cells.append(out, cell)
                cells.append(cell)
                line = f"{done + number}/{total} {name}: {cell.loss:.4f}{' diverged' if cell.diverged else ''}"
                display.console.print(
                    f"{line}, {duration(time.perf_counter() - start)}", highlight=False, soft_wrap=True
                )


def missing(grid: Grid, cells: list[Cell], fingerprint: Callable[[str], str]) -> dict[Key, str]:
    """The cells of a grid that are not in the file yet."""
    found = {cell.key for cell in cells}
    return {key: purpose for key, purpose in grid.purposes(fingerprint, cells).items() if key not in found}


def _display(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or console.is_dumb_terminal,
        transient=True,
        refresh_per_second=2,
    )
