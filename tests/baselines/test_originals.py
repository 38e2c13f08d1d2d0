"""The baselines against their PyTorch originals: golden vectors always, the packages themselves where installed."""

import importlib.util

import numpy as np
import peer_cases as cases
import peer_golden
import peer_ours
import pytest
from peer_originals import ORIGINALS

from gefen_jax.baselines.lowbit import dynamic_map


@pytest.mark.parametrize("name", ORIGINALS)
def test_ten_steps_equal_the_original(name):
    case = ORIGINALS[name].case
    peer_ours.compare(peer_golden.golden(name), case, *peer_ours.run(peer_ours.OURS[name], case))


def test_comparison_notices_a_change():
    case = ORIGINALS["adam_mini"].case
    golden = peer_golden.golden("adam_mini")
    golden["norm/scale:nu"] = golden["norm/scale:nu"] * 1.0001
    with pytest.raises(AssertionError, match="norm/scale"):
        peer_ours.compare(golden, case, *peer_ours.run(peer_ours.OURS["adam_mini"], case))


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_equals_the_original(signed):
    golden = peer_golden.golden("bitsandbytes_adam8bit")["map:signed" if signed else "map:unsigned"]
    np.testing.assert_allclose(dynamic_map(8, signed), golden, rtol=2e-7, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("fresh", [False, True], ids=["golden", "fresh"])
def test_original_itself(name, fresh):
    original = ORIGINALS[name]
    missing = [package for package in ("torch", original.package) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"the original of {name} is not installed: no package {' and no package '.join(missing)}")
    case = original.case._replace(seed=original.case.seed + 100) if fresh else original.case
    found = original.run(case)
    if fresh:
        peer_ours.compare(found, case, *peer_ours.run(peer_ours.OURS[name], case))
    else:
        golden = peer_golden.golden(name)
        assert golden.keys() == found.keys()
        for key, value in golden.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_cases_hold_odd_sizes_and_small_leaves():
    sizes = {int(np.prod(shape)) for case in (cases.ADAM8BIT, cases.ADAM4BIT) for shape in case.shapes.values()}
    assert any(n % 2 and n > 4096 for n in sizes)
    assert any(n < 4096 for n in sizes)
