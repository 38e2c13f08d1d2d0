"""Show where the memory, the FLOPs and the time of a training step go, and what fits on a device.

gefen-jax account                                   GPT-2 124M on one 80 GiB device, all optimizers
gefen-jax account --model llama-1.5b --mesh fsdp=8 --device a100 --length 8192
gefen-jax account --script train.py:setup --run     your own step: setup() returns (step, (arguments...))
gefen-jax account --paper                           the paper's memory figures, recomputed
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gefen_jax import gefen
from gefen_jax.accounting import (
    DECODERS,
    DEVICES,
    LAYOUTS,
    Activations,
    Decoder,
    Precision,
    StepError,
    TargetUnavailableError,
    account,
    analytic_activations,
    compiled_activations,
    decoder_loss,
    decoder_tokens,
    find_device,
    make_target,
    optimizer_states,
    paper_microbatches,
    paper_states,
    traced_activations,
    what_fits,
)
from gefen_jax.accounting.report import Report
from gefen_jax.baselines import PEERS, build
from gefen_jax.lab.errors import UsageError

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SHORT = {"fp32": "fp32", "mixed": "bf16 + fp32 master", "bf16": "bf16"}
STANDARD = "adamw,adamw_bf16,adafactor,sm3,adam_mini,adam8bit,adam4bit,gefen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gefen-jax account`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default="gpt2-124m", help=f"sizes to plan for: {', '.join(DECODERS)}")
    what.add_argument(
        "--script",
        metavar="FILE.py:FUNCTION",
        help="account for your own step; the function (or MODULE:FUNCTION) returns (step, arguments) or (step, "
        "arguments, options of gefen_jax.accounting.account)",
    )
    what.add_argument("--paper", action="store_true", help="recompute the memory figures of the Gefen paper")
    parser.add_argument("--optimizer", default=STANDARD, metavar="NAMES", help=f"comma-separated; {STANDARD}")
    parser.add_argument("--device", help=f"for memory and peak rates: {', '.join(DEVICES)}; default: this machine's")
    parser.add_argument("--memory", help="of one device, as 40GiB; default: the device's, or 80GiB")
    parser.add_argument("--usable", type=float, default=0.9, help="share of the memory a program may use (%(default)s)")
    parser.add_argument("--mesh", default="1", help="number of devices, or axes as data=2,fsdp=4 (%(default)s)")
    parser.add_argument("--layout", help=f"comma-separated: {', '.join(LAYOUTS)}")
    parser.add_argument("--precision", default="mixed", help=f"comma-separated: {', '.join(SHORT)} (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: the model's context, at most 2048")
    parser.add_argument("--attention", choices=("materialised", "fused"), default="materialised")
    parser.add_argument("--remat", action="store_true", help="recompute each layer in the backward pass")
    parser.add_argument("--no-accumulation", action="store_true", help="one microbatch per step")
    parser.add_argument(
        "--activations",
        choices=("closed", "traced", "compiled"),
        default="closed",
        help="where the activations' bytes come from: closed form, jax.vjp, or XLA (%(default)s)",
    )
    parser.add_argument(
        "--compile-update", action="store_true", help="compile every optimizer's update to learn its work space"
    )
    parser.add_argument("--target", help="compile for this absent GPU (needs jax-cuda12-plugin): a100, h100, ...")
    parser.add_argument("--run", action="store_true", help="with --script: run the step, and show times and MFU")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the account; returns 0. Wrong options and steps that cannot be traced raise `UsageError`."""
    try:
        if args.paper:
            adamw = build("adamw", 1e-3)
            reports: list[Report] = [paper_states(adamw, gefen(1e-3)), *paper_microbatches(adamw, gefen(1e-3))]
        elif args.script:
            reports = [script_account(args)]
        else:
            reports = model_account(args)
    except (StepError, TargetUnavailableError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    if args.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        print("\n\n".join(str(report) for report in reports))
    return 0


def model_account(args: argparse.Namespace) -> list[Report]:
    """States, model FLOPs and what fits, for one of the known sizes."""
    if args.model not in DECODERS:
        raise UsageError(f"unknown model {args.model!r}; choose among: {', '.join(DECODERS)}")
    if args.run:
        raise UsageError("--run needs --script: the sizes of --model are planned for, not run")
    decoder = DECODERS[args.model]
    length = min(decoder.context, 2048) if args.length is None else args.length
    if not 1 <= length <= (decoder.context if decoder.style == "gpt" else length):
        raise UsageError(f"--length: found {length}, {decoder.name} has positions for 1 to {decoder.context}")
    if not 0 < args.usable <= 1:
        raise UsageError(f"--usable: found {args.usable}, expected a share above 0 and at most 1")
    chosen = optimizers(args.optimizer, decoder)
    params = decoder.parameters()
    fits = what_fits(
        params,
        chosen,
        activations(args, decoder, length),
        memory=memory(args),
        mesh=mesh(args.mesh),
        layouts=layouts(args.layout, args.mesh),
        precisions=[SHORT[name] for name in chosen_names(args.precision, SHORT, "--precision")],
        usable=args.usable,
        accumulate=not args.no_accumulation,
        remat=args.remat,
        compile_update=args.compile_update,
        name=f"{decoder.name}, {length} tokens",
    )
    return [optimizer_states(params, chosen), decoder.flops(1, length), fits]


def script_account(args: argparse.Namespace) -> Report:
    """The account of a user's own step."""
    setup = load(args.script)
    try:
        made = setup()
    except Exception as error:  # the user's code: whatever it raises is shown in one line
        raise UsageError(failure(args.script, error)) from error
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[1], (tuple, list))):
        raise UsageError(
            f"{args.script}: found {type(made).__name__}, expected (step, (arguments, ...)) or (step, (arguments, ...),"
            " {'loss': ..., 'optimizer': ...})"
        )
    step, arguments, *rest = made
    options: dict[str, Any] = dict(rest[0]) if rest else {}
    known = set(inspect.signature(account).parameters) - {"step", "args"}
    if unknown := set(options) - known:
        raise UsageError(f"{args.script}: unknown options {sorted(unknown)}; known: {', '.join(sorted(known))}")
    if args.device:
        options["device"] = device(args.device)
    if args.target:
        options["target"] = target(args.target)
    options["run"] = args.run or options.get("run", False)
    return account(step, *arguments, **options)


