"""What an optimizer state holds, leaf by leaf, and why: `explain` for people, `blocks` for programs."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from typing import Any

import jax
import numpy as np
import optax

from gefen_jax import codebook, local, paths, state, update
from gefen_jax.implementation import choose, how, is_large
from gefen_jax.plan import LeafPlan, split_of
from gefen_jax.reasons import EMPTY, EXPLANATIONS, LEARNED
from gefen_jax.state import GefenState, decisions
from gefen_jax.update import Leaf

ADAM_BYTES = 8
"""State of AdamW in float32, bytes per parameter."""
UNKNOWN = "unknown"
NOT_HELD = "not held"
NO_SPLIT = "no split"
MEANINGS = EXPLANATIONS | {
    UNKNOWN: "an abstract state has shapes only: the plan, or the state itself, knows the reasons",
    NOT_HELD: "no Gefen state holds this parameter",
    NO_SPLIT: "no rows and columns worth factoring: both moments share blocks",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter's share of the state.

    Attributes:
      path: the leaf's path.
      shape: the parameter's shape. Of one without elements only the rank is known unless ``params`` is given.
      first_moment: how it is kept, in words.
      second_moment: how it is kept, in words.
      statistics: numbers stored beside the codes (scales, second moments, factors).
      bytes: bytes of state.
      bytes_per_parameter: the same per element; 0 for parameters without elements.
      reason: why the leaf has this structure, one of `gefen_jax.reasons.REASONS`; "unknown" for abstract states, "not
        held" for a parameter that no Gefen state holds.
      split: whether the shape has rows and columns worth factoring; without them both moments share blocks.
      implementation: which twin of the step runs it.
      because: why that twin.
    """

    path: str
    shape: tuple[int, ...]
    first_moment: str
    second_moment: str
    statistics: int
    bytes: int
    bytes_per_parameter: float
    reason: str
    split: bool
    implementation: str
    because: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """An optimizer state, explained.

    Attributes:
      rows: one `Row` per parameter.
      parameters: number of parameter elements that Gefen states hold.
      bytes: bytes of Gefen state in all, with counters and codebooks.
      adam_bytes: what AdamW in float32 keeps for the same parameters.
      rule: the rule in force, or "unknown" for abstract states.
      codebook: where the codebook comes from.
      count: steps taken; None for abstract states.
      step: how `apply` runs a whole step; None if the transformation was not given.
      unmatched: the transformation's ``full_precision``, if it is a pattern that no parameter here matches.
    """

    rows: tuple[Row, ...]
    parameters: int
    bytes: int
    adam_bytes: int
    rule: str
    codebook: str
    count: int | None
    step: str | None = None
    unmatched: str | None = None

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state per parameter element."""
        return self.bytes / self.parameters if self.parameters else 0.0

    def summary(self) -> str:
        """The totals in words."""
        share = self.bytes / self.adam_bytes if self.adam_bytes else 0.0
        steps = "" if self.count is None else f", {self.count} step{'s' * (self.count != 1)} taken"
        return (
            f"{self.parameters:,} parameters, {self.bytes:,} bytes of state = {self.bytes_per_parameter:.3f} B/param "
            f"(AdamW: {self.adam_bytes:,} bytes, {share:.1%} of it here); rule {self.rule}; codebook: "
            f"{self.codebook}{steps}"
        )

    def legend(self) -> dict[str, str]:
        """What the table's short words mean, as far as they occur: reasons, then what runs the leaves."""
        words = {row.reason: MEANINGS[row.reason] for row in self.rows}
        if any(not row.split for row in self.rows):
            words[NO_SPLIT] = MEANINGS[NO_SPLIT]
        because: dict[str, dict[str, None]] = {}
        for row in self.rows:
            if row.because:
                because.setdefault(row.implementation, {})[row.because] = None
        return words | {f"runs as {name}": "; ".join(reasons) for name, reasons in because.items()}

    def __str__(self) -> str:
        table = [HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
        lines = ["  ".join(map(_padded, line, widths, HEAD)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        legend = self.legend()
        width = max(map(len, legend), default=0)
        meanings = [f"{word.ljust(width)}  {meaning}" for word, meaning in legend.items()]
        return "\n".join([*lines, "", *meanings, "", self.summary(), *self._notes()])

    def _notes(self) -> list[str]:
        """What is to be said of the transformation."""
        notes = [] if self.step is None else [f"apply: {self.step}"]
        if self.unmatched is not None:
            notes.append(f"full_precision {self.unmatched!r} matches no path here: nothing is kept exact for it")
        return notes

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in self.rows
        )
        legend = "".join(
            f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in self.legend().items()
        )
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><dl>{legend}</dl>"
            f"<p>{html.escape(self.summary())}</p>" + "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        )


HEAD = ("parameter", "shape", "first moment", "second moment", "bytes", "B/param", "reason", "runs as")


def _padded(cell: str, width: int, column: str) -> str:
    return cell.rjust(width) if column in ("bytes", "B/param") else cell.ljust(width)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.path or "(the tree itself)",
        "x".join(map(str, row.shape)) or "scalar",
        row.first_moment,
        row.second_moment,
        f"{row.bytes:,}",
        f"{row.bytes_per_parameter:.3f}",
        row.reason if row.split else f"{row.reason}, {NO_SPLIT}",
        row.implementation,
    )


def explain(
    opt_state: Any,
    params: Any = None,
    *,
    tx: optax.GradientTransformation | None = None,
    implementation: str = "auto",
    shardings: Any = None,
) -> Explanation:
    """Say what every leaf of a Gefen state holds, how much, and why.

    Args:
      opt_state: an optimizer state with at least one `GefenState`, concrete or from `jax.eval_shape`. Abstract states
        have shapes and bytes, but their rule and reasons are not known.
      params: the parameters, to name those that no Gefen state holds; optional.
      tx: what `gefen` or `fused_chain` returned, which knows the next two; any other transformation is taken too, to
        say how `gefen_jax.apply` steps it.
      implementation: what `gefen` was built with, to say which twin of the step runs.
      shardings: likewise.

    Returns:
      An `Explanation`: print it, show it in a notebook, or read its rows.

    Raises:
      ValueError: if there is no Gefen state, it is damaged, or it belongs to other parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from gefen_jax import gefen
      >>> found = explain(gefen(1e-3).init({"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)}))
      >>> found.rows[1].second_moment, round(found.rows[1].bytes_per_parameter, 3)
      ('256 rows x 512 columns', 1.039)
      >>> found.rows[0].reason, found.legend()["small"]
      ('small', 'fewer than min_size elements: exact Adam costs little and sets the usable learning rate')
    """
    nodes = _states(opt_state)
    requested = getattr(tx, "implementation", implementation)
    stated = local.stated(getattr(tx, "shardings", shardings))
    given = {} if params is None else dict(paths.named_leaves(params))
    shapes = {} if params is None else {path: tuple(p.shape) for path, p in paths.named_leaves(params)}
    rows: list[Row] = []
    total = 0
    for node in nodes:
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(node))
        words = state.read_format(node)
        decided = {} if words is None else decisions(node, words)
        shaped = [
            (path, leaf, _shape(path, leaf, decided.get(path), node, shapes))
            for path, leaf in zip(paths.names(node.mu), node.leaves())
        ]
        large = is_large([shape for *_, shape in shaped], node.leaves())
        for path, leaf, shape in shaped:
            home = local.home(stated, path, leaf, parameter=given.get(path))
            chosen = choose(requested, shape, leaf, None, given.get(path), home=home, large=large)
            rows.append(_row(path, leaf, decided.get(path), shape, chosen))
    held = {row.path for row in rows}
    parameters = sum(math.prod(row.shape) for row in rows)
    for path, shape in shapes.items():
        if path not in held:
            rows.append(Row(path, shape, "-", "-", 0, 0, 0.0, NOT_HELD, True, "-", ""))
    words = state.read_format(nodes[0])
    return Explanation(
        rows=tuple(rows),
        parameters=parameters,
        bytes=total,
        adam_bytes=ADAM_BYTES * parameters,
        rule=UNKNOWN if words is None else words.rule,
        codebook=UNKNOWN if words is None else _codebook_source(nodes[0]),
        count=None if words is None else int(jax.device_get(nodes[0].count)),
        step=None if tx is None else how(tx),
        unmatched=_unmatched(tx, [row.path for row in rows]),
    )


