"""What `txl bench data` does not measure: figures of this project's preparation and plan.

    python benchmarks/data_figures.py [--megabytes 100]

Rates of preparation with a vocabulary that is trained first and of short lines, the size of
sentences as documents, the detection of damage, and the cost of planning an epoch of 10**12 tokens.
The plan depends on the number of tokens per block only, so random block sizes replace the shards.
"""

import argparse
import random
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import BlockPlace, EpochOrder
from txl_dist.bench import Figure, print_figures
from txl_dist.bench.data import (
    VOCAB_SIZE,
    BenchText,
    cpu_seconds,
    gather_text,
    shard_bytes,
    with_indexes,
)

BLOCK_TOKENS = 2**18
_SENTENCE_CHARACTERS = range(80, 401)
_MOST_SENTENCES = 60_000
_FLIPS = 300
_LINES = range(100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100)
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder:
        print_figures(measure(Path(folder), parser.parse_args().megabytes))


def measure(work: Path, megabytes: float) -> Iterator[Figure]:
    text = gather_text(work, megabytes=megabytes)
    yield from _training_and_lines_figures(text, work)
    yield _sentences_figure(text, work)
    yield _damage_figure(text, work)
    seconds, plan_megabytes = measure_plan()
    name = "plan of 10^12 tokens, 4,096 lanes, 512 ranks"
    yield Figure(name, seconds, "CPU-s", note=f"{plan_megabytes:.0f} MB")


def _training_and_lines_figures(text: BenchText, work: Path) -> Iterator[Figure]:
    settings = PrepareSettings(tokenizer="bpe", vocab_size=VOCAB_SIZE)
    spent = cpu_seconds(lambda: prepare_dataset([text.folder], work / "from-text", settings))
    rate = text.num_bytes / 1e6 / spent
    yield Figure("BPE preparation with a vocabulary trained first", rate, "MB per CPU-s", 5.0)
    lines = work / "short.txt"
    lines.write_text("".join(f"{number:08d} {'short line ' * 4}"[:49] + "\n" for number in _LINES))
    by_line = PrepareSettings(format="lines")
    spent = cpu_seconds(lambda: prepare_dataset([lines], work / "short", by_line))
    name = f"{len(_LINES):,} lines of 49 bytes, byte tokens"
    yield Figure(name, spent, "CPU-s", 1.0, at_most=True)


def _sentences_figure(text: BenchText, work: Path) -> Figure:
    """Size of one document per sentence, relative to one document."""
    sentences, long = work / "sentences.txt", work / "long.txt"
    lines = _sentences(text)
    sentences.write_text("\n".join(lines) + "\n", "utf-8")
    long.write_text("\n".join(lines) + "\n", "utf-8")
    many = _prepare(text, sentences, work / "each", "lines").splits["train"]
    single = _prepare(text, long, work / "together", "text").splits["train"]
    ratio = shard_bytes(many) / shard_bytes(single)
    ratio_with_indexes = with_indexes(many) / with_indexes(single)
    mean = sum(map(len, lines)) / len(lines)
    note = f"{len(lines):,} of {mean:.0f} characters; with indexes {ratio_with_indexes:.2f}"
    return Figure(
        "size of sentences, relative to one document", ratio, "", 1.10, at_most=True, note=note
    )


def _sentences(text: BenchText) -> list[str]:
    """Lines with the length of sentences; those of One Billion Word have about 140 characters."""
    lines = []
    for path in sorted(text.folder.rglob("*")):
        if path.is_file():
            lines += [line.strip() for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if len(line) in _SENTENCE_CHARACTERS][:_MOST_SENTENCES]


def _prepare(text: BenchText, source: Path, out: Path, format: str) -> ShardManifest:
    settings = PrepareSettings(tokenizer="file", format=format)
    return prepare_dataset([source], out, settings, tokenizer_file=text.tokenizer).manifest


def _damage_figure(text: BenchText, work: Path) -> Figure:
    """Flip single random bits of a shard; count how many change tokens without an error."""
    small = work / "small"
    files = sorted(path for path in text.folder.rglob("*") if path.is_file())
    # A small shard: every flip reads all of it again.
    small.mkdir()
    for path in files[:60]:
        shutil.copy(path, small)
    directory = work / "flipped"
    manifest = _prepare(text, small, directory, "text")
    path = directory / manifest.splits["train"].shards[0].name
    path.chmod(0o644)
    shard_bytes, expected = path.read_bytes(), _tokens(open_split(directory, "train"))
    unnoticed = 0
    for seed in range(_FLIPS):
        bit = random.Random(seed).randrange(len(shard_bytes) * 8)
        damaged = bytearray(shard_bytes)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            unnoticed += not np.array_equal(_tokens(open_split(directory, "train")), expected)
        except DataError:
            continue  # detected
    return Figure("random bit flips not detected", unnoticed, f"of {_FLIPS}", 0, at_most=True)


def _tokens(reader: SplitReader) -> np.ndarray:
    blocks = enumerate(reader.block_tokens)
    return np.concatenate([reader.read(block, 0, int(length)) for block, length in blocks])


def measure_plan(
    *, num_tokens: int = 10**12, num_lanes: int = 4096, num_ranks: int = 512
) -> tuple[float, float]:
    """(seconds, megabytes) to order an epoch and to locate the first token of every lane.

    CPU seconds of one run; peak megabytes (10**6 bytes) of a second run, including the block
    sizes (8 bytes each), which a reader holds in memory.
    """
    sizes = synthetic_blocks(num_tokens)
    began = time.process_time()
    plan_all(sizes, num_lanes=num_lanes, num_ranks=num_ranks)
    # tracemalloc slows the plan, so time and memory are measured in separate runs.
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        plan_all(sizes, num_lanes=num_lanes, num_ranks=num_ranks)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return seconds, (peak_bytes + sizes.nbytes) / 1e6


def synthetic_blocks(num_tokens: int) -> np.ndarray:
    """int64 [num_blocks]: block sizes as `txl prepare` makes them, slightly below BLOCK_TOKENS."""
    random = np.random.default_rng(0)
    num_blocks = max(1, num_tokens // BLOCK_TOKENS)
    sizes = BLOCK_TOKENS - random.integers(0, BLOCK_TOKENS // 64, num_blocks)
    return np.asarray(sizes, np.int64)


def plan_all(sizes: np.ndarray, *, num_lanes: int, num_ranks: int) -> list[BlockPlace]:
    """The first block of each lane in epoch 0, by rank. In a run, every rank computes it."""
    plan = LanePlan(num_tokens=int(sizes.sum()), num_lanes=num_lanes, tgt_len=512)
    order = EpochOrder.of(sizes, seed=0, epoch=0, shuffle="blocks")
    return [
        order.locate(lane * plan.lane_tokens)
        for rank in range(num_ranks)
        for lane in plan.lanes_of_rank(rank, num_ranks)
    ]


if __name__ == "__main__":
    main()
