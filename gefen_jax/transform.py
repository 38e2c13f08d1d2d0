"""Gefen as an Optax transformation: `gefen`, the one-word swap for `optax.adamw`, and `scale_by_gefen`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gefen_jax import checks, implementation, local, matching, paths, reference, state, update
from gefen_jax.learn import initial_codebook
from gefen_jax.plan import MIN_SIZE, FullPrecision, LeafPlan, Options, Plan, shape_rule
from gefen_jax.sharding import fresh, replicated
from gefen_jax.state import GefenState
from gefen_jax.update import Leaf, Scalar

ScalarOrSchedule = Scalar | Callable[[jax.Array], Scalar]
Mask = Any


class GefenTransformation(optax.GradientTransformationExtraArgs):
    """What `gefen` returns: an Optax transformation (init, update) that also knows how to ``apply`` a whole step.

    ``apply(grads, params, opt_state) -> (params, opt_state)`` equals `update` followed by `optax.apply_updates`,
    and writes parameters and state in place where they are donated. Its keyword ``factor`` is a scalar by which the
    gradients are multiplied on the way (clipping); other keywords are ignored, as those of `update` are.
    """

    apply: Callable[..., tuple[Any, GefenState]]
    options: Options
    implementation: str
    shardings: local.Stated


def gefen(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 1e-4,
    mask: Mask = None,
    plan: Plan | None = None,
    rule: str | None = None,
    second_moment: str | None = None,
    bits: int | None = None,
    min_size: int | None = None,
    full_precision: FullPrecision = None,
    axes: Mapping[str, tuple[int, int]] | None = None,
    implementation: str = "auto",
    codec: str | None = None,
    shardings: Any = None,
) -> GefenTransformation:
    r"""AdamW's recipe with about one byte of state per parameter.

    With gradient :math:`g_t`, decay rates :math:`\beta_1, \beta_2`, learning rate :math:`\alpha_t` and weight decay
    :math:`\lambda` the update is

    .. math::
      -\alpha_t \left(\frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda p\right)

    where the first moment :math:`m_t` is kept as one byte per element and one scale per block, and the second moment
    :math:`v_t` as row and column factors or one mean per block (`gefen_jax.update`).

    Args:
      learning_rate: a float, an array or an Optax schedule; the first step reads ``schedule(0)``.
      b1: decay rate of the first moment, 0 <= b1 < 1.
      b2: decay rate of the second moment, 0 <= b2 < 1.
      eps: added to the root of the second moment, > 0.
      weight_decay: decoupled weight decay, as in `optax.adamw` multiplied by the learning rate.
      mask: tree of booleans (or a function from parameters to one): which leaves decay.
      plan: decisions made beforehand by `learn_plan`; each structural argument below that is left at None comes
        from it, and one that differs from it is an error.
      rule: "gefen" (default), or "reference": the original method, to the bit.
      second_moment: "auto" (default: factors where a leaf has rows and columns), "block", "factored" or "full".
      bits: 8 (default) or 4, bits per element of the first moment.
      min_size: leaves with fewer elements keep exact Adam (default 4096; 0 under rule "reference").
      full_precision: leaves that keep exact Adam: a regular expression searched for in the path, or a function of
        path and leaf.
      axes: by path, (number of leading batch axes, number of row axes) where shapes alone would mislead, such as
        stacks of small matrices.
      implementation: "auto", or one of `gefen_jax.implementation.IMPLEMENTATIONS`.
      codec: "table" (default: any codebook, the nearest word found through a table) or "companding" (words in closed
        form: a faster step on the CPU, 4 to 5 % more squared error of the stored first moment).
      shardings: where the parameters live (a tree like them of `jax.sharding.NamedSharding`, or one for all), so that
        kernels can step the shards of leaves whose blocks cross none, in `jax.shard_map`. Only kernels read it, and
        only on automatic meshes need it: explicit ones have shardings in their types.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `GefenState`.

    Raises:
      ValueError, TypeError: at construction for wrong hyper-parameters or a contradiction with the plan; in ``init``
        for parameters that are not real numbers or not in the plan; in ``update`` for gradients that do not match.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> params = {"kernel": jnp.ones((128, 256)), "bias": jnp.zeros(256)}
      >>> tx = gefen(1e-2)
      >>> opt_state = tx.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
      >>> round(float(optax.apply_updates(params, updates)["bias"][0]), 6)
      -0.01

    References:
      Benedek, Koren, Fried, "Gefen: Optimized Stochastic Optimizer", `arXiv 2606.13894
      <https://arxiv.org/abs/2606.13894>`_, 2026
    """
    checks.check_rate("learning_rate", learning_rate)
    checks.check_scalar("weight_decay", weight_decay, low=0)
    checks.check_mask(mask)
    return _build(
        b1,
        b2,
        eps,
        Step(learning_rate, update.single(weight_decay), mask),
        _options(plan, rule, second_moment, bits, min_size, full_precision, axes, codec),
        plan,
        implementation,
        local.stated(shardings),
    )


def scale_by_gefen(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    plan: Plan | None = None,
    rule: str | None = None,
    second_moment: str | None = None,
    bits: int | None = None,
    min_size: int | None = None,
    full_precision: FullPrecision = None,
    axes: Mapping[str, tuple[int, int]] | None = None,
    implementation: str = "auto",
    codec: str | None = None,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescale gradients as `optax.scale_by_adam` does, with `gefen`'s state. Arguments as in `gefen`.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `GefenState`. Its updates are the directions
      m / (sqrt(v) + eps) of `gefen`, of the gradients' shapes and dtypes (rule "reference": float32), without learning
      rate, sign and weight decay.

    Raises:
      ValueError, TypeError: as `gefen`.

    Examples:
      >>> tx = optax.chain(scale_by_gefen(), optax.scale_by_learning_rate(1e-3))
      >>> updates, _ = tx.update(jnp.array([2.0, -2.0]), tx.init(jnp.zeros(2)))
      >>> updates.round(6).tolist()
      [-0.001..., 0.001...]

    References:
      Benedek, Koren, Fried, "Gefen: Optimized Stochastic Optimizer", `arXiv 2606.13894
      <https://arxiv.org/abs/2606.13894>`_, 2026
    """
    options = _options(plan, rule, second_moment, bits, min_size, full_precision, axes, codec)
    built = _build(b1, b2, eps, None, options, plan, implementation, local.stated(shardings))
    return optax.GradientTransformationExtraArgs(built.init, built.update)


