"""The slowest rank is named with its ratio to the median and with what it is slow in.

Utilisation is at most 1.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, tiny_spec, train
from txl_dist.runtime.world import World
from txl_dist.training import batches, speed
from txl_dist.training.spec import TrainSpec
from txl_dist.training.speed import RankTime, Utilisation, describe_slowest


def times(*own: tuple[float, float], total_seconds: float = 100.0) -> list[RankTime]:
    return [
        RankTime(f"host-{rank}", {"data wait": wait, "forward": forward}, total_seconds)
        for rank, (wait, forward) in enumerate(own)
    ]


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (((1, 49), (1, 49), (1, 49), (22, 49)), "rank 3 (host-3): 1.42 x the median, in data wait"),
        (((1, 49), (1, 70), (1, 49)), "rank 1 (host-1): 1.42 x the median, in forward"),
        (((30, 50), (0, 50)), "rank 0 (host-0): 1.60 x the median, in data wait"),
        (((1, 49), (1, 49), (9, 49)), None),  # 1.16 x the median
        (((0, 1), (0, 4)), None),  # 4 x the median, but 3 % of the time
        (((0, 0), (0, 0)), None),
    ],
)
def test_the_slowest_rank_is_named_if_it_costs_time(
    own: tuple[tuple[float, float], ...], line: str | None
) -> None:
    text = describe_slowest(times(*own))
    assert text is None if line is None else text is not None and text.startswith(f"slowest {line}")


def train_with_slow_data(world: World, spec: TrainSpec) -> int:
    """Rank 1 waits 100 ms for each of its segments."""
    original = batches.pipeline

    def slow(*args: Any) -> Iterator[Any]:
        for batch in original(*args):
            time.sleep(0.1 * world.rank)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "pipeline", slow)
        return train(world, spec)


@pytest.mark.slow
def test_a_rank_with_slow_data_is_named_and_changes_no_loss(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    plain, slow = tmp_path / "plain", tmp_path / "slow"
    settings = (
        NO_EVALUATION, "training.num_steps=6", "training.checkpoint_interval_steps=1"
    )  # fmt: skip
    assert ranks(2).run(train, tiny_spec(dataset, plain, *settings)) == [0, 0]
    assert ranks(2).run(train_with_slow_data, tiny_spec(dataset, slow, *settings)) == [0, 0]
    assert losses(slow) == losses(plain)
    log = (slow / "logs" / "rank-0.log").read_text()
    named = re.findall(r"stragglers \| slowest rank (\d) .* in ([\w ]+);", log)
    # On a machine with other work, a forward can take long on any rank.
    ((slowest, count),) = Counter(named).most_common(1)
    assert slowest == ("1", "data wait")
    assert count >= 3


# --- utilisation ------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Utilisation:
    """One rank, with a peak that was measured too low."""
    monkeypatch.setattr(speed, "SIZES", {"cpu": (64,), "cuda": (64,)})
    monkeypatch.setattr(speed, "measure_peak_flops", lambda world, dtype: 1000.0)
    return Utilisation(World(0, 1), torch.float32, flops_per_token=100)


def test_a_rate_above_the_measured_peak_is_the_peak(small: Utilisation) -> None:
    assert small.share(tokens_per_second=5.0) == 0.5
    assert small.share(tokens_per_second=20.0) == 1.0
    assert small.peak_flops == 2000.0
    assert small.share(tokens_per_second=10.0) == 0.5


def test_the_measurement_takes_no_random_number_of_the_run() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert speed.product_flops(64, torch.float32, torch.device("cpu"), seconds=0.01) > 1e6
    assert torch.equal(torch.rand(3), expected)


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

    monkeypatch.setattr(speed, "product_flops", product)
    speed.measure_peak_flops.cache_clear()
    assert speed.measure_peak_flops(World(0, 1), torch.bfloat16) == flops
    speed.measure_peak_flops.cache_clear()
    assert computed == sizes
