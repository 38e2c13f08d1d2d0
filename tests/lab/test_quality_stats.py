"""Statistics, gate and grid against SciPy, hand-made cells and plain enumeration."""

import dataclasses
import math

import numpy as np
import pytest
from quality_cases import cell, study
from scipy import stats

from gefen_jax.lab import quality_cells, quality_stats
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.quality_cells import CHOICE, STUDY
from gefen_jax.lab.quality_grid import Grid, parse_names, parse_seeds
from gefen_jax.lab.quality_stats import Gap


@pytest.mark.parametrize("count", [2, 3, 48])
def test_bounds_are_those_of_a_t_test(count):
    values = np.random.default_rng(count).normal(0.003, 0.02, count)
    gap = Gap(tuple(values.tolist()))
    upper = stats.ttest_1samp(values, 0, alternative="less").confidence_interval(0.95)
    lower = stats.ttest_1samp(values, 0, alternative="greater").confidence_interval(0.95)
    np.testing.assert_allclose([gap.mean, gap.error], [values.mean(), stats.sem(values)], rtol=1e-12)
    np.testing.assert_allclose([gap.upper, gap.lower], [upper.high, lower.low], rtol=1e-10)


def test_one_pair_has_no_bounds_and_none_has_no_mean():
    assert Gap((0.5,)).mean == 0.5
    assert math.isnan(Gap((0.5,)).upper)
    assert math.isnan(Gap(()).mean)


def test_a_loss_that_is_not_finite_makes_the_difference_infinite():
    cells = [cell(seed=0, loss=2.0), cell("gefen", seed=0, loss=math.nan), cell(seed=1), cell("gefen", seed=1, loss=2)]
    gap = quality_stats.gap(cells, "gefen", 1e-3, 1e-3)
    assert gap.pairs == 2
    assert gap.mean == gap.upper == gap.lower == math.inf


def test_pairs_are_seeds_that_both_have():
    cells = [cell(seed=s, loss=2 + s) for s in range(4)]
    cells += [cell("gefen", seed=s, loss=2 + 1.5 * s) for s in (1, 3, 5)]
    cells += [cell("gefen", seed=2, rate=5e-3), cell("gefen", seed=0, purpose=CHOICE)]
    assert quality_stats.gap(cells, "gefen", 1e-3, 1e-3).differences == (0.5, 1.5)


def test_best_rate_compares_equal_seeds_only():
    cells = [cell(rate=1e-3, seed=0, loss=2.0), cell(rate=1e-3, seed=1, loss=3.0)]
    cells += [cell(rate=2e-3, seed=0, loss=2.1)]  # better than the mean of the other, but not on seed 0
    assert quality_stats.best_rate(cells) == 1e-3
    with pytest.raises(ValueError, match="no seed was run at all of the rates"):
        quality_stats.best_rate(cells[1:])


def test_best_rate_avoids_rates_that_diverged():
    cells = [cell(rate=1e-3, loss=3.0), cell(rate=2e-3, loss=math.nan)]
    assert quality_stats.best_rate(cells) == 1e-3


def test_choice_runs_choose_and_are_never_compared():
    cells = study(choice={1e-3: 2.0, 2e-3: 1.9, 4e-3: 2.1}, rates=(1e-3, 2e-3), gap=0.0)
    cells = [dataclasses.replace(c, loss=1.0) if (c.purpose, c.rate) == (STUDY, 1e-3) else c for c in cells]
    best = quality_stats.choose_best(cells, "adamw")
    assert (best.rate, best.independent, best.edge) == (2e-3, True, False)
    best = quality_stats.choose_best([c for c in cells if c.purpose == STUDY], "adamw")
    assert (best.rate, best.independent, best.edge) == (1e-3, False, True)


def gate(**options):
    cells = [c for task in ("gpt", "llama", "qwen") for c in study(task=task, **options)]
    return quality_stats.gate(cells, "gefen")


