"""The slowest rank is named with its ratio to the median and with what it is slow in."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.streams.segments import Segment
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, losses, tiny_job, train
from txl_dist.runtime.world import World
from txl_dist.training import computation, stragglers
from txl_dist.training.job import TrainJob
from txl_dist.training.stragglers import RankTime, describe_slowest


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


def train_with_slow_data(world: World, job: TrainJob) -> int:
    """Rank 1 waits 100 ms for each of its segments."""
    original = computation.segment_pipeline

    def slow(*args: Any) -> Iterator[Segment]:
        for segment in original(*args):
            time.sleep(0.1 * world.rank)
            yield segment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computation, "segment_pipeline", slow)
        patch.setattr(stragglers, "INTERVAL_SECONDS", 0.0)
        return train(world, job)


@pytest.mark.slow
def test_a_rank_with_slow_data_is_named_and_changes_no_loss(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    plain, slow = tmp_path / "plain", tmp_path / "slow"
    settings = (NO_EVALUATION, "training.num_steps=6")
    assert ranks(2).run(train, tiny_job(dataset, plain, *settings)) == [0, 0]
    assert ranks(2).run(train_with_slow_data, tiny_job(dataset, slow, *settings)) == [0, 0]
    assert losses(slow) == losses(plain)
    log = (slow / "logs" / "rank-0.log").read_text()
    named = re.findall(r"stragglers \| slowest rank (\d) .* in ([\w ]+);", log)
    # On a machine with other work, a forward can take long on any rank.
    ((slowest, count),) = Counter(named).most_common(1)
    assert slowest == ("1", "data wait")
    assert count >= 3