class Step:
    """What turns a direction into an update: learning rate, weight decay and its mask."""

    def __init__(self, learning_rate: ScalarOrSchedule, weight_decay: Scalar, mask: Mask):
        self.learning_rate, self.weight_decay, self.mask = learning_rate, weight_decay, mask

    def rate(self, count: jax.Array) -> jax.Array:
        """Learning rate of the step after ``count`` steps, float32 ()."""
        rate = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        if jnp.shape(rate) != ():
            raise ValueError(f"gefen: the learning rate must be a scalar; the schedule gave shape {jnp.shape(rate)}")
        return jnp.asarray(rate, jnp.float32)

    def decays(self, params: Any, leaves: int) -> list[Scalar]:
        """Weight decay of each leaf."""
        if update.is_zero(self.weight_decay):
            return [0.0] * leaves
        if params is None:
            raise ValueError(
                "gefen: weight decay needs the parameters: call update(grads, opt_state, params), or build with "
                "weight_decay=0"
            )
        if self.mask is None:
            return [self.weight_decay] * leaves
        masks = checks.broadcast_mask(self.mask, params)
        return [
            (self.weight_decay if bool(keep) else 0.0)
            if isinstance(keep, bool | np.bool_)
            else jnp.where(keep, self.weight_decay, 0.0)
            for keep in masks
        ]


