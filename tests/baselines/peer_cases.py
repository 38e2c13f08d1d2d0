"""The runs on which the baselines are compared with their originals: parameters and gradients, the same everywhere.

Drawn with `numpy.random.RandomState`, whose streams NumPy keeps frozen. Layouts are Flax's: kernels are (in, out).
"""

from typing import NamedTuple

import numpy as np

LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1
STEPS = 10


class Case(NamedTuple):
    """Shapes by leaf path; gradients have rows of different size, as real ones do."""

    shapes: dict[str, tuple[int, ...]]
    seed: int


ADAM8BIT = Case({"odd": (67, 65), "even": (68, 64), "small": (63, 65)}, 8)
ADAM4BIT = Case({"matrix": (67, 65), "stack": (4, 33, 35), "vector": (4355,), "small": (63, 65)}, 4)
ADAM4BIT_VECTOR = Case({"vector": (4352,)}, 44)

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 3
ADAM_MINI = Case(
    {
        "embed/embedding": (11, WIDTH),
        "q_proj/kernel": (WIDTH, HEADS * HEAD_DIM),
        "k_proj/kernel": (WIDTH, KV_HEADS * HEAD_DIM),
        "v_proj/kernel": (WIDTH, KV_HEADS * HEAD_DIM),
        "o_proj/kernel": (HEADS * HEAD_DIM, WIDTH),
        "mlp/kernel": (WIDTH, 20),
        "mlp/bias": (20,),
        "norm/scale": (WIDTH,),
        "conv/kernel": (3, 2, 4, 5),
        "lm_head/kernel": (WIDTH, 11),
    },
    1,
)


def params(case: Case) -> dict[str, np.ndarray]:
    draw = np.random.RandomState(case.seed)
    return {path: draw.standard_normal(shape).astype(np.float32) for path, shape in case.shapes.items()}


def gradients(case: Case, step: int) -> dict[str, np.ndarray]:
    draw = np.random.RandomState(1000 * case.seed + step)
    out = {}
    for path, shape in case.shapes.items():
        rows = 10 ** draw.uniform(-2, 0, (shape[0], *(1 for _ in shape[1:])))
        out[path] = (draw.standard_normal(shape) * rows).astype(np.float32)
    return out