def _unmatched(tx: Any, names: list[str]) -> str | None:
    """The pattern of ``full_precision`` that no path matches, most likely a slip of the pen."""
    pattern = getattr(getattr(tx, "options", None), "full_precision", None)
    if not isinstance(pattern, str) or any(re.search(pattern, name) for name in names):
        return None
    return pattern


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
    found = state.gefen_states(opt_state)
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


def _shape(path: str, leaf: Leaf, decision: LeafPlan | None, node: GefenState, shapes: dict[str, Any]) -> Any:
    """The parameter's shape. Of a parameter without elements a state keeps the rank alone."""
    known = None if decision is None else decision.shape
    if decision is not None and decision.reason == EMPTY:
        known = (0,) * len(decision.shape)
    if path in shapes:
        given = shapes[path]
        fits = known is None or given == known or (0 in given and 0 in known)
        if not fits:
            raise ValueError(f"explain: parameter {path!r} has shape {given}, the state was made for {known}")
        return given
    return _abstract_shape(path, leaf, node) if known is None else known


def _abstract_shape(path: str, leaf: Leaf, node: GefenState) -> tuple[int, ...]:
    """The parameter's shape where no format word tells along which axis two 4-bit codes share a byte."""
    kept = tuple(leaf.mu.shape)
    if leaf.mu.dtype != np.uint8 or node.codebook.shape[-1] > 16:
        return kept
    if update.is_factored(leaf):
        return tuple(map(max, leaf.nu.shape, leaf.nu_cross.shape))
    if kept and kept[-1] % 2 == 0:  # an even last axis is packed, and a packed axis after it would be the last
        return kept[:-1] + (2 * kept[-1],)
    raise ValueError(
        f"explain: the packed codes of {path!r} have shape {kept}, which does not tell the parameter's shape in an "
        "abstract state: pass the parameters as the second argument"
    )