def _options(
    plan: Plan | None,
    rule: str | None,
    second_moment: str | None,
    bits: int | None,
    min_size: int | None,
    full_precision: FullPrecision,
    axes: Mapping[str, tuple[int, int]] | None,
    codec: str | None,
) -> Options:
    """The structural arguments with their defaults filled in, from the plan where there is one."""
    asked: dict[str, Any] = {
        "rule": rule,
        "second_moment": second_moment,
        "bits": bits,
        "min_size": min_size,
        "codec": codec,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if plan is not None:
        checks.check_plan(plan)
        decided = {name: getattr(plan, name) for name in asked}
        checks.check_agreement(plan, given, full_precision, axes)
        return Options(**decided, full_precision=full_precision, axes=axes)
    defaults = {"min_size": 0 if rule == "reference" else MIN_SIZE}
    options = Options(**(defaults | given), full_precision=full_precision, axes=axes)
    checks.check_options(options)
    return options


def _build(
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    step: Step | None,
    options: Options,
    plan: Plan | None,
    requested: str,
    shardings: local.Stated,
) -> GefenTransformation:
    checks.check_scalar("b1", b1, low=0, below=1, wide=True)
    checks.check_scalar("b2", b2, low=0, below=1, wide=True)
    checks.check_scalar("eps", eps, **({"low": 0} if options.rule == "reference" else {"above": 0}), wide=True)
    implementation.check(requested)
    b1, b2, eps = (update.single(value) for value in (b1, b2, eps))

    def init(params: Any) -> GefenState:
        named = paths.named_leaves(params)
        checks.check_parameters(named)
        for path, _ in named:
            local.of(shardings, path)
        if step is not None and step.mask is not None and named:
            checks.broadcast_mask(step.mask, params)
        if plan is not None:
            checks.check_covers(plan, params, named)
            decisions = [checks.planned(plan, path, leaf) for path, leaf in named]
        else:
            checks.check_axes_exist(options, params, [path for path, _ in named])
            decisions = [shape_rule(path, leaf, options) for path, leaf in named]
        return init_state(params, decisions, options, None if plan is None else plan.codebook)

    def run(
        grads: Any, opt_state: GefenState, params: Any, *, apply: bool, factor: jax.Array | None = None
    ) -> tuple[Any, GefenState]:
        leaves, tree = matching.check_update(grads, opt_state, params, options, plan)
        state.check_format(opt_state, options, where="gefen")
        gradients = jax.tree.leaves(grads)
        parameters = [None] * len(gradients) if params is None else jax.tree.leaves(params)
        count = optax.safe_increment(opt_state.count)
        # Not opt_state.count: with two readers the donated count would be copied, a launch of its own on a GPU.
        rate = None if step is None else step.rate(count - 1)
        decays: list[Scalar] = [0.0] * len(gradients) if step is None else step.decays(params, len(gradients))

        def advance(
            gradients: list[Any], parameters: list[Any], leaves: list[Leaf], decays: list[Scalar], shared: Any
        ) -> tuple[list[Any], list[Leaf]]:
            words, count, rate, b1, b2, eps, factor = shared
            if options.rule == "reference":
                if factor is not None:
                    gradients = [(g.astype(jnp.float32) * factor).astype(g.dtype) for g in gradients]
                exact = reference.hyper(b1, b2, eps, count)
                return _reference(gradients, parameters, leaves, words, exact, rate, decays, apply)
            book = update.codebook(words, options.codec)
            tails = [update.Tail(rate, decay, apply) for decay in decays]
            h = update.hyper(b1, b2, eps, count)
            return implementation.step(requested, gradients, parameters, leaves, book, h, tails, factor)

        homes: list[Any] = [None] * len(gradients)
        if options.rule != "reference":
            names = paths.names(opt_state.mu)
            homes = implementation.homes(requested, shardings, names, gradients, parameters, leaves)
        outputs, leaves = local.by_shard(
            advance,
            (gradients, parameters, leaves, decays),
            (opt_state.codebook, count, rate, b1, b2, eps, factor),
            like=parameters if apply else gradients,
            homes=homes,
        )
        return tree.unflatten(outputs), opt_state.with_leaves(leaves, count=count)

    def update_fn(updates: Any, state: GefenState, params: Any = None, **extra_args: Any) -> tuple[Any, GefenState]:
        del extra_args
        return run(updates, state, params, apply=False)

    def apply(
        grads: Any, params: Any, opt_state: GefenState, *, factor: jax.Array | None = None, **extra_args: Any
    ) -> tuple[Any, GefenState]:
        del extra_args
        return run(grads, opt_state, params, apply=True, factor=factor)

    built = GefenTransformation(init, update_fn)
    built.apply, built.options = apply, options
    built.implementation, built.shardings = requested, shardings
    return built


def init_state(params: Any, decisions: list[LeafPlan], options: Options, words: np.ndarray | None) -> GefenState:
    """Fresh state for decided leaves, placed like the parameters."""
    parameters = jax.tree.leaves(params)
    leaves = [_fresh_leaf(p, decision, options) for p, decision in zip(parameters, decisions)]
    words = initial_codebook(options) if words is None else words
    place = replicated(parameters)
    return GefenState(
        count=place(np.zeros((), np.int32)),
        format=place(state.encode_format(options, decisions)),
        codebook=place(np.asarray(words, np.float32)),
        **state.unflatten(params, leaves),
    )


def _fresh_leaf(p: Any, decision: LeafPlan, options: Options) -> Leaf:
    scale, nu, cross = decision.statistics()
    statistic = p.dtype if options.rule == "reference" else jnp.float32
    mu = state.mu_shape(decision, options.bits)
    code = 0 if decision.exact else state.fresh_code(decision, options.bits)
    return Leaf(
        fresh(mu, jnp.float32 if decision.exact else jnp.uint8, code, like=p),
        fresh(scale, statistic, 0, like=p),
        fresh(nu, statistic, 0, like=p),
        fresh(cross, jnp.float32, 1 if cross == (1,) * len(cross) else 0, like=p),
    )


def _reference(
    gradients: list[jax.Array],
    parameters: list[Any],
    leaves: list[Leaf],
    words: jax.Array,
    h: reference.ReferenceHyper,
    rate: jax.Array | None,
    decays: list[Scalar],
    apply: bool,
) -> tuple[list[jax.Array], list[Leaf]]:
    """All leaves under rule "reference": updates are the float32 difference of new and old parameter."""
    outputs, new = [], []
    for g, p, leaf, decay in zip(gradients, parameters, leaves, decays):
        d, leaf = reference.reference_update(g, leaf, words, h)
        new.append(leaf)
        if rate is None:
            outputs.append(d)
            continue
        if p is None:
            raise ValueError("gefen: rule 'reference' needs the parameters: call update(grads, opt_state, params)")
        moved = reference.reference_parameter(p, d, rate, decay, h)
        outputs.append(moved if apply else moved.astype(jnp.float32) - p.astype(jnp.float32))
    return outputs, new
