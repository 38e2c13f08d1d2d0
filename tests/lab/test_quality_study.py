"""The study in miniature: its conclusion must hold, whatever its digits. About a minute of one core."""

import pytest

from gefen_jax.lab import quality_stats
from gefen_jax.lab.quality_cells import STUDY, Key
from gefen_jax.lab.quality_runner import Runner
from gefen_jax.lab.quality_stats import Gap

RATE, STEPS, SEEDS = 4e-3, 200, range(4)


@pytest.fixture(scope="module")
def cells():
    runner = Runner()
    data = runner.task("small").fingerprint
    return [
        runner.run(Key("small", name, RATE, seed, STEPS, 16, 0.1, 0.99, data), STUDY)
        for seed in SEEDS
        for name in ("adamw", "gefen", "gefen_block_shapes")
    ]


def test_the_model_learns(cells):
    assert not any(cell.diverged for cell in cells)
    assert all(cell.loss < 2.6 for cell in cells)  # the entropy of a byte given the last one is about 2.4, of any 3.4


def test_the_default_reaches_adamw_and_one_mean_per_block_does_not(cells):
    default = quality_stats.gap(cells, "gefen", RATE, RATE)
    block = quality_stats.gap(cells, "gefen_block_shapes", RATE, RATE)
    assert default.upper < 0.03
    assert block.lower > 0.03
    cost = Gap(tuple(b - d for b, d in zip(block.differences, default.differences)))
    assert cost.lower > 0.02


def test_it_needs_an_eighth_of_the_state_of_quantised_leaves(cells):
    by_name = {cell.optimizer: cell for cell in cells}
    assert by_name["adamw"].state_bytes == pytest.approx(8 * by_name["adamw"].parameters, abs=8)
    assert by_name["gefen"].state_bytes < 1.4 * by_name["gefen"].parameters  # a twentieth of them are small leaves