def failure(spec: str, error: Exception) -> str:
    """One line on what a user's script raised, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (frame.filename, frame.lineno)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{spec}: the script failed with {what} (at {file}:{line})"


def load(spec: str) -> Callable[[], Any]:
    """The function of ``module:function`` or ``path/to/file.py:function``.

    >>> load("math:tau")
    Traceback (most recent call last):
    gefen_jax.lab.errors.UsageError: math:tau: found float, expected a function
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"--script: found {spec!r}, expected FILE.py:FUNCTION or MODULE:FUNCTION")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise UsageError(f"--script: there is no file {place}")
        loaded = importlib.util.spec_from_file_location(path.stem, path)
        assert loaded is not None
        assert loaded.loader is not None
        module = importlib.util.module_from_spec(loaded)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.parent))
        try:
            loaded.loader.exec_module(module)
        except Exception as error:  # the user's code, as above
            raise UsageError(failure(spec, error)) from error
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UsageError(f"--script: there is no module {error.name}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "nothing of that name" if function is None else type(function).__name__
        raise UsageError(f"{spec}: found {found}, expected a function")
    return function


def optimizers(names: str, decoder: Decoder) -> dict[str, Any]:
    """Optimizers by name, built for a decoder (Adam-mini has to know the size of a head)."""
    found = {}
    for name in chosen_names(names.replace("-", "_"), {**PEERS, "gefen": None}, "--optimizer"):
        if name == "gefen":
            found[name] = gefen(1e-3)
        elif name == "adam_mini":
            found[name] = build(name, 1e-3, sizes={"head_dim": decoder.head_size})
        else:
            found[name] = build(name, 1e-3)
    return found


def activations(args: argparse.Namespace, decoder: Decoder, length: int) -> Callable[[Precision], Activations]:
    """Activations of a decoder as a function of the precision, from the source that was asked for."""

    def batch_of(microbatch: int) -> Any:
        return decoder_tokens(microbatch, length)

    if args.target is not None and args.activations != "compiled":
        raise UsageError("--target needs --activations compiled (or --script)")
    absent = None if args.target is None else target(args.target)

    def of(precision: Precision) -> Activations:
        loss = partial(decoder_loss, decoder, dtype=precision.compute, remat=args.remat)
        params = decoder.parameters(precision.parameters)
        if args.activations == "traced":
            return traced_activations(loss, params, batch_of)
        if args.activations == "compiled":
            return compiled_activations(loss, params, batch_of, absent)
        return analytic_activations(decoder, length, precision.compute, attention=args.attention, remat=args.remat)

    return of


def memory(args: argparse.Namespace) -> int:
    """Bytes of one device: as given, or the device's, or 80 GiB."""
    if args.memory:
        return parse_bytes(args.memory)
    return device(args.device).memory if args.device else 80 * 2**30


def device(name: str) -> Any:
    """The device of that name; `UsageError` lists the known ones."""
    try:
        return find_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def target(name: str) -> Any:
    """The absent GPU of that name."""
    try:
        return make_target(name)
    except ValueError as error:
        raise UsageError(f"--target: {error}") from error


def parse_bytes(text: str) -> int:
    """Bytes of "40GiB", "24 GB" or "1000".

    >>> parse_bytes("40GiB") == 40 * 2**30, parse_bytes("1.5 kB")
    (True, 1500)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise UsageError(f"--memory: found {text!r}, expected a number with GiB, GB, MiB or MB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def mesh(text: str) -> int | dict[str, int]:
    """A mesh: "8", or axes as "data=2,fsdp=4".

    >>> mesh("8"), mesh("data=2,fsdp=4")
    (8, {'data': 2, 'fsdp': 4})
    """
    if text.isdigit() and int(text) > 0:
        return int(text)
    axes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdigit() or int(size) < 1:
            raise UsageError(f"--mesh: found {text!r}, expected a number of devices or axes as data=2,fsdp=4")
        axes[name.strip()] = int(size)
    return axes


def layouts(text: str | None, devices: str) -> list[str]:
    """The layouts asked for; without a choice all, or those without sharding on one device."""
    if text is None:
        return [name for name in LAYOUTS if devices != "1" or not name.startswith("fsdp")]
    return chosen_names(text, dict.fromkeys(LAYOUTS), "--layout")


def chosen_names(text: str, known: Mapping[str, Any], option: str) -> list[str]:
    """Comma-separated names, each of them known."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    for name in found:
        if name not in known:
            raise UsageError(f"{option}: unknown {name!r}; choose among: {', '.join(known)}")
    return found
