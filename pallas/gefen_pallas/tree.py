"""The step of a whole tree: which kernels run on which arrays, in which order.

The same code drives compiled kernels (through jax-triton) and interpreted ones (on NumPy arrays): a `Launcher` says
how. Arrays that a kernel writes are written in place; state keeps its one array per leaf, nothing is concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gefen_pallas import schedule
from gefen_pallas.geometry import DTYPES, FACTORED, Cut


class Arrays(NamedTuple):
    """One leaf's arrays: gradient, parameter (None where it is not read), and the state."""

    gradient: Any
    parameter: Any
    mu: Any
    scale: Any
    nu: Any
    cross: Any


class Launcher(Protocol):
    """How kernels run and where arrays live."""

    def mutable(self, array: Any) -> Any:
        """A handle through which a kernel may write the array."""

    def value(self, handle: Any) -> Any:
        """What a handle holds after the launches so far."""

    def constant(self, array: np.ndarray) -> Any:
        """A small array known beforehand."""

    def zeros(self, length: int) -> Any:
        """A handle on int32 zeros."""

    def launch(self, name: str, programs: int, operands: list[Any], outputs: Sequence[int], **constants: Any) -> list:
        """Run kernel ``name``; ``outputs`` are lengths of float32 vectors that it writes whole, which are returned."""


def step(
    launcher: Launcher,
    leaves: Sequence[Arrays],
    cuts: Sequence[Cut],
    words: Any,
    hyper: Any,
    decays: Sequence[int],
    *,
    reads: bool,
    apply: bool,
    companding: bool = False,
    limits: dict[str, int] | None = None,
) -> tuple[list[Any], list[tuple[Any, Any, Any, Any]]]:
    """One step of all leaves: two launches if a leaf is factored, else one (more beyond the limits of a launch).

    Args:
      launcher: how to run kernels.
      leaves: arrays of each leaf.
      cuts: from `geometry.plan_leaf`.
      words: codebook, float32 (256,) or (16,).
      hyper: float32 vector: b1, 1 - b1, b2, 1 - b2, 1 - b1^t, 1 - b2^t, eps, learning rate, factor of the gradients,
        then the weight decays.
      decays: for each leaf which of them it has.
      reads: whether the parameters are read.
      apply: whether the result is the new parameters (written over the old) or the updates (over the gradients).
      companding: whether codes come from the closed form instead of the nearest word.
      limits: arguments of `schedule.split`.

    Returns:
      Updates or new parameters, and the new (mu, scale, nu, cross) of each leaf.
    """
    outputs: list[Any] = [None] * len(leaves)
    state: list[Any] = [None] * len(leaves)
    pointers = [schedule.pointers(cut, reads=reads) for cut in cuts]
    for group in schedule.split([tuple(cut.kind) for cut in cuts], pointers, **(limits or {})):
        crossed = [i for i in group if is_factored(cuts[i])]
        nus = {i: launcher.mutable(leaves[i].nu) for i in group if i not in crossed}
        crosses: dict[int, Any] = {}
        mean, means = words, [0] * len(cuts)  # any array stands for the means where there are none
        if crossed:
            summed, mean, means = _sums(launcher, leaves, cuts, crossed, hyper)
            nus |= {i: nu for i, (nu, _) in summed.items()}
            crosses = {i: cross for i, (_, cross) in summed.items()}
        table = schedule.step_table(cuts, group, decays, means)
        targets = {i: launcher.mutable(leaves[i].parameter if apply else leaves[i].gradient) for i in group}
        mus = {i: launcher.mutable(leaves[i].mu) for i in group}
        scales = {i: leaves[i].scale if cuts[i].kind.exact else launcher.mutable(leaves[i].scale) for i in group}
        gradients = {i: leaves[i].gradient for i in group} if apply else targets
        parameters = targets if apply else {i: leaves[i].parameter for i in group}
        columns = [
            tuple(column[i] for i in table.leaves)
            for column in (gradients, parameters if reads else dict.fromkeys(group), mus, scales, nus)
        ]
        if not reads:
            columns[1] = ()
        launcher.launch(
            "gefen_step",
            table.programs,
            [
                *columns,
                tuple(crosses[i] for i in table.leaves if i in crosses),
                *(mean, words, hyper, launcher.constant(table.meta), launcher.constant(table.starts)),
            ],
            (),
            LEAVES=len(table.leaves),
            SLOTS=len(table.starts),
            CLASSES=table.classes,
            WORDS=words.shape[0],
            READS=reads,
            APPLY=apply,
            COMPANDING=companding,
            QUANTISED=any(not cuts[i].kind.exact for i in group),
        )
        for i in group:
            outputs[i] = launcher.value(targets[i])
            scale = scales[i] if cuts[i].kind.exact else launcher.value(scales[i])
            nu = nus[i] if i in crosses else launcher.value(nus[i])
            state[i] = (launcher.value(mus[i]), scale, nu, crosses.get(i, leaves[i].cross))
    return outputs, state


def is_factored(cut: Cut) -> bool:
    """Whether the leaf needs row and column sums before its step."""
    return cut.kind.second == FACTORED and not cut.kind.exact


def _sums(
    launcher: Launcher, leaves: Sequence[Arrays], cuts: Sequence[Cut], members: list[int], hyper: Any
) -> tuple[dict[int, tuple[Any, Any]], Any, list[int]]:
    """New row and column factors of factored leaves; the means of the row factors, and where each leaf's begin."""
    table, scratch, starts = schedule.sums_table(cuts, members)
    nus = [launcher.mutable(leaves[i].nu) for i in members]
    crosses = [launcher.mutable(leaves[i].cross) for i in members]
    operands = [tuple(leaves[i].gradient for i in members), tuple(nus), tuple(crosses)]
    operands += [launcher.zeros(scratch.counters), hyper]
    operands += [launcher.constant(table.meta), launcher.constant(table.starts)]
    *_, mean = launcher.launch(
        "gefen_sums",
        table.programs,
        operands,
        (scratch.rows, scratch.columns, scratch.stripes, scratch.means),
        LEAVES=len(members),
        SLOTS=len(table.starts),
        CLASSES=table.classes,
        T=schedule.SUM_TILE,
    )
    new = {i: (launcher.value(nu), launcher.value(cross)) for i, nu, cross in zip(members, nus, crosses)}
    means = [0] * len(cuts)
    for i, start in zip(members, starts):
        means[i] = start
    return new, mean, means


def norm(launcher: Launcher, gradients: Sequence[Any]) -> Any:
    """The Euclidean norm of all gradients together, float32 (): one launch for up to `schedule.MAX_LEAVES` leaves.

    Beyond that there is one launch per group, and their norms are combined outside.
    """
    sizes = [int(np.prod(g.shape, dtype=np.int64)) for g in gradients]
    kinds = [DTYPES.index(str(g.dtype)) for g in gradients]
    norms = []
    for group in schedule.split([(kind,) for kind in kinds], [1] * len(kinds)):
        table = schedule.norm_table(sizes, kinds, group)
        operands = [tuple(gradients[i] for i in group), launcher.zeros(1)]
        operands += [launcher.constant(table.meta), launcher.constant(table.starts)]
        _, found = launcher.launch(
            "gefen_norm",
            table.programs,
            operands,
            (table.programs, 1),
            PROGRAMS=table.programs,
            LEAVES=len(group),
            SLOTS=len(table.starts),
            CLASSES=table.classes,
            T=schedule.NORM_TILE,
            REPEAT=schedule.NORM_REPEAT,
        )
        norms.append(found[0])
    return norms[0] if len(norms) == 1 else sum(n * n for n in norms) ** 0.5
