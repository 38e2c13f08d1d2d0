"""Watching a run: what quantisation costs each leaf, and whether the codebook still fits.

`diagnose` is a pure function of gradients and state, meant to be called inside the jitted step now and then and
returned as auxiliary output. `advise` reads its result on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gefen_jax import codebook, paths, quantization, sharding, state, tiling, update
from gefen_jax.quantization import BINS
from gefen_jax.update import Leaf

DRIFT = 1.25
"""Mean squared error of the codebook in use over that of one learned now, above which `advise` says calibrate."""
COARSE = 0.05
"""Relative quantisation error above which `advise` names a leaf; 8 bits give about 0.003, 4 bits 0.03 to 0.05."""


class LeafDiagnostics(NamedTuple):
    """Float32 scalars of one leaf.

    Attributes:
      update_rms: root mean square of Adam's direction (about 1 early, less later); times the learning rate it is the
        step.
      quantisation_error: root mean square of what the stored first moment loses, relative to that of the moment; 0
        for exact leaves.
      vanished: share of elements whose moment is not 0 but is stored as 0.
      saturation: share of elements stored as the largest word, -1 or 1: one per block, or more if blocks are flat.
    """

    update_rms: jax.Array
    quantisation_error: jax.Array
    vanished: jax.Array
    saturation: jax.Array


class Diagnostics(NamedTuple):
    """What `diagnose` returns: a pytree of small arrays.

    Attributes:
      leaves: `LeafDiagnostics` by path.
      counts: float32[4096], histogram of block-normalised first moments without exact zeros.
      codebook: float32[words], the codebook in use.
    """

    leaves: dict[str, LeafDiagnostics]
    counts: jax.Array
    codebook: jax.Array


def diagnose(grads: Any, opt_state: Any, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Diagnostics:
    """What the next step with these gradients does to each leaf. Pure: the state is not changed.

    Args:
      grads: the gradients that ``update`` is about to see; other leaves than the Gefen states' are ignored.
      opt_state: an optimizer state with Gefen states of rule "gefen".
      b1, b2, eps: those of the transformation.

    Returns:
      `Diagnostics`. It costs about one more optimizer step.

    Raises:
      ValueError: if there is no Gefen state, a gradient is missing, gradients are shards inside `jax.shard_map`, or a
        state whose values are known has rule "reference".

    Examples:
      >>> from gefen_jax import gefen
      >>> grads = {"w": jax.random.normal(jax.random.key(0), (128, 256))}
      >>> found = jax.jit(diagnose)(grads, gefen(1e-3).init(grads))
      >>> bool(found.leaves["w"].quantisation_error < 0.01)
      True
    """
    nodes = state.gefen_states(opt_state)
    if not nodes:
        raise ValueError("diagnose: there is no Gefen state in this optimizer state")
    gradients = dict(paths.named_leaves(grads))
    found: dict[str, LeafDiagnostics] = {}
    counts = jnp.zeros(BINS, jnp.float32)
    for node in nodes:
        words = state.read_format(node)
        if words is not None and words.rule != "gefen":
            raise ValueError(
                f"diagnose: the state has rule {words.rule!r}, whose step it does not know: it watches rule 'gefen'"
            )
        book = update.Codebook(node.codebook, quantization.search_table(node.codebook))
        h = update.hyper(b1, b2, eps, node.count + 1)
        for path, leaf in zip(paths.names(node.mu), node.leaves()):
            if path not in gradients:
                raise ValueError(f"diagnose: there is no gradient for {path!r}, which the optimizer state holds")
            g = gradients[path]
            if sharding.varying(g):
                raise ValueError(
                    f"diagnose: the gradient of {path!r} is a shard inside shard_map: call diagnose outside of it, on "
                    "whole arrays"
                )
            if g.size:
                found[path], seen = sharding.automatic(_leaf, g, leaf, book, h)
                counts = counts + seen
    return Diagnostics(found, counts, nodes[0].codebook)


def _leaf(g: jax.Array, leaf: Leaf, book: update.Codebook, h: update.Hyper) -> tuple[LeafDiagnostics, Any]:
    d, new = update.leaf_update(g, leaf, book, h)
    rms = jnp.sqrt(jnp.mean(d * d))
    zero = jnp.zeros_like(rms)  # on the mesh that rms is on
    if update.is_exact(leaf.mu):
        return LeafDiagnostics(rms, zero, zero, zero), zero
    view = tiling.view(g.shape, leaf.mu_scale.shape)
    blocked = lambda x: x.reshape(view.elements)  # noqa: E731
    old, codes = (_codes(g.shape, x.mu) for x in (leaf, new))
    old_scale, scale = (x.mu_scale.reshape(view.statistic) for x in (leaf, new))
    m = update.first_moment(blocked(g.astype(jnp.float32)), blocked(old), old_scale, book.words, h)
    kept = quantization.decode(blocked(codes), book.words) * scale
    power = jnp.sum(m * m)
    lost = jnp.sum((m - kept) ** 2)
    error = jnp.where(power > 0, jnp.sqrt(lost / jnp.where(power > 0, power, 1.0)), 0.0)
    vanished = jnp.mean((kept == 0) & (m != 0))
    last = book.words.shape[0] - 1
    saturation = jnp.mean((codes == 0) | (codes == last))
    y = jnp.where(scale > 0, m / jnp.where(scale > 0, scale, 1.0), 0.0)
    # Counted in whole numbers: float32 takes no increments beyond 2^24.
    counts = jnp.zeros(BINS, jnp.int32).at[quantization.bin_of(y)].add((y != 0).astype(jnp.int32))
    return LeafDiagnostics(rms, error, vanished, saturation), counts.astype(jnp.float32)


def _codes(shape: tuple[int, ...], mu: jax.Array) -> jax.Array:
    axis = update.packed_axis(shape, mu)
    return mu if axis is None else quantization.unpack(mu, axis)


def advise(diagnostics: Diagnostics) -> str:
    """What to do about it, in a sentence or two: on the host, with concrete diagnostics.

    Args:
      diagnostics: what `diagnose` returned, outside jit.

    Returns:
      Whether the codebook still fits (else: calibrate again), and the leaf that loses most, if that is much.

    Raises:
      TypeError: `diagnostics` is something else, such as an optimizer state.

    Examples:
      >>> from gefen_jax import gefen
      >>> grads = {"w": jax.random.normal(jax.random.key(0), (128, 256))}
      >>> advise(diagnose(grads, gefen(1e-3).init(grads)))
      'the codebook fits: its squared error is 1.0... times that of one learned now'
    """
    if not isinstance(diagnostics, Diagnostics):
        raise TypeError(
            f"advise: expected what diagnose(grads, opt_state) returned, found {type(diagnostics).__name__}"
        )
    counts = np.rint(np.asarray(diagnostics.counts)).astype(np.int64)
    if not counts.any():
        return "no momentum is quantised: there is nothing to calibrate"
    words = np.asarray(diagnostics.codebook)
    bits = int(words.size).bit_length() - 1
    drift = codebook.mse(counts, words) / codebook.mse(counts, codebook.learn_codebook(counts, bits=bits))
    parts = []
    if drift > DRIFT:
        parts.append(
            f"calibrate again: the codebook's squared error is {drift:.2f} times that of one learned now "
            "(opt_state = calibrate(opt_state, grads), between steps; it keeps the moments)"
        )
    else:
        parts.append(f"the codebook fits: its squared error is {drift:.2f} times that of one learned now")
    coarse = {path: float(leaf.quantisation_error) for path, leaf in diagnostics.leaves.items()}
    worst = max(coarse, key=lambda path: coarse[path])
    if coarse[worst] > COARSE:
        parts.append(
            f"{worst!r} loses {coarse[worst]:.1%} of its momentum to quantisation: keep it exact with full_precision, "
            "or use 8 bits"
        )
    return "; ".join(parts)
