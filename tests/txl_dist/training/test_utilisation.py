"""Utilisation: at most 1, and the peak never decreases."""

import time

import pytest
import torch

from txl_dist.runtime.world import World
from txl_dist.training import utilisation
from txl_dist.training.utilisation import Utilisation


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Utilisation:
    """One rank, with a peak that was measured too low."""
    monkeypatch.setattr(utilisation, "SIZES", {"cpu": (64,), "cuda": (64,)})
    monkeypatch.setattr(utilisation, "measure_peak_flops", lambda world, dtype: 1000.0)
    return Utilisation(World(0, 1), torch.float32, flops_per_step=100)


def test_a_rate_above_the_measured_peak_is_the_peak(small: Utilisation) -> None:
    assert small.share(steps_per_second=5.0) == 0.5
    assert small.share(steps_per_second=20.0) == 1.0
    assert small.peak_flops == 2000.0
    assert small.share(steps_per_second=10.0) == 0.5


def test_a_later_measurement_raises_the_peak_and_never_lowers_it(small: Utilisation) -> None:
    small.measure()
    assert small.peak_flops > 1e6
    small.peak_flops = 1e30
    small.measure()
    assert small.peak_flops == 1e30


def test_measuring_takes_a_thousandth_of_the_time_and_no_random_number(
    small: Utilisation,
) -> None:
    assert not small.is_due
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    began = time.monotonic()
    small.measure()
    taken = time.monotonic() - began
    assert torch.equal(torch.rand(3), expected)
    assert small._next - time.monotonic() > 0.9 * taken / utilisation.MAX_SHARE_OF_TIME


@pytest.mark.parametrize(
    ("flops", "sizes"), [(1e6, [256]), (3e9, [256, 1024]), (1e12, [256, 1024, 2048])]
)
def test_a_product_that_would_take_more_than_a_second_is_not_computed(
    monkeypatch: pytest.MonkeyPatch, flops: float, sizes: list[int]
) -> None:
    computed = []

    def product(size: int, *_: object, seconds: float) -> float:
        computed.append(size)
        return flops

    monkeypatch.setattr(utilisation, "product_flops", product)
    utilisation.measure_peak_flops.cache_clear()
    assert utilisation.measure_peak_flops(World(0, 1), torch.bfloat16) == flops
    utilisation.measure_peak_flops.cache_clear()
    assert computed == sizes
