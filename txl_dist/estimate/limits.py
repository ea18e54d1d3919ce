"""Where the design stops scaling: the quantities that grow with the number of ranks.

Each limit is a function of the number of ranks, with the value above which it is a problem. The
first number of ranks above it is found by search, so a limit needs no inverse formula.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from data_pipeline.system.strict import MAX_MANIFEST_BYTES
from txl_dist.runtime.heartbeat import NUM_READERS
from txl_dist.runtime.watch import BEAT_SECONDS

FILE_OPERATIONS_PER_SECOND = 1000.0
"""Rate that a shared file system's metadata server handles easily; an assumption."""
FILE_LATENCY_SECONDS = 0.5e-3
"""Latency of one such operation; an assumption."""
JSON_BYTES_PER_SECOND = 20e6
"""Rate at which rank 0 parses and checks the parts of a manifest."""
POINTS_PER_LINE = 12
"""Numbers in a step line of metrics.jsonl, each a point in MLflow."""
POINTS_PER_SECOND = 100.0
"""Rate that a tracking server handles easily; an assumption."""
LARGEST_SEARCHED = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A quantity that grows with the number of ranks."""

    name: str
    unit: str
    threshold: float
    advice: str
    value: Callable[[int], float]

    @property
    def first_ranks(self) -> int | None:
        """The smallest number of ranks above the threshold; None: none up to a million."""
        low, high = 0, 1
        while self.value(high) <= self.threshold:
            low, high = high, 2 * high
            if high > LARGEST_SEARCHED:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.value(middle) > self.threshold else (middle, high)
        return high

    def to_json(self, ranks: list[int]) -> Mapping[str, object]:
        """The values at `ranks`, and where the limit is reached."""
        return {
            "unit": self.unit,
            "threshold": self.threshold,
            "values": [self.value(num_ranks) for num_ranks in ranks],
            "first_ranks": self.first_ranks,
            "advice": self.advice,
        }


def limits_of_run(
    *,
    num_lanes: int | None,
    manifest_bytes: Callable[[int], float],
    save_share_of_interval: Callable[[int], float],
    exposed_share: Callable[[int], float],
    lines_per_second: Callable[[int], float],
) -> list[Limit]:
    """All limits of a run. `num_lanes` is None if lanes grow with the ranks.

    `save_share_of_interval`: seconds to write a checkpoint / seconds between two of them.
    `exposed_share`: share of a step in which a rank waits for communication. `lines_per_second`:
    step lines of the log.
    """
    limits = [
        Limit(
            name="checkpoint manifest",
            unit="bytes",
            threshold=MAX_MANIFEST_BYTES,
            advice="a larger one is refused when it is read; ZeRO 1 and 2 cut few parameters",
            value=manifest_bytes,
        ),
        Limit(
            name="heartbeat files, operations",
            unit="per second",
            threshold=FILE_OPERATIONS_PER_SECOND,
            # Written by all ranks; read by few, and only while they wait for others.
            advice="put the run directory on a fast file system",
            value=lambda ranks: ranks * (1 + NUM_READERS) / BEAT_SECONDS,
        ),
        Limit(
            name="rank 0 reads the parts of a checkpoint",
            unit="seconds",
            threshold=10.0,
            advice="in the background of a save; use ZeRO 1 or 2, or a faster file system",
            # One poll and one read per rank; its JSON is about its part of the manifest.
            value=lambda ranks: (
                2 * FILE_LATENCY_SECONDS * ranks + manifest_bytes(ranks) / JSON_BYTES_PER_SECOND
            ),
        ),
        Limit(
            name="writing a checkpoint",
            unit="of the interval",
            threshold=1.0,
            advice="increase training.checkpoint_interval_steps: the next save waits",
            value=save_share_of_interval,
        ),
        Limit(
            name="waiting for communication",
            unit="of a step",
            threshold=0.5,
            advice="more lanes per rank, faster links, or another ZeRO stage",
            value=exposed_share,
        ),
        Limit(
            name="MLflow points",
            unit="per second",
            threshold=POINTS_PER_SECOND,
            # Of rank 0 only: they grow with the rate of steps, not with the ranks.
            advice="increase training.log_interval_steps",
            value=lambda ranks: POINTS_PER_LINE * lines_per_second(ranks),
        ),
    ]
    if num_lanes is not None:
        lanes = Limit(
            name="lanes",
            unit="ranks per lane",
            threshold=1.0,
            advice="every rank needs a lane; increase data.num_lanes",
            value=lambda ranks: ranks / num_lanes,
        )
        limits.insert(0, lanes)
    return limits


def even_world_sizes(num_lanes: int) -> list[int]:
    """Numbers of ranks that divide the lanes evenly, so that no rank computes padding."""
    return [ranks for ranks in range(1, num_lanes + 1) if num_lanes % ranks == 0]
