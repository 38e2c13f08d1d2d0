"""Learning a plan from the first gradients: structure leaf by leaf, then one codebook for all.

Everything is about global gradients, one leaf at a time: the same gradients give the same plan on every mesh. What is
read from a gradient is summed up and counted on the host, or where it lies (`on_device`); decisions are made on the
host. With several processes all of them must call it; process 0 decides and the others receive its decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gefen_jax import checks, codebook, on_device, partition, paths, periods, tiling
from gefen_jax.choices import WHERE, check_choice
from gefen_jax.plan import (
    MIN_SIZE,
    FullPrecision,
    LeafPlan,
    Options,
    Plan,
    exact_reason,
    reference_leaf,
    shape_rule,
    split_of,
)
from gefen_jax.reasons import LEARNED, NON_FINITE, ZERO

PRIOR_COMPANDING = 1.0528
"""`codebook.fit_companding` of `prior.prior_counts`: the companding codebook before any gradient is seen."""

Progress = Callable[[str, int, int], None]
"""Called as progress(path, leaves done, leaves in all)."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One leaf to decide on: its gradients (one or several), and what was asked for it."""

    path: str
    gradients: Sequence[Any]
    options: Options
    exact: str | None = None


def learn_plan(
    grads: Any,
    *,
    rule: str = "gefen",
    second_moment: str = "auto",
    bits: int = 8,
    min_size: int | None = None,
    full_precision: FullPrecision = None,
    axes: Mapping[str, tuple[int, int]] | None = None,
    align: int = 1,
    codec: str = "table",
    where: str = "auto",
    progress: Progress | None = None,
) -> Plan:
    """Decide structure and codebook from the first gradients, before the optimizer is built.

    Args:
      grads: the gradients of one step (a tree like the parameters), or a list or tuple of several such trees from
        different batches (rule "gefen"); a tree that is itself a list goes into a list of one. Any real floating
        dtype; scale does not matter, but they should be those that the optimizer sees: averaged over devices and
        micro-batches.
      rule: "gefen", or "reference": the original method, to the bit.
      second_moment: "auto", "block" (tiles only, the paper's own structure), "factored" or "full".
      bits: 8 or 4, bits per element of the first moment.
      min_size: leaves with fewer elements keep exact Adam (default 4096; 0 under rule "reference").
      full_precision: leaves that keep exact Adam: a regular expression on the path, or a function of path and leaf.
      axes: by path, (leading batch axes, row axes) of leaves whose shape alone would mislead.
      align: keep blocks inside the shards of up to this many devices along any axis that it divides.
      codec: "table" (any words, nearest found through a table), or "companding" (words in closed form with one learned
        number: a faster step on the CPU, 4 to 5 % more squared error).
      where: "host": gradients are copied to the host, one leaf at a time; "device": they are summed up where they lie
        and only sums travel, with the same result (leaves of up to 4096 elements, and under rule "reference" leaves
        whose best two periods differ by less than rounding could make, are copied all the same); "auto": "device"
        for gradients on GPUs. The device must have float64.
      progress: called after each leaf with (path, leaves done, leaves in all).

    Returns:
      A `Plan`, for ``gefen(..., plan=plan)``.

    Raises:
      ValueError: for contradicting arguments, or if every quantised leaf's gradient is zero or non-finite.
      TypeError: for gradients that are not real floating-point arrays.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> grads = {"kernel": rng.standard_normal((256, 512), np.float32), "bias": np.ones(512, np.float32)}
      >>> plan = learn_plan(grads)
      >>> plan.leaves["kernel"].mu, plan.leaves["bias"].reason
      (('tile', (1, 256)), 'small')

    References:
      Gefen, arXiv 2606.13894: structure from the first squared gradient, codebook by dynamic programming.
    """
    if min_size is None:
        min_size = 0 if rule == "reference" else MIN_SIZE
    options = Options(rule, second_moment, bits, min_size, full_precision, axes, align, codec)
    checks.check_options(options)
    check_choice("where", where, WHERE)
    trees = trees_of(grads)
    columns = [paths.named_leaves(tree) for tree in trees]
    known = [path for path, _ in columns[0]]
    for other in columns[1:]:
        if [path for path, _ in other] != known:
            raise ValueError(
                "learn_plan: the trees of gradients differ in structure; one list holds trees of one model"
            )
    checks.check_paths_differ(known)
    checks.check_gradients(columns)
    checks.check_axes_exist(options, trees[0], known)
    requests = [
        Request(path, [column[i][1] for column in columns], options, exact_reason(path, columns[0][i][1], options))
        for i, path in enumerate(known)
    ]
    return decide(requests, options, progress, where)


def trees_of(grads: Any) -> list[Any]:
    """The trees of gradients in what a caller passed: one tree, or a list or tuple of trees."""
    trees = list(grads) if isinstance(grads, list | tuple) and not hasattr(grads, "_fields") else [grads]
    if not trees:
        raise ValueError("learning needs at least one tree of gradients; found an empty list")
    if any(tree is None for tree in trees):
        raise ValueError("learning needs gradients; found None: pass what jax.grad(loss)(params, batch) returned")
    return trees


def decide(
    requests: Sequence[Request], options: Options, progress: Progress | None = None, where: str = "auto"
) -> Plan:
    """The plan for leaves whose options agree in rule and bits; ``options`` are those that the plan states."""
    learn = _learn_reference if options.rule == "reference" else _learn_gefen
    plan = learn(requests, options, progress or (lambda path, done, total: None), where)
    return _agree(plan) if jax.process_count() > 1 else plan


