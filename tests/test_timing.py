import time

import numpy as np
import pytest
import torch

from moira_cli import timing
from moira_cli.timing import StopRule, WallTimer


@pytest.mark.parametrize(
    ("useful", "rotations"), [(6_291_456, 51), (29_360_128, 12), (472_000_000, 2), (4_000_000_000, 2)]
)
def test_rotations_put_five_caches_between_two_uses_m1(useful, rotations):
    l2 = 60 * 2**20
    assert timing.rotations_for_cold_l2(useful, l2) == rotations
    assert (rotations - 1) * useful >= timing.L2_MARGIN * l2 or rotations == 2


@pytest.mark.parametrize("rotations", [1, 2, 3, 51, 700])
@pytest.mark.parametrize("call_us", [3.0, 120.0, 9000.0])
def test_a_pass_visits_every_rotation_equally_often(rotations, call_us):
    calls = timing.calls_per_pass(rotations, call_us)
    assert calls % rotations == 0
    assert calls >= timing.MIN_CALLS_PER_PASS


def test_a_pass_that_would_leave_l2_warm_is_refused():
    with pytest.raises(ValueError, match="expected a multiple of rotations = 3, got 10"):
        WallTimer(lambda i: None, rotations=3, calls=10)


def test_wall_timer_measures_what_passes():
    samples = WallTimer(lambda i: time.sleep(0.002), 1, 1).sample(StopRule(10, 0, 100, 5))
    assert samples.converged
    assert len(samples.us) == 10
    assert 2000 <= samples.statistics()["median"] < 10_000


def test_time_out_is_not_convergence():
    samples = WallTimer(lambda i: time.sleep(0.001), 1, 1).sample(StopRule(10**6, 0, 1, 0.05))
    assert not samples.converged
    assert samples.us


def test_statistics_keep_every_sample():
    us = [float(x) for x in range(1, 101)]
    result = timing.Samples(us, True).statistics()
    assert result["samples"] == us
    assert result["median"] == 50.5
    assert result["n"] == 100
    low, high = result["ci95"]
    assert low < 50.5 < high
    assert timing.median_interval(np.full(30, 7.0)) == (7.0, 7.0)


@pytest.mark.gpu
def test_l2_is_cold_when_rotating_and_warm_when_not():
    """8 rows x 24 pages = 6.3 MB: one buffer set stays in the L2, rotating sets do not (M1)."""
    from moira_cli.harness import Case, Point, measure
    from moira_cli.lists import synthetic
    from moira_cli.shapes import parse_shape
    from moira_kernels.testing import Geometry

    rule = StopRule(30, 50, 1.0, 3)
    us = {}
    for l2 in ("cold", "warm"):
        point = Point(parse_shape("6kx1"), Geometry(32, 8, 128), 64, "nhd", synthetic(1, 8, 96, 0.25, 0, 0), 0, l2)
        case = Case(point, torch.device("cuda", 0))
        cell = measure(case, "moira", "graph", rule, check=True)
        assert cell["status"] == "ok", cell
        us[l2] = cell["timing"]["kernel_us"]["median"]
        if l2 == "cold":
            assert cell["timing"]["l2"]["bytes_between_reuse"] >= 5 * cell["timing"]["l2"]["l2_bytes"]
            assert cell["work"]["useful_tbps"] <= 4.8
    assert us["warm"] < 0.97 * us["cold"]


@pytest.mark.gpu
def test_the_read_floor_is_below_the_memory_limit():
    us = timing.read_floor_us(500_000_000, torch.device("cuda", 0))
    assert 3.0 < 500_000_000 / us / 1e6 <= 4.9