def _row(
    path: str,
    leaf: Leaf,
    decision: LeafPlan | None,
    shape: tuple[int, ...],
    chosen: tuple[str, str],
) -> Row:
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaf)
    count = math.prod(shape)
    name, because = chosen
    shared = decision is not None and not decision.exact and decision.nu == decision.mu and decision.reason != LEARNED
    return Row(
        path=path,
        shape=shape,
        first_moment=_first(leaf, shape),
        second_moment=_second(leaf, shape),
        statistics=sum(math.prod(x.shape) for x in (leaf.mu_scale, leaf.nu, leaf.nu_cross)),
        bytes=size,
        bytes_per_parameter=size / count if count else 0.0,
        reason=UNKNOWN if decision is None else decision.reason,
        split=not (shared and split_of(decision.shape, decision.axes) is None),  # type: ignore[union-attr]
        implementation=name,
        because=because,
    )


def _first(leaf: Leaf, shape: tuple[int, ...]) -> str:
    if update.is_exact(leaf.mu):
        return "float32"
    bits = 8 if math.prod(leaf.mu.shape) == math.prod(shape) else 4
    return f"{bits} bits, {_blocks(shape, tuple(leaf.mu_scale.shape))}"


def _second(leaf: Leaf, shape: tuple[int, ...]) -> str:
    nu, cross = tuple(leaf.nu.shape), tuple(leaf.nu_cross.shape)
    if update.is_factored(leaf):
        batch = math.prod(n for n, c in zip(nu, cross) if n == c and n > 1)
        rows, columns = math.prod(nu) // batch, math.prod(cross) // batch
        return (f"{batch} x " if batch > 1 else "") + f"{rows} rows x {columns} columns"
    return "full" if nu == shape or 0 in shape else _blocks(shape, nu)


def _blocks(shape: tuple[int, ...], stat: tuple[int, ...]) -> str:
    if any(size % count for size, count in zip(shape, stat)):
        return f"runs of {math.prod(shape) // math.prod(stat)}"
    tile = [size // count for size, count in zip(shape, stat)]
    return "blocks of " + ("x".join(map(str, tile)) or "1")
