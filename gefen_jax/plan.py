"""The plan: what was decided about every leaf, as data.

A plan says which elements of each parameter share a momentum scale and a second moment, and why, and carries the
codebook. It is made once, outside the step: from shapes alone (`shape_rule`), from the first gradients
(`learn.learn_plan`) or back from a state (`calibrate.plan_from_state`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gefen_jax import tiling
from gefen_jax.choices import BITS, RULES, SECOND_MOMENTS, check_choice, check_codebook, check_codec, check_min_size
from gefen_jax.quantization import BINS
from gefen_jax.reasons import (
    EMPTY,
    EXACT_REASONS,
    EXPLANATIONS,
    FULL_PRECISION,
    NO_GRADIENT_YET,
    REASONS,
    SHAPE_RULE,
    SINGLES,
    SMALL,
)
from gefen_jax.tiling import Shape, Structure

MIN_SIZE = 4096

FullPrecision = str | Callable[[str, Any], bool] | None


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Decision for one parameter.

    Attributes:
      shape: the parameter's (global) shape.
      mu: ("tile", sizes) or ("flat", n): blocks of the first moment; ("full",): exact float32, no blocks.
      nu: ("tile", sizes), ("flat", n), ("full",) or ("factored", batch axes, row axes).
      reason: one of `REASONS`.
      axes: (batch axes, row axes) where the caller declared them.
    """

    shape: Shape
    mu: Structure
    nu: Structure
    reason: str
    axes: tuple[int, int] | None = None

    @property
    def exact(self) -> bool:
        """Whether the leaf keeps exact Adam."""
        return self.mu == ("full",)

    def statistics(self) -> tuple[Shape, Shape, Shape]:
        """Shapes of ``mu_scale``, ``nu`` and ``nu_cross``.

        Examples:
          >>> LeafPlan((768, 3072), ("tile", (1, 256)), ("factored", 0, 1), SHAPE_RULE).statistics()
          ((768, 12), (768, 1), (1, 3072))
        """
        none = (1,) * len(self.shape)
        if math.prod(self.shape) == 0:
            return none, none, none
        scale = none if self.exact else _statistic(self.shape, self.mu)
        if self.nu[0] == "factored":
            return scale, *tiling.factored_statistics(self.shape, *self.nu[1:])
        return scale, _statistic(self.shape, self.nu), none


