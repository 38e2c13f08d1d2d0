"""What an optimizer state holds, leaf by leaf, and why: `explain` for people, `blocks` for programs."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import Any

import jax
import numpy as np

from gefen_jax import codebook, implementation, paths, state
from gefen_jax.plan import EXPLANATIONS, NO_SPLIT_NOTE, LeafPlan
from gefen_jax.state import GefenState, decisions
from gefen_jax.update import Leaf

ADAM_BYTES = 8
"""State of AdamW in float32, bytes per parameter."""
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter's share of the state.

    Attributes:
      path: the leaf's path.
      shape: the parameter's shape.
      first_moment: how it is kept, in words.
      second_moment: how it is kept, in words.
      statistics: numbers stored beside the codes (scales, second moments, factors).
      bytes: bytes of state.
      bytes_per_parameter: the same per element; 0 for parameters without elements.
      reason: why the leaf has this structure.
      implementation: which twin of the step runs it, and why.
    """

    path: str
    shape: tuple[int, ...]
    first_moment: str
    second_moment: str
    statistics: int
    bytes: int
    bytes_per_parameter: float
    reason: str
    implementation: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """An optimizer state, explained.

    Attributes:
      rows: one `Row` per parameter.
      parameters: number of parameter elements.
      bytes: bytes of Gefen state in all, with counters and codebooks.
      adam_bytes: what AdamW in float32 keeps for the same parameters.
      rule: the rule in force, or "unknown" for abstract states.
      codebook: where the codebook comes from.
      count: steps taken; None for abstract states.
    """

    rows: tuple[Row, ...]
    parameters: int
    bytes: int
    adam_bytes: int
    rule: str
    codebook: str
    count: int | None

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state per parameter element."""
        return self.bytes / self.parameters if self.parameters else 0.0

    def summary(self) -> str:
        """The totals in words."""
        share = self.bytes / self.adam_bytes if self.adam_bytes else 0.0
        steps = "" if self.count is None else f", {self.count} steps"
        return (
            f"{self.parameters:,} parameters, {self.bytes:,} bytes of state = {self.bytes_per_parameter:.3f} B/param "
            f"(AdamW: {self.adam_bytes:,} bytes, {share:.1%} of it here); rule {self.rule}; codebook: "
            f"{self.codebook}{steps}"
        )

    def __str__(self) -> str:
        table = [HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, "", self.summary()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{html.escape(self.summary())}</p>"


HEAD = ("parameter", "shape", "first moment", "second moment", "bytes", "B/param", "reason", "runs as")


def _cells(row: Row) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    size = f"{row.bytes_per_parameter:.3f}"
    return (
        row.path or "(the tree itself)",
        shape,
        row.first_moment,
        row.second_moment,
        f"{row.bytes:,}",
        size,
        row.reason,
        row.implementation,
    )


def explain(opt_state: Any, params: Any = None, *, implementation: str = "auto") -> Explanation:
    """Say what every leaf of a Gefen state holds, how much, and why.

    Args:
      opt_state: an optimizer state with at least one `GefenState`, concrete or from `jax.eval_shape`. Abstract states
        have shapes and bytes, but their rule and reasons are not known.
      params: the parameters, to name and count those that no Gefen state holds; optional.
      implementation: what the transformation was built with, to say which twin of the step runs.

    Returns:
      An `Explanation`: print it, show it in a notebook, or read its rows.

    Raises:
      ValueError: if there is no Gefen state, or it is damaged.

    Examples:
      >>> import jax.numpy as jnp
      >>> from gefen_jax import gefen
      >>> found = explain(gefen(1e-3).init({"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)}))
      >>> found.rows[1].second_moment, round(found.rows[1].bytes_per_parameter, 3)
      ('256 rows x 512 columns', 1.039)
      >>> found.rows[0].reason
      'small: fewer than min_size elements: exact Adam costs little and sets the usable learning rate'
    """
    nodes = _states(opt_state)
    rows: list[Row] = []
    total = 0
    for node in nodes:
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(node))
        words = state.read_format(node)
        decided = decisions(node, words) if words is not None else None
        for path, leaf in zip(paths.names(node.mu), node.leaves()):
            rows.append(_row(path, leaf, decided[path] if decided is not None else None, implementation))
    if params is not None:
        known = {row.path for row in rows}
        for path, p in paths.named_leaves(params):
            if path not in known:
                rows.append(Row(path, tuple(p.shape), "-", "-", 0, 0, 0.0, "not held by a Gefen state", "-"))
    held = [row for row in rows if row.first_moment != "-"]
    parameters = sum(math.prod(row.shape) for row in held)
    words = state.read_format(nodes[0])
    return Explanation(
        rows=tuple(rows),
        parameters=parameters,
        bytes=total,
        adam_bytes=ADAM_BYTES * parameters,
        rule=UNKNOWN if words is None else words.rule,
        codebook=UNKNOWN if words is None else _codebook_source(nodes[0]),
        count=None if words is None else int(jax.device_get(nodes[0].count)),
    )


def blocks(opt_state: Any) -> dict[str, LeafPlan]:
    """The structure of every leaf in force, as data.

    Returns:
      `LeafPlan` by path, over all Gefen states in ``opt_state``.

    Raises:
      ValueError: if there is no Gefen state, or it is abstract: then the plan that it was built with has the structure.

    Examples:
      >>> import jax.numpy as jnp
      >>> from gefen_jax import gefen
      >>> blocks(gefen(1e-3).init({"kernel": jnp.zeros((256, 512))}))["kernel"].nu
      ('factored', 0, 1)
    """
    found: dict[str, LeafPlan] = {}
    for node in _states(opt_state):
        words = state.read_format(node)
        if words is None:
            raise ValueError("blocks: the state is abstract or traced; its plan has the structure")
        found.update(decisions(node, words))
    return found


def _states(opt_state: Any) -> list[GefenState]:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, GefenState))
    found = [node for node in nodes if isinstance(node, GefenState)]
    if not found:
        raise ValueError(
            "there is no Gefen state in this optimizer state: pass what tx.init(params) returned, for a tx made with "
            "gefen(...) or scale_by_gefen(...)"
        )
    return found


def _codebook_source(node: GefenState) -> str:
    words = np.asarray(jax.device_get(node.codebook))
    bits = int(words.size).bit_length() - 1
    same = np.array_equal(words, codebook.prior_codebook(bits))
    return f"{words.size} words, " + ("prior (not calibrated)" if same else "learned")


def _row(path: str, leaf: Leaf, decision: LeafPlan | None, requested: str) -> Row:
    shape = tuple(leaf.mu.shape) if decision is None else decision.shape
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaf)
    statistics = [leaf.mu_scale, leaf.nu, leaf.nu_cross]
    count = math.prod(shape)
    path_used, why = implementation.choose(requested, shape, leaf)
    reason = UNKNOWN if decision is None else f"{decision.reason}: {EXPLANATIONS[decision.reason]}"
    if decision is not None and not decision.exact and decision.nu[0] == "tile" and decision.nu == decision.mu:
        reason += NO_SPLIT_NOTE
    return Row(
        path=path,
        shape=shape,
        first_moment=_first(leaf, shape),
        second_moment=_second(leaf, shape),
        statistics=sum(math.prod(x.shape) for x in statistics),
        bytes=size,
        bytes_per_parameter=size / count if count else 0.0,
        reason=reason,
        implementation=f"{path_used} ({why})",
    )


def _first(leaf: Leaf, shape: tuple[int, ...]) -> str:
    if leaf.mu.dtype != np.uint8:
        return "float32"
    bits = 8 if math.prod(leaf.mu.shape) == math.prod(shape) else 4
    return f"{bits} bits, {_blocks(shape, tuple(leaf.mu_scale.shape))}"


def _second(leaf: Leaf, shape: tuple[int, ...]) -> str:
    cross = tuple(leaf.nu_cross.shape)
    nu = tuple(leaf.nu.shape)
    if cross != (1,) * len(cross):
        batch = math.prod(n for n, c in zip(nu, cross) if n == c and n > 1)
        rows, columns = math.prod(nu) // batch, math.prod(cross) // batch
        return (f"{batch} x " if batch > 1 else "") + f"{rows} rows x {columns} columns"
    return "full" if nu == shape else _blocks(shape, nu)


def _blocks(shape: tuple[int, ...], stat: tuple[int, ...]) -> str:
    if any(size % count for size, count in zip(shape, stat)):
        return f"runs of {math.prod(shape) // math.prod(stat)}"
    tile = [size // count for size, count in zip(shape, stat)]
    return "blocks of " + ("x".join(map(str, tile)) or "1")
