"""The command `gefen-jax`: finds the subcommand, parses, calls one function, prints its errors in one line.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int` (the exit code). Only the chosen
one is imported, so that `gefen-jax --help` is quick. To add one, add a line to `COMMANDS`.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from gefen_jax.lab.errors import UsageError

INTERRUPTED = 130  # the shell's convention for a program ended by Ctrl-C


class Command(NamedTuple):
    name: str  # one word or two, as typed
    help: str  # one line
    module: str
    extra: str | None = None  # the optional dependencies it needs


COMMANDS = (
    Command("demo", "train a small language model with AdamW and with Gefen", "gefen_jax.lab.demo", "demo"),
    Command(
        "bench step", "time, compile time and memory of the step against AdamW", "gefen_jax.lab.bench_step", "demo"
    ),
    Command(
        "bench launches", "what one step launches on a GPU, counted without one", "gefen_jax.lab.bench_launches", "demo"
    ),
    Command("bench gpu", "is every path right on this GPU, and how fast?", "gefen_jax.lab.bench_gpu", "demo"),
    Command(
        "bench ladder", "one step on six rungs, from eager to fused: launches and time", "gefen_jax.lab.ladder", "demo"
    ),
    Command("bench memory", "bytes of optimizer state on real model shapes", "gefen_jax.lab.bench_memory", "demo"),
    Command(
        "bench quality", "train many times: is the loss AdamW's, at AdamW's rate?", "gefen_jax.lab.quality", "demo"
    ),
    Command("account", "show where memory, FLOPs and time go, and what fits", "gefen_jax.lab.account"),
    Command("how", "draw how Gefen works, from a first gradient", "gefen_jax.lab.how", "demo"),
    Command("doctor", "show versions, devices and what would run on them", "gefen_jax.lab.doctor"),
)

EPILOG = """\
exit codes: 0 done; 2 wrong option, wrong data or missing package; 130 ended by Ctrl-C
"""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = find(words)
    if command is None:
        return overview(words)
    prog = f"gefen-jax {command.name}"
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if command.extra is None or package == "gefen_jax":
            raise
        hint = f"pip install 'gefen-jax[{command.extra}]'"
        print(f"{prog}: needs the package {package}; install it with: {hint}", file=sys.stderr)
        return 2
    parser = Parser(prog=prog, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    try:
        module.add_arguments(parser)
        args = parser.parse_args(words[len(command.name.split()) :])
        return module.run(args)
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `head` or a pager has read enough; what is left is not to fail again on the way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{prog}: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def find(words: Sequence[str]) -> Command | None:
    """The command that the words start with."""
    return next((c for c in COMMANDS if words[: len(c.name.split())] == c.name.split()), None)


def overview(words: Sequence[str]) -> int:
    """Answer a line that names no command: the list of commands, the version, or an error."""
    width = max(len(command.name) for command in COMMANDS) + 2
    commands = "\n".join(f"  {command.name:{width}}{command.help}" for command in COMMANDS)
    parser = Parser(
        prog="gefen-jax",
        usage="gefen-jax COMMAND [options]",
        description=f"Gefen for JAX.\n\ncommands:\n{commands}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    args, rest = parser.parse_known_args(words)
    if args.version:
        import importlib.metadata

        print(f"gefen-jax {importlib.metadata.version('gefen-jax')}")
        return 0
    if rest:
        known = ", ".join(command.name for command in COMMANDS)
        parser.error(f"unknown command {' '.join(rest[:2])!r}; choose one of: {known}")
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