def test_gate_passes_an_optimizer_that_is_as_good():
    verdict = gate(gap=0.0)
    assert verdict.passed is True
    assert verdict.pooled.pairs == 48
    assert not verdict.failures
    assert not verdict.missing


def test_gate_refuses_a_gap_above_the_pooled_bound():
    verdict = gate(gap=0.012)
    assert verdict.passed is False
    assert len(verdict.failures) == 1
    assert verdict.failures[0].startswith("pooled")


def test_gate_refuses_one_task_above_its_bound_though_the_pool_passes():
    cells = study(task="gpt", gap=0.035) + study(task="llama", gap=-0.02) + study(task="qwen", gap=-0.02)
    verdict = quality_stats.gate(cells, "gefen")
    assert verdict.pooled.upper < quality_stats.POOLED_BOUND
    assert verdict.passed is False
    assert len(verdict.failures) == 1
    assert verdict.failures[0].startswith("gpt: upper bound")


def test_gate_refuses_a_wide_interval_around_nothing():
    verdict = gate(gap=0.0, noise=0.1)
    assert abs(verdict.pooled.mean) < 0.01 < verdict.pooled.upper
    assert verdict.passed is False


def test_gate_stays_open_without_evidence():
    assert gate(gap=0.0, seeds=range(15)).missing == ("45 pairs of 48",)
    assert gate(gap=0.0, seeds=range(15)).passed is None
    seen = study(task="gpt", gap=0.0, seeds=range(24)) + study(task="llama", gap=0.0, seeds=range(24))
    assert quality_stats.gate(seen, "gefen").missing == ("no pair on a held-out task",)
    assert "qwen: no run at 0.002, twice AdamW's best rate" in gate(gap=0.0, rates=(1e-3,)).missing
    assert "gpt: AdamW's best rate is not chosen on other seeds" in gate(gap=0.0, choice={}).missing
    edge = gate(gap=0.0, choice={1e-3: 1.9, 2e-3: 2.0})
    assert edge.missing[0] == "gpt: AdamW's best rate 0.001 is at the edge of those tried"
    assert edge.passed is None
    assert quality_stats.gate(study(task="cnn", gap=0.0), "gefen").passed is None


def test_gate_refuses_without_all_evidence_what_is_refuted_already():
    verdict = gate(gap=0.1, seeds=range(4))
    assert verdict.missing
    assert verdict.passed is False


def test_gate_refuses_divergence_at_twice_the_rate():
    cells = [c for task in ("gpt", "llama", "qwen") for c in study(task=task, gap=0.0)]

    def broken(c, **change):
        hit = (c.task, c.optimizer, c.rate, c.seed) == ("llama", "gefen", 2e-3, 3)
        return dataclasses.replace(c, **change) if hit else c

    for change in ({"diverged": True}, {"loss": 3.0}):
        verdict = quality_stats.gate([broken(c, **change) for c in cells], "gefen")
        assert verdict.failures == ("llama: diverged at 0.002 with seeds 3",)
        assert verdict.passed is False


def grid(**change):
    fields = {"tasks": ("gpt", "cnn"), "optimizers": ("adamw", "gefen"), "rates": ("1x", "2x"), "seeds": (0, 1)}
    fields |= {"choice_rates": (1e-3, 2e-3, 3e-3), "choice_seeds": (100, 101)}
    return Grid(**(fields | change))


def finished(key, purpose):
    loss = {("gpt", 3e-3): 1.0, ("cnn", 2e-3): 1.0}.get((key.task, key.rate), 2.0)
    if key.optimizer == "gefen":
        loss = key.rate  # its own best is the lowest rate
    return cell(**key._asdict(), purpose=purpose, loss=loss)


