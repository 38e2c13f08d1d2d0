"""What the notebooks share: a fast mode for continuous integration, and pictures small enough to commit."""

import io
import os

from matplotlib.figure import Figure
from PIL import Image

COLOURS = 256  # of a picture's palette: enough for lines, text and one colour map


class Picture:
    """A PNG image that a notebook shows as the value of a cell."""

    def __init__(self, png: bytes) -> None:
        self.png = png

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"Picture({len(self.png):,} bytes)"


def fast() -> bool:
    """Whether the environment variable GEFEN_FAST=1 asks for a short run."""
    return os.environ.get("GEFEN_FAST") == "1"


def show(figure: Figure, dpi: int = 80) -> Picture:
    """The figure as an image with a palette, a third of the bytes of a PNG in full colour.

    Examples:
      >>> picture = show(Figure(figsize=(2, 1)))
      >>> picture.png[:4], len(picture.png) < 2000
      (b'\\x89PNG', True)
    """
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=dpi)
    image = Image.open(full).convert("RGB")
    image.quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return Picture(small.getvalue())
