"""What one optimizer step launches on a GPU, counted from programs compiled for it: no GPU is needed.

Needs JAX's CUDA plugin (pip install jax-cuda12-plugin) and jax-triton, but neither CUDA's libraries nor a device.
Columns: launches that touch large arrays, launches on small ones (scalars, vectors), large copies, temporary bytes per
parameter, and the seconds that tracing, lowering and compiling took. "eager" counts the operations of an unjitted step,
each a launch.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SMALL = 1 << 14
"""Work on fewer elements is small: counters, bias corrections, a schedule, tables, vectors of a model."""
MODELS = ("gpt2-124m", "llama3-1.5b", "llama3-1.5b-scanned")
NAME = "bench launches"


class Form(NamedTuple):
    """One way to run one optimizer's step: ``step(gradients, params, opt_state)``, results in the last two's order."""

    name: str
    step: Callable[[Any, Any, Any], Any]
    init: Callable[[Any], Any]
    how: str = "tree"
    donate: tuple[int, ...] = (1, 2)


class Row(NamedTuple):
    """What was counted."""

    name: str
    large: int
    small: int | None
    copies: int | None
    temporary: float | None
    seconds: float | None


def forms() -> Iterator[Form]:
    """AdamW and Gefen, from eager to one launch."""
    import optax

    from gefen_jax import gefen
    from gefen_jax.fused import clip_by_global_norm, fused_chain

    def updating(tx: Any) -> Callable[[Any, Any, Any], Any]:
        def step(grads: Any, params: Any, opt_state: Any) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return step

    adamw, plain = optax.adamw(1e-3), gefen(1e-3, implementation="jnp")
    for name, tx in (("adamw", adamw), ("gefen jnp", plain)):
        yield Form(f"{name}: eager", updating(tx), tx.init, "eager")
        yield Form(f"{name}: jitted per leaf", updating(tx), tx.init, "leaf")
        yield Form(f"{name}: jitted", updating(tx), tx.init)
    flat = optax.flatten(optax.adamw(1e-3))
    yield Form("adamw: flat", updating(flat), flat.init)
    for second in ("auto", "block", "full"):
        tx = gefen(1e-3, second_moment=second, implementation="triton")
        yield Form(f"gefen {second}: update", _only_update(tx), tx.init, donate=(0, 2))
        yield Form(f"gefen {second}: apply", tx.apply, tx.init)
    tx = gefen(1e-3, implementation="triton")
    yield Form("gefen auto: update + apply_updates", updating(tx), tx.init)
    chain = fused_chain(clip_by_global_norm(1.0), tx)
    yield Form("gefen auto: clip + apply", chain.apply, chain.init)


def _only_update(tx: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda grads, params, opt_state: tx.update(grads, opt_state, params)


def count(form: Form, shapes: Any, target: str) -> Row:
    """Compile one form for a GPU and count."""
    import jax

    leaves = jax.tree.leaves(shapes)
    size = sum(leaf.size for leaf in leaves)
    if form.how == "eager":
        jaxpr = jax.make_jaxpr(form.step)(shapes, shapes, jax.eval_shape(form.init, shapes))
        return Row(form.name, _operations(jaxpr.jaxpr), None, None, None, None)
    if form.how == "tree":
        return _compiled(form, shapes, target, size)
    kinds: dict[Any, int] = {}
    for leaf in leaves:
        kinds[leaf.shape] = kinds.get(leaf.shape, 0) + 1
    rows = [
        (_compiled(form, jax.ShapeDtypeStruct(shape, leaves[0].dtype), target, size), number)
        for shape, number in kinds.items()
    ]
    large = sum(number * row.large for row, number in rows)
    small = sum(number * (row.small or 0) for row, number in rows)
    copies = sum(number * (row.copies or 0) for row, number in rows)
    temporary = sum(number * (row.temporary or 0.0) for row, number in rows)
    return Row(form.name, large, small, copies, temporary, sum(row.seconds or 0 for row, _ in rows))


def _compiled(form: Form, shapes: Any, target: str, size: int) -> Row:
    import jax

    from gefen_pallas import aot

    start = time.perf_counter()
    states = jax.eval_shape(form.init, shapes)
    program = aot.compile_for(target, form.step, shapes, shapes, states, donate=form.donate)
    seconds = time.perf_counter() - start
    large, small = aot.by_size(program.text, SMALL)
    copies = large["copy"]
    return Row(form.name, sum(large.values()), sum(small.values()), copies, program.temporary / size, seconds)


def _operations(jaxpr: Any) -> int:
    """Operations of a jaxpr that are dispatched one by one; nested jits count as one, as they run."""
    free = {"broadcast_in_dim", "reshape", "squeeze", "stop_gradient"}
    return sum(equation.primitive.name not in free for equation in jaxpr.eqns)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt2-124m", choices=MODELS, help="whose tree (default: %(default)s)")
    parser.add_argument("--target", default="h100", help="a100, h100, h200 or b200 (default: %(default)s)")
    parser.add_argument("--only", default="", help="forms whose name contains this text")
    parser.add_argument("--dtype", default="float32", help="of parameters and gradients (default: %(default)s)")
    parser.add_argument("--out", default=None, help="JSON-lines file to append to")


def run(args: argparse.Namespace) -> int:
    """The subcommand."""
    from gefen_jax.lab.errors import UsageError

    if os.environ.get("JAX_PLATFORMS") != "cpu":  # read when JAX is imported, which it is by now
        raise UsageError("set JAX_PLATFORMS=cpu before the command: the compiler must not look for a GPU")
    import jax

    from gefen_jax.lab import bench_memory, models, results
    from gefen_pallas import aot

    reason = aot.unavailable()
    if reason is not None:
        raise UsageError(reason)
    if args.target not in aot.TARGETS:
        raise UsageError(f"unknown target {args.target!r}; choose among: {', '.join(aot.TARGETS)}")
    if args.out:
        results.check_file(args.out)
    shapes = models.shapes(bench_memory.model_config(args.model))
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, args.dtype), shapes)
    rows = [count(form, shapes, args.target) for form in forms() if args.only in form.name]
    print(f"{args.model}, {len(jax.tree.leaves(shapes))} leaves, {args.dtype}, compiled for {args.target}")
    print(show(rows))
    if args.out:
        config = {"model": args.model, "target": args.target, "dtype": args.dtype}
        units = {"large": "1", "small": "1", "copies": "1", "temporary": "B/param", "seconds": "s"}
        results.write(
            args.out,
            [
                results.Result.of(NAME, row.name, metric, unit, getattr(row, metric), config=config)
                for row in rows
                for metric, unit in units.items()
                if getattr(row, metric) is not None
            ],
        )
    return 0


def show(rows: list[Row]) -> str:
    """The table."""
    from gefen_jax.lab.results import table

    head = ["step", "launches", "small", "copies", "temp B/param", "seconds"]

    def dash(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [
        [row.name, str(row.large), dash(row.small, "d"), dash(row.copies, "d")]
        + [dash(row.temporary, ".3f"), dash(row.seconds, ".1f")]
        for row in rows
    ]
    return table(head, cells)
