"""Which structures the leaves get for a common budget of stored numbers."""

import itertools
import math

import numpy as np
import pytest
from partition_cases import RNG, normal, scales, survey

from gefen_jax import partition


def total(surveys, choices):
    return sum(s.scales + partition.structure_cost(s.shape, c.structure) for s, c in zip(surveys, choices))


def forest(seed):
    """Surveys of a few leaves of very different kinds."""
    rng = RNG(seed)
    grads = [
        scales(512, 1, seed=seed) * rng.normal(size=(512, 256)),
        scales(256, 1, seed=seed) * scales(1, 256, seed=seed + 1) * rng.normal(size=(256, 256)),
        rng.normal(size=(128, 512)),
        scales(4, 64, 1, seed=seed) * scales(4, 1, 64, seed=seed + 1) * rng.normal(size=(4, 64, 64)),
        np.repeat(scales(64, seed=seed), 128) * rng.normal(size=64 * 128),
        np.zeros((64, 64)),
    ]
    return [survey(grad) for grad in grads]


@pytest.mark.parametrize("seed", range(3))
def test_budget_holds(seed):
    surveys = forest(seed)
    default = sum(s.scales + s.default_cost for s in surveys)
    limit = max(sum(math.prod(s.shape) for s in surveys) // 170, default)
    assert total(surveys, partition.choose(surveys)) <= limit
    least = total(
        surveys,
        [partition.Choice(s.candidates[0].structure if s.reason == "learned" else s.default, "") for s in surveys],
    )
    explained = []
    for budget in range(least, limit + 2000, 97):
        choices = partition.choose(surveys, budget)
        assert total(surveys, choices) <= budget
        assert choices == partition.choose(surveys, budget)
        by_structure = [{c.structure: c.explained for c in s.candidates} for s in surveys]
        explained.append(sum(e[c.structure] for e, c in zip(by_structure, choices) if c.reason == partition.LEARNED))
    assert explained[-1] > explained[0]
    with pytest.raises(ValueError, match=f"a budget of {least - 1} statistics is 1 short"):
        partition.choose(surveys, least - 1)


def test_choice_is_nearly_the_best_of_all_combinations():
    surveys = [
        survey(scales(12, 1, seed=i) * scales(1, 18, seed=i + 9) * normal(12, 18, seed=i), (0, 1)) for i in range(3)
    ]
    assert all(s.reason == partition.LEARNED for s in surveys)
    scale_cost = sum(s.scales for s in surveys)
    for budget in (40, 60, 90, 120):
        chosen = partition.choose(surveys, budget + scale_cost)
        reached = sum(
            next(c.explained for c in s.candidates if c.structure == choice.structure)
            for s, choice in zip(surveys, chosen)
        )
        best, step = 0.0, 0.0
        for combination in itertools.product(*(s.candidates for s in surveys)):
            if sum(c.cost for c in combination) <= budget:
                best = max(best, sum(c.explained for c in combination))
        for s in surveys:
            hull = partition._ascent(s)
            step = max([step, *(b.explained - a.explained for a, b in itertools.pairwise(hull))])
        # The relaxation loses at most one step of the hull; what noise alone would explain is not climbed for.
        noise = sum(partition.CLEAR * max(c.spread for c in s.candidates[:-1]) + 25 * s.noise for s in surveys)
        assert reached >= best - step - noise


def test_steeper_leaf_is_served_first():
    # Equal shapes; the second leaf's columns differ more, so the budget for one set of columns goes to it.
    quiet = survey(scales(1, 64) ** 0.3 * normal(256, 64), (0, 1))
    loud = survey(scales(1, 64) * normal(256, 64, seed=1), (0, 1))
    scale_cost = quiet.scales + loud.scales
    first, second = partition.choose([quiet, loud], scale_cost + 1 + 64)
    assert second.structure == ("tile", (256, 1))
    assert partition.structure_cost((256, 64), first.structure) == 1
    both = partition.choose([quiet, loud], scale_cost + 64 + 64)
    assert [c.structure for c in both] == [("tile", (256, 1))] * 2


def drawn(*points, shape=(1700, 10), scales=10, default_cost=20):
    """A noiseless survey with candidates at the given (cost, explained)."""
    candidates = [partition.Candidate(str(cost), (cost,), cost, float(explained), 0.0) for cost, explained in points]
    return partition.Survey(shape, scales, ("default",), default_cost, partition.LEARNED, tuple(candidates), noise=0.0)


def costs(surveys, budget=None):
    return [choice.structure[0] for choice in partition.choose(surveys, budget)]


@pytest.mark.parametrize(("default_cost", "limit"), [(20, 90), (89, 90), (91, 91), (150, 150)])
def test_standard_budget(default_cost, limit):
    # 17,000 elements: 100 numbers, of which the momentum scales take 10; or as many as the shape rule takes
    def dearest(cost):
        return costs([drawn((1, 0), (cost, 7), default_cost=default_cost)]) == [cost]

    assert dearest(limit)
    assert not dearest(limit + 1)


def test_what_the_hull_leaves_is_spent_off_it():
    points = [(1, 0), (10, 100), (20, 150), (22, 149), (64, 1000)]
    assert [c.cost for c in partition._ascent(drawn(*points))] == [1, 64]
    assert costs([drawn(*points)], 10 + 64) == [64]
    assert costs([drawn(*points)], 10 + 63) == [20]  # 64 cannot be paid; of the others 20 explains most
    assert costs([drawn(*points)], 10 + 19) == [10]
    assert costs([drawn(*points)], 10 + 9) == [1]
    # Two leaves share what is left, the earlier one first.
    assert costs([drawn(*points), drawn(*points)], 20 + 30) == [20, 10]


def test_steps_are_taken_by_their_slope():
    shallow, steep = drawn((1, 0), (11, 10), (21, 15)), drawn((1, 0), (11, 20), (21, 30))
    reached = [costs([shallow, steep], 20 + budget) for budget in (2, 12, 22, 32, 42)]
    assert reached == [[1, 1], [1, 11], [11, 11], [11, 21], [21, 21]]
    assert costs([shallow, shallow], 32) == [11, 1]  # ties go to the earlier leaf
    cheap = drawn((1, 0), (6, 5), (30, 5.5))
    assert costs([shallow, cheap], 30) == [1, 6]  # and to the cheaper step
