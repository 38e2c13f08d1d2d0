"""Plots in one style: colour-blind safe, one look per optimizer everywhere, titles that say the finding.

with style():
    figure, axes = panels(10, 5, [["loss", "bytes"]])
    ...
    save(figure, path)
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e3e3e3"

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}


class Look(NamedTuple):
    """Colour, dash and marker say the same thing, so that a plot survives grey paper."""

    colour: str
    dash: str
    marker: str


# The eight colours of Okabe and Ito ("Color universal design", 2008), yellow last: it is pale on white.
LOOKS = (
    Look("#0072B2", "-", "o"),
    Look("#D55E00", "--", "s"),
    Look("#009E73", "-.", "^"),
    Look("#CC79A7", ":", "D"),
    Look("#E69F00", "-", "v"),
    Look("#56B4E9", "--", "P"),
    Look("#000000", "-.", "X"),
    Look("#F0E442", ":", "*"),
)
FIXED = {"adamw": 0, "gefen": 1, "gefen_reference": 2}  # the same look in every plot


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name: fixed for the main actors, the others in order. Beyond eight, dash and marker shift.

    >>> looks(["lion", "gefen"])["gefen"] == looks(["gefen", "adamw"])["gefen"]
    True
    """
    taken = {FIXED[name] for name in names if name in FIXED}
    free = itertools.count()
    found = {}
    for name in names:
        index = FIXED[name] if name in FIXED else next(i for i in free if i % len(LOOKS) not in taken)
        turn, place = divmod(index, len(LOOKS))
        other = LOOKS[(place + turn) % len(LOOKS)]
        found[name] = Look(LOOKS[place].colour, other.dash, other.marker)
    return found


@contextmanager
def style() -> Iterator[None]:
    """The style, for the plots made inside; nothing global changes."""
    with mpl.rc_context(STYLE):
        yield


def panels(width: float, height: float, layout: list[list[str]], **ratios: Any) -> tuple[Figure, dict[str, Axes]]:
    """A figure of that size in inches, and its axes by the names in ``layout``."""
    figure = Figure(figsize=(width, height), layout="constrained")
    mosaic: Any = layout
    return figure, figure.subplot_mosaic(mosaic, **ratios)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path)


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Centred running mean; the window shrinks at the ends, so that nothing is invented.

    >>> smooth([1.0, 2.0, 6.0], 3)
    array([1.5, 3. , 4. ])
    """
    ones = np.ones(min(window, len(values)))
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")


def horizontal_bars(axes: Axes, labels: Sequence[str], values: Sequence[float], colours: Sequence[str] | str) -> None:
    """One bar per label, first on top."""
    axes.barh(range(len(labels)), values, color=colours, height=0.62)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()


def stacked_bars(axes: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Bars made of parts, in greys: parts are kinds of one thing, colours are for optimizers."""
    left = np.zeros(len(labels))
    for grey, (part, values) in zip(np.linspace(0.45, 0.85, len(parts)), parts.items()):
        axes.barh(range(len(labels)), values, left=left, height=0.62, color=str(grey), label=part)
        left += np.asarray(values, float)
    horizontal_bars(axes, labels, [0.0] * len(labels), INK)
    below = ScaledTranslation(0, -0.5, axes.figure.dpi_scale_trans)  # half an inch: under the axis and its label
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + below,
        ncols=len(parts),
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.5,
    )


def note_bars(axes: Axes, notes: Sequence[str], ends: Sequence[float]) -> None:
    """A note beside the end of each bar, and room for it."""
    for row, (note, end) in enumerate(zip(notes, ends)):
        axes.annotate(note, (end, row), (5, 0), textcoords="offset points", va="center", color=INK)
    axes.set_xlim(0, 1.35 * max(ends))