def _learn_reference(requests: Sequence[Request], options: Options, progress: Progress, where: str) -> Plan:
    counts = np.zeros(codebook.BINS, np.int64)
    leaves: dict[str, LeafPlan] = {}
    candidates: dict[str, Any] = {}
    for i, request in enumerate(requests):
        if len(request.gradients) > 1:
            raise ValueError("rule 'reference' learns from exactly one gradient; give one tree")
        gradient = request.gradients[0]
        shape = tuple(gradient.shape)
        if request.exact is not None or 0 in shape:
            leaves[request.path] = shape_rule(request.path, gradient, request.options)
            progress(request.path, i + 1, len(requests))
            continue
        try:
            period, counted, candidates[request.path] = _reference_period(gradient, where)
        except ValueError as error:
            raise ValueError(f"leaf {request.path!r}: {error}") from error
        counts += counted
        leaves[request.path] = reference_leaf(shape, period, LEARNED)
        progress(request.path, i + 1, len(requests))
    words = codebook.reference_codebook(counts) if counts.any() else codebook.prior_codebook(options.bits)
    return Plan("reference", options.second_moment, options.min_size, options.bits, words, counts, leaves, candidates)


def _reference_period(gradient: Any, where: str) -> tuple[int, codebook.Counts, tuple[Any, Any]]:
    """The period of a leaf, its histogram, and the candidates with their scores."""
    if on_device.takes([gradient], where):
        array = on_device.prepare(gradient)
        cand, score, certain = on_device.scores(array)
        if certain:
            period = periods.choose_period(cand, score, array.size)
            return period, on_device.reference_histogram(array, period), (cand, score)
    values = _to_host(gradient)
    cand, score = periods.scores(values)
    period = periods.choose_period(cand, score, values.size)
    return period, codebook.reference_histogram(values, period), (cand, score)


def _learn_gefen(requests: Sequence[Request], options: Options, progress: Progress, where: str) -> Plan:
    counts = np.zeros(codebook.BINS, np.int64)
    leaves: dict[str, LeafPlan] = {}
    surveys: dict[str, partition.Survey] = {}
    for i, request in enumerate(requests):
        first = request.gradients[0]
        if request.exact is not None:
            leaves[request.path] = LeafPlan(
                tuple(first.shape),
                ("full",),
                ("full",),
                request.exact,
                request.options.declared_axes(request.path, tuple(first.shape)),
            )
            progress(request.path, i + 1, len(requests))
            continue
        fallback = shape_rule(request.path, first, request.options)
        leaves[request.path] = fallback
        if not fallback.exact:
            device = on_device.takes(request.gradients, where)
            measure: tuple[Any, Any] = (_to_host, codebook.histogram)
            bring, histogram = (on_device.prepare, on_device.histogram) if device else measure
            gradients = [bring(gradient) for gradient in request.gradients]
            found = _survey(gradients, fallback, request.options, device)
            surveys[request.path] = found
            if found.reason != NON_FINITE:
                for gradient in gradients:
                    counts += histogram(gradient, fallback.mu[1])
        progress(request.path, i + 1, len(requests))
    if surveys and all(found.reason in (ZERO, NON_FINITE) for found in surveys.values()):
        raise ValueError(
            "the gradients of all quantised parameters are zero or not finite, so nothing can be learned from them: "
            "calibrate with another batch, or train without calibration"
        )
    asked = {request.path: request.options.second_moment for request in requests}
    for path, choice in zip(surveys, partition.choose(list(surveys.values()))):
        leaf = leaves[path]
        forced = asked[path] == "full" or (asked[path] == "factored" and leaf.nu[0] == "factored")
        leaves[path] = dataclasses.replace(leaf, nu=leaf.nu if forced else choice.structure, reason=choice.reason)
    if not counts.any():
        words = initial_codebook(options)
    elif options.codec == "companding":
        words = codebook.companding_codebook(codebook.fit_companding(counts))
    else:
        words = codebook.learn_codebook(counts, bits=options.bits)
    return Plan(
        "gefen",
        options.second_moment,
        options.min_size,
        options.bits,
        words,
        counts if counts.any() else None,
        leaves,
        surveys,
        options.codec,
    )


def initial_codebook(options: Options) -> np.ndarray:
    """The codebook before any gradient is seen."""
    if options.codec == "companding":
        return codebook.companding_codebook(PRIOR_COMPANDING)
    return codebook.prior_codebook(options.bits)


def _survey(gradients: Sequence[Any], fallback: LeafPlan, options: Options, device: bool) -> partition.Survey:
    split = split_of(fallback.shape, fallback.axes)
    found = partition.survey(
        gradients,
        tile=fallback.mu[1],
        default=fallback.nu,
        view=split if split is not None else fallback.axes,
        factored=split is not None and options.second_moment in ("auto", "factored"),
        full=options.second_moment == "auto",
        device=device,
    )
    if options.align == 1:
        return found
    return partition.restrict(found, lambda x: x[0] != "tile" or tiling.is_aligned(found.shape, x[1], options.align))


def _to_host(gradient: Any) -> np.ndarray:
    """The global gradient as a NumPy array, on every process."""
    if isinstance(gradient, jax.Array) and not gradient.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(gradient, tiled=True))
    return np.asarray(gradient)


def _agree(plan: Plan) -> Plan:
    """Process 0's plan, on every process: their floating-point libraries may differ in the last bit."""
    from jax.experimental import multihost_utils

    mine = np.frombuffer(plan.dumps().encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(mine.size)))
    text = np.zeros(length, np.uint8)
    text[: min(length, mine.size)] = mine[:length]
    agreed = Plan.loads(bytes(multihost_utils.broadcast_one_to_all(text)).decode())
    return dataclasses.replace(agreed, candidates=plan.candidates)