def test_grid_chooses_first_then_runs_seed_by_seed():
    chosen = grid().purposes(str, [])
    assert set(chosen.values()) == {CHOICE}
    assert {key.optimizer for key in chosen} == {"adamw"}
    assert len(chosen) == 2 * 2 * 3
    cells = [finished(key, purpose) for key, purpose in chosen.items()]
    both = list(grid().purposes(str, cells).items())
    assert [key for key, _ in both[:12]] == list(chosen)
    found = [(key.seed, key.task, key.rate, key.optimizer) for key, purpose in both[12:]]
    rates = {"gpt": (3e-3, 6e-3), "cnn": (2e-3, 4e-3)}
    expected = [(s, t, r, o) for s in (0, 1) for t in ("gpt", "cnn") for r in rates[t] for o in ("adamw", "gefen")]
    assert found == expected


def test_grid_finds_each_ones_best_and_never_repeats_a_cell():
    wanted = grid(rates=("1x", "best", "0.003"), tasks=("gpt",), seeds=(0,))
    chosen = wanted.purposes(str, [])
    assert {key.optimizer for key in chosen} == {"adamw", "gefen"}
    cells = [finished(key, purpose) for key, purpose in chosen.items()]
    keys = [key for key, purpose in wanted.purposes(str, cells).items() if purpose == STUDY]
    assert [(key.optimizer, key.rate) for key in keys] == [("adamw", 3e-3), ("gefen", 3e-3), ("gefen", 1e-3)]


def test_grid_with_numbers_needs_no_choice():
    assert set(grid(rates=("0.004",)).purposes(str, []).values()) == {STUDY}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("gtp",)}, "unknown task 'gtp'; choose among: gpt, "),
        ({"optimizers": ("adam",)}, "unknown optimizer 'adam'; choose among: adamw, "),
        ({"rates": ("x",)}, "--rates: found 'x', expected a number above 0, a multiple such as 2x, or best"),
        ({"rates": ("-1",)}, "--rates: found '-1'"),
        ({"seeds": (0, 100)}, "--seeds and --choice-seeds share 100"),
        ({"choice_seeds": ()}, "need --choice-rates and --choice-seeds"),
        ({"steps": 0}, "--steps: found 0"),
    ],
)
def test_grid_refuses(change, message):
    with pytest.raises(UsageError, match=message):
        grid(**change)


def test_words_are_checked():
    assert parse_seeds(" 0-2, 2,7") == (0, 1, 2, 7)
    for text in ("3-1", "a", "1--2"):
        with pytest.raises(UsageError, match="expected numbers and ranges"):
            parse_seeds(text)
    with pytest.raises(UsageError, match="--tasks: found nothing"):
        parse_names(" ,", "--tasks")


def test_cells_survive_the_file(tmp_path):
    path = tmp_path / "cells.jsonl"
    cells = [cell(seed=0), cell(seed=1, loss=math.nan, accuracy=math.nan, training=[(20, math.nan)], diverged=True)]
    for one in cells:
        quality_cells.append(path, one)
    first, second = quality_cells.read([path, path])  # each key once
    assert first == cells[0]
    assert math.isnan(second.loss)
    assert math.isnan(second.training[0][1])
    assert dataclasses.replace(second, loss=0, accuracy=0, training=[]) == dataclasses.replace(
        cells[1], loss=0, accuracy=0, training=[]
    )


def test_a_line_that_was_cut_off_is_ignored_and_replaced(tmp_path):
    path = tmp_path / "cells.jsonl"
    quality_cells.append(path, cell(seed=0))
    quality_cells.append(path, cell(seed=1))
    path.write_bytes(path.read_bytes()[:-30])
    assert [c.seed for c in quality_cells.read([path])] == [0]
    quality_cells.append(path, cell(seed=2))
    assert [c.seed for c in quality_cells.read([path])] == [0, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ('{"benchmark": "bench step", "schema": 1}', "line 2: not a line of 'bench quality', schema 1"),
        ('{"benchmark": "bench quality", "schema": 1, "task": "gpt"}', "line 2: no field 'optimizer'"),
    ],
)
def test_other_lines_are_refused_by_number(tmp_path, line, message):
    path = tmp_path / "cells.jsonl"
    quality_cells.append(path, cell())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match=message):
        quality_cells.read([path])