def _statistic(shape: Shape, structure: Structure) -> Shape:
    if structure[0] == "full":
        return shape
    if structure[0] == "tile":
        return tiling.tile_statistic(shape, tuple(structure[1]))
    return tiling.flat_statistic(shape, structure[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Decisions for a parameter tree, and the codebook.

    Attributes:
      rule: "gefen" or "reference".
      second_moment: "auto", "block", "factored" or "full".
      min_size: leaves with fewer elements keep exact Adam.
      bits: 8 or 4, bits per first-moment code.
      codebook: float32[256] or [16], ascending; None if a state brings it.
      counts: int64[4096], the histogram that the codebook was learned from; None if it was not learned.
      leaves: `LeafPlan` by path.
      candidates: what was compared for a leaf, by path, for plots; not saved.
      codec: "table" (any words) or "companding" (words in closed form).
    """

    rule: str
    second_moment: str
    min_size: int
    bits: int
    codebook: np.ndarray | None
    counts: np.ndarray | None
    leaves: Mapping[str, LeafPlan]
    candidates: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    codec: str = "table"

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, RULES)
        check_choice("second_moment", self.second_moment, SECOND_MOMENTS)
        check_choice("bits", self.bits, BITS)
        check_min_size(self.min_size)
        check_codec(self.codec, self.bits, self.rule)
        for path, leaf in self.leaves.items():
            check_leaf(path, leaf, self.rule)
        if self.counts is not None and (np.shape(self.counts) != (BINS,) or np.min(self.counts) < 0):
            raise ValueError(f"counts must be {BINS} whole numbers >= 0; found shape {np.shape(self.counts)}")
        if self.codebook is not None:
            object.__setattr__(self, "codebook", check_codebook(self.codebook, self.bits, self.rule, self.codec))

    def __eq__(self, other: object) -> bool:
        """Equal decisions and codebook; how they were found (counts, candidates) does not matter."""
        if not isinstance(other, Plan):
            return NotImplemented
        same_words = (self.codebook is None) == (other.codebook is None) and (
            self.codebook is None or np.array_equal(self.codebook, other.codebook)  # type: ignore[arg-type]
        )
        return same_words and all(
            getattr(self, name) == getattr(other, name)
            for name in ("rule", "second_moment", "min_size", "bits", "codec", "leaves")
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def periods(self) -> dict[str, int]:
        """Block length of the second moment by path; only for rule "reference"."""
        if self.rule != "reference":
            raise ValueError(f"periods exist for rule 'reference'; this plan has rule {self.rule!r}: see tiles")
        return {path: leaf.nu[1] if leaf.nu[0] == "flat" else 1 for path, leaf in self.leaves.items()}

    @property
    def tiles(self) -> dict[str, Shape]:
        """Block of the first moment by path, for the leaves that are quantised in tiles."""
        return {path: leaf.mu[1] for path, leaf in self.leaves.items() if leaf.mu[0] == "tile"}

    def scores(self, path: str) -> Any:
        """Candidates of a leaf and how they scored, as found by `learn_plan` (not kept by `save`).

        Raises:
          KeyError: if the leaf is not in the plan or nothing was compared for it.
        """
        if path in self.candidates:
            return self.candidates[path]
        if path not in self.leaves:
            raise KeyError(f"{path!r} is not in the plan, whose leaves are {_some(self.leaves)}")
        why = EXPLANATIONS[self.leaves[path].reason]
        raise KeyError(f"no candidates are kept for {path!r} ({why}); scores come from learn_plan, not from a file")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.dumps() + "\n")

    def dumps(self) -> str:
        """The plan as JSON text."""
        return json.dumps(_to_json(self), indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
          ValueError: if the file is no plan, is damaged or contradicts itself.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.loads(file.read())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def loads(cls, text: str) -> Plan:
        """A plan from the text that `dumps` made; raises as `load`."""
        try:
            return _from_json(json.loads(text))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"no plan that this version can read: {detail}") from error


FORMAT = "gefen-jax plan 1"


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "rule": plan.rule,
        "second_moment": plan.second_moment,
        "min_size": int(plan.min_size),
        "bits": plan.bits,
        "codec": plan.codec,
        "codebook": None if plan.codebook is None else [float(word) for word in plan.codebook],
        "counts": None if plan.counts is None else [int(count) for count in plan.counts],
        "leaves": {path: dataclasses.asdict(leaf) for path, leaf in plan.leaves.items()},
    }


def _from_json(data: Any) -> Plan:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"expected a JSON object with format {FORMAT!r}, found {found!r}")
    leaves = {}
    for path, entry in data["leaves"].items():
        axes = None if entry["axes"] is None else (int(entry["axes"][0]), int(entry["axes"][1]))
        shape = tuple(int(size) for size in entry["shape"])
        leaves[path] = LeafPlan(shape, _structure(entry["mu"]), _structure(entry["nu"]), str(entry["reason"]), axes)
    counts = None if data["counts"] is None else np.asarray(data["counts"], np.int64)
    codebook = None if data["codebook"] is None else np.asarray(data["codebook"], np.float32)
    return Plan(
        data["rule"],
        data["second_moment"],
        int(data["min_size"]),
        int(data["bits"]),
        codebook,
        counts,
        leaves,
        codec=data["codec"],
    )


def _structure(value: Any) -> Structure:
    kind = value[0]
    if kind == "tile":
        return ("tile", tuple(int(size) for size in value[1]))
    if kind in ("flat", "full", "factored"):
        return (kind, *(int(number) for number in value[1:]))
    raise ValueError(f"unknown structure {value!r}")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller asked for, once defaults are filled in."""

    rule: str = "gefen"
    second_moment: str = "auto"
    bits: int = 8
    min_size: int = MIN_SIZE
    full_precision: FullPrecision = None
    axes: Mapping[str, tuple[int, int]] | None = None
    align: int = 1
    codec: str = "table"

    def keeps_full_precision(self, path: str, leaf: Any) -> bool:
        """Whether ``full_precision`` names this leaf."""
        if self.full_precision is None:
            return False
        if isinstance(self.full_precision, str):
            return re.search(self.full_precision, path) is not None
        return bool(self.full_precision(path, leaf))

    def declared_axes(self, path: str, shape: Shape) -> tuple[int, int] | None:
        """The caller's (batch, rows) for this leaf, checked; None if nothing was declared."""
        if self.axes is None or path not in self.axes:
            return None
        return tiling.check_axes(path, shape, self.axes[path])


def shape_rule(path: str, leaf: Any, options: Options) -> LeafPlan:
    """The decision from a parameter's shape alone: the uncalibrated structure, and the fallback of the learned one.

    Args:
      path: the leaf's path.
      leaf: anything with ``shape`` and ``dtype``.
      options: what was asked for.

    Examples:
      >>> shape_rule("kernel", np.zeros((768, 3072)), Options())
      LeafPlan(shape=(768, 3072), mu=('tile', (1, 256)), nu=('factored', 0, 1), reason='shape rule', axes=None)
      >>> shape_rule("bias", np.zeros(768), Options()).reason
      'small'
    """
    shape = tuple(leaf.shape)
    axes = options.declared_axes(path, shape)
    exact = exact_reason(path, leaf, options)
    if exact is not None:
        return LeafPlan(shape, ("full",), ("full",), exact, axes)
    if options.rule == "reference":
        return reference_leaf(shape, 1, NO_GRADIENT_YET, axes)
    return gefen_leaf(shape, options, axes, SHAPE_RULE)


def exact_reason(path: str, leaf: Any, options: Options) -> str | None:
    """Why a leaf keeps exact Adam whatever its gradient; None if it is quantised."""
    count = math.prod(leaf.shape)
    if count == 0:
        return EMPTY
    if options.keeps_full_precision(path, leaf):
        return FULL_PRECISION
    return SMALL if options.rule == "gefen" and count < options.min_size else None


def split_of(shape: Shape, axes: tuple[int, int] | None) -> tuple[int, int] | None:
    """The (batch, rows) split in which a leaf is factored, or None."""
    return tiling.default_split(shape) if axes is None else tiling.declared_split(shape, axes)


def gefen_leaf(
    shape: Shape, options: Options, axes: tuple[int, int] | None, reason: str, nu: Structure | None = None
) -> LeafPlan:
    """A quantised leaf under rule "gefen"; ``nu`` replaces the second moment that the shape rule would choose."""
    split = split_of(shape, axes)
    batch = axes[0] if axes is not None else split[0] if split is not None else 0
    longest = tiling.RUN if options.bits == 8 else tiling.RUN_OF_FOUR_BITS
    tile = tiling.momentum_tile(shape, batch, options.align, longest)
    if math.prod(tile) == 1 and math.prod(shape) > 1:
        return LeafPlan(shape, ("full",), ("full",), SINGLES, axes)
    if nu is None:
        if options.second_moment == "full":
            nu = ("full",)
        elif options.second_moment == "block":
            nu = ("tile", tiling.block_tile(shape, split, tile, options.align))
        else:
            nu = ("tile", tile) if split is None else ("factored", *split)
    return LeafPlan(shape, ("tile", tile), nu, reason, axes)


def reference_leaf(shape: Shape, period: int, reason: str, axes: tuple[int, int] | None = None) -> LeafPlan:
    """A leaf under rule "reference": equal blocks for both moments, or, for period 1, a full second moment."""
    if period > 1:
        return LeafPlan(shape, ("flat", period), ("flat", period), reason, axes)
    divisor = tiling.largest_divisor(math.prod(shape), tiling.RUN)
    return LeafPlan(shape, ("flat", divisor), ("full",), reason, axes)


def check_leaf(path: str, leaf: LeafPlan, rule: str) -> None:
    """Raise a ValueError unless a leaf's decision is one that ``rule`` can make."""
    check_choice(f"reason of leaf {path!r}", leaf.reason, REASONS)
    kinds = ("full", "flat") if rule == "reference" else ("full", "tile", "factored")
    if leaf.exact != (leaf.reason in EXACT_REASONS):
        problem = f"its first moment is kept as {leaf.mu}, which does not go with the reason {leaf.reason!r}"
    elif leaf.exact and leaf.nu != ("full",):
        problem = f"exact Adam keeps a full second moment, found {leaf.nu}"
    elif rule == "reference" and leaf.exact and leaf.reason != EMPTY:
        problem = f"rule 'reference' has no exact Adam, found the reason {leaf.reason!r}"
    elif leaf.mu[0] not in kinds or leaf.mu[0] == "factored" or leaf.nu[0] not in kinds:
        problem = f"rule {rule!r} keeps no moments as {leaf.mu} and {leaf.nu}"
    elif any(size < 0 for size in leaf.shape):
        problem = f"its shape {leaf.shape} is none"
    else:
        try:
            leaf.statistics()
            return
        except (ArithmeticError, ValueError, IndexError, TypeError) as error:
            problem = str(error)
    raise ValueError(f"the plan of leaf {path!r} contradicts itself: {problem}")


def _some(paths: Any, most: int = 6) -> str:
    paths = list(paths)
    shown = ", ".join(repr(path) for path in paths[:most])
    return shown + (f", ... ({len(paths)} in all)" if len(paths) > most else "") if paths else "(none)"
