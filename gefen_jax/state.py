"""The optimizer state: a plain NamedTuple of arrays whose shapes are its structure, and the words that shapes lack."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from gefen_jax import paths, tiling
from gefen_jax.choices import BITS, CODECS, RULES, SECOND_MOMENTS
from gefen_jax.plan import LeafPlan, Options
from gefen_jax.quantization import zero_code
from gefen_jax.reasons import EXACT_REASONS, REASONS
from gefen_jax.tiling import Structure
from gefen_jax.update import Leaf, is_exact

VERSION = 1
"""Version of the state's layout. A state of another version is refused."""


class GefenState(NamedTuple):
    """State of `gefen` and `scale_by_gefen`; P is a parameter's shape and rank its number of axes.

    Attributes:
      count: int32 (), steps taken.
      format: uint32 (2 + leaves,), what shapes cannot tell; see `Format`.
      codebook: float32 (256,) or (16,), the words that first-moment codes stand for, ascending.
      mu: tree of first moments: uint8 codes of shape P (4 bits: one even axis halved), or float32 (exact Adam).
      mu_scale: tree of float32, largest absolute first moment of each block; same rank as the parameter.
      nu: tree of float32 second moments: of shape P, one per block, or the row factor.
      nu_cross: tree of float32 column factors; of shape (1, .., 1) where there are none.
    """

    count: jax.Array  # type: ignore[assignment]
    format: jax.Array
    codebook: jax.Array
    mu: Any
    mu_scale: Any
    nu: Any
    nu_cross: Any

    def leaves(self) -> list[Leaf]:
        """State of each parameter, in the order of `jax.tree.leaves(self.mu)`."""
        columns = [jax.tree.leaves(tree) for tree in (self.mu, self.mu_scale, self.nu, self.nu_cross)]
        if len({len(column) for column in columns}) != 1:
            raise ValueError(
                f"a Gefen state's mu, mu_scale, nu and nu_cross must have equally many leaves; found "
                f"{', '.join(str(len(column)) for column in columns)}: was the state rebuilt from another tree?"
            )
        return [Leaf(*leaf) for leaf in zip(*columns)]

    def with_leaves(self, leaves: list[Leaf], **other: Any) -> GefenState:
        """This state with the leaves replaced, in the same order; their shapes may differ."""
        columns = [list(column) for column in zip(*leaves)] if leaves else [[], [], [], []]
        trees = {
            name: jax.tree.unflatten(jax.tree.structure(getattr(self, name)), column)
            for name, column in zip(Leaf._fields, columns)
        }
        return self._replace(**trees, **other)


def is_gefen(node: Any) -> bool:
    """Whether a node of an optimizer state is a `GefenState`."""
    return isinstance(node, GefenState)


