"""How often each token id occurs in a split, counted on workers, for the loss by token frequency.

The split is `train`; a dataset without it is counted on the split that is scored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.manifest import ShardManifest, load_manifest
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.workers import Workers

TASK_TOKENS = 1 << 22
READ_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class CountingTask:
    """Tokens [start, stop) of a split."""

    data: DatasetPath
    split: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"tokens {self.start:,} to {self.stop:,} of split {self.split}"


def counted_split(manifest: ShardManifest, scored: str) -> str:
    """The split whose token frequencies are used for the scored split."""
    return "train" if "train" in manifest.splits else scored


def count_tokens(
    data: DatasetPath,
    split: str,
    workers: Workers,
    *,
    progress: Progress = lambda phase, done, total: None,
) -> NDArray[np.int64]:
    """Occurrences of each token id, [V]."""
    manifest = load_manifest(data)
    num_tokens = manifest.split(split, data).tokens
    count_V = np.zeros(manifest.vocab_size, np.int64)
    done = 0
    tasks = list(_tasks(data, split, num_tokens))
    for number, part_V in workers.map(count_range, tasks):
        count_V += part_V
        done += tasks[number].stop - tasks[number].start
        progress("counting tokens", done, num_tokens)
    _open.cache_clear()
    return count_V


def count_range(task: CountingTask) -> NDArray[np.int64]:
    """Occurrences of each token id, on a worker."""
    source = _open(task.data, task.split)
    vocab_size = source.manifest.vocab_size
    count_V = np.zeros(vocab_size, np.int64)
    for start in range(task.start, task.stop, READ_TOKENS):
        tokens, _ = read_range(source, start, min(start + READ_TOKENS, task.stop))
        count_V += np.bincount(tokens, minlength=vocab_size)
    return count_V


def _tasks(data: DatasetPath, split: str, num_tokens: int) -> Iterator[CountingTask]:
    for start in range(0, num_tokens, TASK_TOKENS):
        yield CountingTask(data, split, start, min(start + TASK_TOKENS, num_tokens))


@lru_cache(maxsize=1)
def _open(data: DatasetPath, split: str) -> SplitReader:
    """A worker opens the split once, and not for each task."""
    return open_split(data, split)
