"""Reading a dataset, compared with reading the same tokens from a plain array on disk.

The array has no documents, shuffling, checksums or compression; the difference is their cost.
Rates are per CPU second of this process. Candidates alternate in one run, as in `rounds.py`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segment_stream import GROUP_TOKENS
from data_pipeline.streams.segments import SegmentReader
from txl_dist.bench.rounds import time_rounds

LANES = 8
TGT_LEN = 512


@dataclass(frozen=True, slots=True)
class ReadingRates:
    """Tokens per CPU second; medians."""

    dataset: float
    """Lanes of a shuffled epoch with ages, in the groups of segments that training reads."""
    memmap: float
    """The same batches, one at a time, sliced per lane from a memory-mapped array."""
    memmap_strided: float
    """The same with one two-dimensional slice for all lanes, the fastest way in numpy."""


def measure_reading(
    dataset: Path, *, split: str = "train", rounds: int = 5, max_tokens: int = 2**25
) -> ReadingRates:
    """Rates of reading `max_tokens`, at most an epoch, in 8 lanes and segments of 512 tokens."""
    source = open_split(dataset, split)
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=LANES, tgt_len=TGT_LEN)
    group = GROUP_TOKENS // (LANES * TGT_LEN)
    lane_tokens = min(plan.lane_tokens - 1, max_tokens // LANES)
    num_groups = max(1, lane_tokens // (TGT_LEN * group))
    num_tokens = num_groups * group * TGT_LEN * LANES
    if plan.lane_tokens <= group * TGT_LEN:
        raise ValueError(f"{source.num_tokens:,} tokens are too few; at least {2 * GROUP_TOKENS:,}")
    with tempfile.TemporaryDirectory() as folder:
        rows = _as_array(source, Path(folder) / "tokens")
        candidates: dict[str, Callable[[], object]] = {
            "dataset": lambda: _read_segments(source, plan, num_groups, group),
            "memmap": lambda: _read_lanes(rows, num_groups * group),
            "memmap_strided": lambda: _read_strided(rows, num_groups * group),
        }
        times = time_rounds(candidates, rounds=rounds, warm_up_rounds=1, clock=time.process_time)
    return ReadingRates(**{name: num_tokens / times[name].median for name in candidates})


def measure_seek(
    dataset: Path, *, num_lanes: int, split: str = "train", seeks: int = 40
) -> tuple[float, float]:
    """(median, best) seconds from an open source to the first batch at random lane positions.

    Each seek opens the split again, so every lane has to read and decode its block.
    """
    first = open_split(dataset, split)
    plan = LanePlan(num_tokens=first.num_tokens, num_lanes=num_lanes, tgt_len=TGT_LEN)
    random = np.random.default_rng(0)
    seconds = []
    for position in random.integers(0, 10 * plan.lane_tokens, seeks).tolist():
        source = open_split(dataset, split, manifest=first.manifest)
        source.document_starts(0)  # loads the index of the first shard
        began = time.perf_counter()
        _reader(source, plan).read(position, 1)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), min(seconds)


def _reader(source: SplitReader, plan: LanePlan) -> SegmentReader:
    lanes = range(plan.num_lanes)
    return SegmentReader(
        source,
        plan,
        lanes=lanes,
        num_rows=len(lanes),
        reset="document",
        shuffle="blocks",
        seed=0,
    )


def _as_array(source: SplitReader, path: Path) -> np.ndarray:
    """All tokens as [LANES, lane_tokens], memory-mapped, in the source's dtype."""
    with path.open("wb") as file:
        for block, size in enumerate(source.block_tokens.tolist()):
            source.read(block, 0, size).tofile(file)
    tokens = np.memmap(path, source.dtype, "r")
    lane_tokens = len(tokens) // LANES
    return tokens[: LANES * lane_tokens].reshape(LANES, lane_tokens)


def _read_segments(source: SplitReader, plan: LanePlan, num_groups: int, group: int) -> None:
    reader = _reader(source, plan)
    for number in range(num_groups):
        reader.read(number * group * TGT_LEN, group)


def _read_lanes(rows: np.ndarray, num_batches: int) -> None:
    for first in range(0, num_batches * TGT_LEN, TGT_LEN):
        text = np.stack([row[first : first + TGT_LEN + 1] for row in rows]).astype(np.int64)
        np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def _read_strided(rows: np.ndarray, num_batches: int) -> None:
    for first in range(0, num_batches * TGT_LEN, TGT_LEN):
        text = rows[:, first : first + TGT_LEN + 1]
        text[:, :-1].astype(np.int64), text[:, 1:].astype(np.int64)