def gefen_states(opt_state: Any) -> list[GefenState]:
    """All Gefen states in any nesting of Optax wrappers, in the order of `jax.tree.leaves`."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_gefen) if is_gefen(node)]


class LeafFormat(NamedTuple):
    """What shapes cannot tell of a leaf: why it has its structure, (batch, rows) axes, and the packed axis."""

    reason: str
    axes: tuple[int, int] | None
    packed: int | None


class Format(NamedTuple):
    """The ``format`` words, decoded.

    Word 0 holds version (8 bits), rule (4), bits (4), second moment (4), normalised momentum (1) and codec (4), word
    1 ``min_size``; then, per leaf, reason (8), batch axes and row axes (4 + 4) and packed axis + 1 (4).
    """

    version: int
    rule: str
    bits: int
    second_moment: str
    normalised: bool
    codec: str
    min_size: int
    leaves: tuple[LeafFormat, ...]


def encode_format(options: Options, leaves: list[LeafPlan]) -> np.ndarray:
    """The ``format`` array of a state."""
    head = VERSION | (RULES.index(options.rule) + 1) << 8 | options.bits << 12
    head |= SECOND_MOMENTS.index(options.second_moment) << 16 | CODECS.index(options.codec) << 21
    words = [head, min(options.min_size, 2**32 - 1)]
    for leaf in leaves:
        factored = leaf.nu[0] == "factored"
        batch, rows = (leaf.nu[1], leaf.nu[2]) if factored else leaf.axes or (0, 0)
        axis = packed_axis(leaf, options.bits)
        packed = 0 if axis is None else axis + 1
        words.append(REASONS.index(leaf.reason) | batch << 8 | rows << 12 | packed << 16)
    return np.asarray(words, np.uint32)


def decode_format(words: Any) -> Format:
    """The `Format` of concrete ``format`` words.

    Raises:
      ValueError: if they are of another version or no such words at all.
    """
    words = np.asarray(words)
    if words.ndim == 2:
        raise ValueError(
            "this Gefen state is a stack of states (made under jax.vmap): take one out of it first, "
            "e.g. jax.tree.map(lambda x: x[0], opt_state)"
        )
    if words.ndim != 1 or words.size < 2 or words.dtype != np.uint32:
        raise ValueError(f"a Gefen state's format is a uint32 vector; found {words.dtype}{list(words.shape)}")
    head = int(words[0])
    if head & 255 != VERSION:
        raise ValueError(
            f"this Gefen state has layout version {head & 255}, and this gefen_jax reads version {VERSION}: "
            "load it with the release that wrote it"
        )
    rule, bits, second, normalised = head >> 8 & 15, head >> 12 & 15, head >> 16 & 15, bool(head >> 20 & 1)
    codec = head >> 21
    known = 1 <= rule <= len(RULES) and bits in BITS and second < len(SECOND_MOMENTS) and codec < len(CODECS)
    if not known:
        raise ValueError(f"a Gefen state's format word {head:#x} has unknown fields: written by a later release?")
    leaves = []
    for word in words[2:].tolist():
        if word & 255 >= len(REASONS):
            raise ValueError(f"a Gefen state's leaf word {word:#x} has an unknown reason: written by a later release?")
        batch, rows, packed = word >> 8 & 15, word >> 12 & 15, word >> 16 & 15
        axes = (batch, rows) if rows else None
        leaves.append(LeafFormat(REASONS[word & 255], axes, packed - 1 if packed else None))
    return Format(
        version=VERSION,
        rule=RULES[rule - 1],
        bits=bits,
        second_moment=SECOND_MOMENTS[second],
        normalised=normalised,
        codec=CODECS[codec],
        min_size=int(words[1]),
        leaves=tuple(leaves),
    )


def read_format(state: GefenState) -> Format | None:
    """The state's `Format`, or None where its words are not known on this host (traced, abstract)."""
    return read_words(state.format)


def read_words(words: Any) -> Format | None:
    """The `Format` of ``format`` words; None for anything but arrays whose values are known on this host."""
    words = paths.single(words)
    if isinstance(words, jax.core.Tracer) or not isinstance(words, jax.Array | np.ndarray):
        return None
    if isinstance(words, jax.Array) and not (words.is_fully_addressable or words.is_fully_replicated):
        return None
    return decode_format(jax.device_get(words))


def known_format(state: GefenState, who: str) -> Format:
    """The state's `Format`; a TypeError where it is traced or abstract."""
    words = read_format(state)
    if words is None:
        raise TypeError(
            f"{who} changes or reads the state's structure, so it needs concrete arrays outside jit; for abstract "
            "states build the transformation with gefen(..., plan=plan)"
        )
    return words


def check_format(state: GefenState, options: Options, *, where: str) -> None:
    """Raise a ValueError if the state was made by other options than those of the transformation that meets it."""
    found = read_format(state)
    if found is None:
        return
    mine = (options.rule, options.bits, options.codec)
    if (found.rule, found.bits, found.codec) != mine or found.normalised:
        raise ValueError(
            f"{where}: the state was made with rule {found.rule!r}, {found.bits} bits and codec {found.codec!r}"
            f"{' and normalised momentum' if found.normalised else ''}, the transformation with rule "
            f"{mine[0]!r}, {mine[1]} bits and codec {mine[2]!r}: build the transformation as it was, or start from "
            "tx.init(params)"
        )


def packed_axis(leaf: LeafPlan, bits: int) -> int | None:
    """The axis along which a leaf's codes are packed."""
    return None if bits == 8 or leaf.exact else tiling.packed_axis(leaf.shape)


