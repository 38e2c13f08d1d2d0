"""Draw how Gefen works, from the first gradient of a small byte model: structure, estimate, codebook.

Left: the squared gradient of one kernel, which rows and columns explain. Middle: what is kept of it. Right: the words
that the codebook spends where momentum is.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from gefen_jax import learn_plan
from gefen_jax.lab import models, plots, tasks
from gefen_jax.lab.data import load_text
from gefen_jax.lab.demo import seed
from gefen_jax.lab.results import check_file
from gefen_jax.quantization import BINS

EXAMPLES = 64


class Picture(NamedTuple):
    """What is drawn: squared gradient (rows, columns), its factored estimate, and the plan."""

    squares: np.ndarray
    estimate: np.ndarray
    plan: Any


def first_gradient(model: str, data: str, seed: int) -> Any:
    """The gradient of the first batch, as NumPy arrays."""
    config = models.preset(model)
    task = tasks.text_task(config, load_text(data))
    batch = next(task.batches(1, EXAMPLES, seed))
    params = models.init(config, jax.random.key(seed))
    return jax.tree.map(np.asarray, jax.jit(jax.grad(task.loss))(params, batch))


def factor(squares: np.ndarray) -> np.ndarray:
    """The rank-one estimate from row and column means: ``rows * (columns / mean(rows))``.

    Examples:
      >>> factor(np.array([[1.0, 2.0], [2.0, 4.0]]))
      array([[1., 2.],
             [2., 4.]])
    """
    rows, columns = squares.mean(1, keepdims=True), squares.mean(0, keepdims=True)
    return rows * (columns / rows.mean())


def measure(model: str, data: str, seed: int) -> tuple[str, Picture]:
    """The largest two-dimensional hidden kernel's picture, and its path."""
    grads = first_gradient(model, data, seed)
    plan = learn_plan(grads)
    named = {path: leaf for path, leaf in plan.leaves.items() if leaf.nu[0] == "factored" and "embed" not in path}
    path = max(named, key=lambda p: min(named[p].shape))
    flat = {"/".join(str(key.key) for key in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    squares = np.square(flat[path].astype(np.float64))
    squares = squares.reshape(-1, squares.shape[-1])
    return path, Picture(squares, factor(squares), plan)


def draw(path: str, found: Picture, out: Path) -> None:
    """Save the three panels."""
    with plots.style():
        figure, axes = plots.panels(13, 4.2, [["squares", "estimate", "codebook"]], width_ratios=[1, 1, 1.15])
        low, high = np.percentile(np.log10(found.squares[found.squares > 0]), [2, 99.5])
        for name, image, title in (
            ("squares", found.squares, "A squared gradient has rows and columns"),
            ("estimate", found.estimate, f"{sum(found.squares.shape)} numbers keep them, of {found.squares.size:,}"),
        ):
            shown = axes[name].imshow(np.log10(image + 1e-300), aspect="auto", cmap="cividis", vmin=low, vmax=high)
            axes[name].set_title(title)
            axes[name].set_xlabel("column (output unit)")
            axes[name].set_ylabel("row (input unit)")
            axes[name].grid(visible=False)
        figure.colorbar(
            shown, ax=[axes["squares"], axes["estimate"]], label="log10 of the square", shrink=0.9, pad=0.02
        )
        figure.suptitle(f"{path}, first batch", x=0.008, ha="left", fontsize=9, color=plots.MUTED)
        draw_codebook(axes["codebook"], found.plan)
        plots.save(figure, out)


def draw_codebook(axes: Any, plan: Any) -> None:
    """Density of block-normalised momentum, and how densely the words stand."""
    centres = (np.arange(BINS) + 0.5) / (BINS / 2) - 1
    density = plan.counts / plan.counts.sum() * (BINS / 2)
    words = np.unique(plan.codebook)
    middle, spacing = (words[1:] + words[:-1]) / 2, np.diff(words)
    coarse = density.reshape(-1, 32).mean(1)
    axes.fill_between(centres.reshape(-1, 32).mean(1), coarse, color=plots.LOOKS[5].colour, alpha=0.6, step="mid")
    axes.plot(middle, 1 / spacing / len(words), color=plots.LOOKS[1].colour, label="density of the 256 words")
    axes.plot([], [], color=plots.LOOKS[5].colour, linewidth=6, alpha=0.6, label="density of the momentum")
    axes.set_title("The words stand where the momentum is")
    axes.set_xlabel("momentum / largest of its block")
    axes.set_ylabel("density")
    axes.set_ylim(0, None)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.legend(loc="upper right", fontsize=9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="stdlib", help="text: stdlib, a file, a glob or module:callable")
    parser.add_argument("--model", default="gpt-study", help="a preset (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of parameters and batch; default: 0")
    parser.add_argument("--out", type=Path, default=Path("how.png"), help="PNG file (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    check_file(args.out)
    path, found = measure(args.model, args.data, args.seed)
    draw(path, found, args.out)
    print(f"drew {path} of {args.model}; written to {args.out}")
    return 0