def mu_shape(leaf: LeafPlan, bits: int) -> tuple[int, ...]:
    """Shape of the stored first moment; parameters without elements keep one element (checkpoints refuse none)."""
    if 0 in leaf.shape:
        return (1,) * len(leaf.shape)
    axis = packed_axis(leaf, bits)
    if axis is None:
        return leaf.shape
    return leaf.shape[:axis] + (leaf.shape[axis] // 2,) + leaf.shape[axis + 1 :]


def unflatten(params: Any, leaves: list[Leaf]) -> dict[str, Any]:
    """The state's trees from leaves in the order of ``params``: mu keeps boxes, statistics are bare arrays."""
    columns = [list(column) for column in zip(*leaves)] if leaves else [[], [], [], []]
    mu, *statistics = columns
    trees = {"mu": jax.tree.unflatten(jax.tree.structure(params), mu)}
    for name, column in zip(Leaf._fields[1:], statistics):
        trees[name] = paths.unflatten_bare(params, column)
    return trees


def fresh_code(leaf: LeafPlan, bits: int) -> int:
    """What the first-moment bytes of a fresh leaf hold: the code of 0, twice where two codes share a byte."""
    zero = zero_code(2**bits)
    return zero if packed_axis(leaf, bits) is None else zero << 4 | zero


def leaf_plan(path: str, leaf: Leaf, words: LeafFormat, rule: str) -> LeafPlan:
    """The decision that a leaf's shapes and format word express; ``leaf`` may hold shapes only."""
    shape = tuple(leaf.mu.shape)
    if words.packed is not None:
        axis = words.packed
        shape = shape[:axis] + (2 * shape[axis],) + shape[axis + 1 :]
    scale, nu, cross = (tuple(x.shape) for x in (leaf.mu_scale, leaf.nu, leaf.nu_cross))
    for what, stat in (("mu_scale", scale), ("nu", nu)):
        if not (tiling.is_tiling(shape, stat) or tiling.is_flat(shape, stat)):
            raise ValueError(
                f"state of {path!r}: {what} has shape {stat}, which does not divide the parameter's {shape}"
            )
    if is_exact(leaf.mu) != (words.reason in EXACT_REASONS):
        raise ValueError(
            f"state of {path!r}: its first moment is {leaf.mu.dtype}, its format word says {words.reason!r}: the state "
            "was cast or partly replaced; restore it with the dtypes it was saved with"
        )
    factored = cross != (1,) * len(cross)
    if factored and words.axes is None:
        raise ValueError(f"state of {path!r}: it has column factors, but its format word names no axes")
    mu: Structure
    if not is_exact(leaf.mu):
        mu = _structure(shape, scale, rule)
    else:
        mu = ("full",)
    second: Structure
    if factored:
        assert words.axes is not None
        second = ("factored", *words.axes)
    else:
        second = ("full",) if nu == shape else _structure(shape, nu, rule)
    axes = words.axes
    if factored and axes == tiling.default_split(shape):
        axes = None
    return LeafPlan(shape, mu, second, words.reason, axes)


def _structure(shape: tuple[int, ...], stat: tuple[int, ...], rule: str) -> Structure:
    if rule == "reference":
        return ("flat", math.prod(shape) // math.prod(stat))
    return ("tile", tuple(size // count for size, count in zip(shape, stat)))


def decisions(node: GefenState, words: Format) -> dict[str, LeafPlan]:
    """`LeafPlan` by path of a state in force."""
    names, leaves = paths.names(node.mu), node.leaves()
    if node.codebook.shape != (2**words.bits,):
        raise ValueError(
            f"a Gefen state of {words.bits} bits has {2**words.bits} codebook words; found shape "
            f"{tuple(node.codebook.shape)}: was part of the state replaced?"
        )
    if len(words.leaves) != len(leaves):
        raise ValueError(
            f"a Gefen state's format describes {len(words.leaves)} leaves, and there are {len(leaves)}: was part of "
            "the state replaced?"
        )
    return {path: leaf_plan(path, leaf, word, words.rule) for path, leaf, word in zip(names, leaves, words.leaves)}
