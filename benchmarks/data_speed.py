"""Preparation, size, reading and resume, each with its limit.

    python benchmarks/data_speed.py [--megabytes 100]

The text is available on every machine: source code and documentation of this Python's standard
library and installed packages, one document per file. Rates are per CPU second of this process,
which works without workers, so other load on the machine has little effect.
"""

import argparse
import gc
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from figures import Figure, print_figures

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import TOKENIZER_NAME, PrepareSettings, load_manifest
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import ORDERINGS
from data_pipeline.streams.segment_stream import GROUP_TOKENS
from data_pipeline.streams.segments import SegmentReader
from txl_dist.analysis.bench import time_rounds

VOCAB_SIZE = 32_768
LANES = 8
TGT_LEN = 512
MAX_TOKENS = 2**25
"""Tokens that one round reads."""
NUM_SEEKS = 40
_SUFFIXES = (".py", ".rst", ".md", ".txt")


@dataclass(frozen=True, slots=True)
class BenchText:
    """A folder of documents and a tokenizer trained on them."""

    folder: Path
    tokenizer: Path
    num_bytes: int


def main() -> None:
    """Read the command line, and print each figure when it is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100, help="text to prepare, at least 6")
    print_figures(bench_data(megabytes=parser.parse_args().megabytes))


def bench_data(*, megabytes: float) -> Iterator[Figure]:
    """Yield each figure as soon as it is measured. All files go to a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder:
        work = Path(folder)
        text = gather_text(work, megabytes=megabytes)
        yield from _preparation_figures(text, work)
        yield from _reading_figures(work / "prepared")


# --- preparation ----------------------------------------------------------------------------------


def gather_text(work: Path, *, megabytes: float) -> BenchText:
    """Copy `megabytes` of documents of this Python to `work`, and train BPE on them."""
    folder, size = work / "text", 0
    for number, path in enumerate(_documents()):
        if size >= megabytes * 1e6:
            break
        text = path.read_bytes()
        if _is_text(text):
            target = folder / f"{number // 1000:03d}" / f"{number:06d}{path.suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)
            size += len(text)
    # Training the tokenizer is not part of the rates: every figure reads its file.
    settings = PrepareSettings(tokenizer="bpe", vocab_size=VOCAB_SIZE, format="text")
    prepare_dataset([folder], work / "trained", settings)
    return BenchText(folder, work / "trained" / TOKENIZER_NAME, size)


def _documents() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        files = (path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
        # The standard library's folder contains site-packages, which the second root lists.
        inside = "site-packages"
        yield from sorted(p for p in files if inside not in p.relative_to(root).parts)


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode("utf-8").strip())
    except UnicodeDecodeError:
        return False


def _preparation_figures(text: BenchText, work: Path) -> Iterator[Figure]:
    """The rate of BPE preparation from files to shards, and the size of the shards."""
    settings = PrepareSettings(tokenizer="file", format="text")
    spent = cpu_seconds(
        lambda: prepare_dataset(
            [text.folder], work / "prepared", settings, tokenizer_file=text.tokenizer
        )
    )
    rate, note = text.num_bytes / 1e6 / spent, f"{text.num_bytes / 1e6:.0f} MB"
    yield Figure("BPE preparation, files to shards", rate, "MB per CPU-s", 15.0, note=note)
    entry = load_manifest(work / "prepared").splits["train"]
    ratio = entry.compressed_bytes / entry.text_bytes
    with_indexes = sum(shard.bytes + shard.index_bytes for shard in entry.shards)
    note = f"with indexes {with_indexes / entry.text_bytes:.3f}"
    name = "size, zstd level 3, relative to the raw text"
    yield Figure(name, ratio, "", 0.20, at_most=True, note=note)


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    # The garbage collector would repeatedly scan the objects of earlier measurements.
    gc.collect()
    gc.freeze()
    began = time.process_time()
    run()
    return time.process_time() - began


# --- reading --------------------------------------------------------------------------------------


def _reading_figures(dataset: Path) -> Iterator[Figure]:
    rate = measure_reading(dataset) / 1e6
    yield Figure("loading lanes with ages", rate, "Mtok per CPU-s", 100.0)
    for lanes in (4, 8):
        median, best = measure_seek(dataset, num_lanes=lanes)
        note = f"best {best * 1e3:.1f}"
        name = f"resume to the first batch, {lanes} lanes"
        yield Figure(name, median * 1e3, "ms", 10.0, at_most=True, note=note)


def measure_reading(dataset: Path) -> float:
    """Tokens per CPU second of reading lanes of a shuffled epoch, in groups as training reads them.

    Reads MAX_TOKENS, at most an epoch, in 8 lanes and segments of 512 tokens.
    """
    source = open_split(dataset, "train")
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=LANES, tgt_len=TGT_LEN)
    group = GROUP_TOKENS // (LANES * TGT_LEN)
    lane_tokens = min(plan.lane_tokens - 1, MAX_TOKENS // LANES)
    num_groups = max(1, lane_tokens // (TGT_LEN * group))
    num_tokens = num_groups * group * TGT_LEN * LANES
    if plan.lane_tokens <= group * TGT_LEN:
        raise ValueError(f"{source.num_tokens:,} tokens are too few; at least {2 * GROUP_TOKENS:,}")

    def read() -> None:
        reader = _reader(source, plan)
        for number in range(num_groups):
            reader.read(number * group * TGT_LEN, group)

    times = time_rounds({"read": read}, rounds=5, warm_up_rounds=1, clock=time.process_time)
    return num_tokens / times["read"]


def measure_seek(dataset: Path, *, num_lanes: int) -> tuple[float, float]:
    """(median, best) seconds from an open source to the first batch at random lane positions.

    Each seek opens the split again, so every lane has to read and decode its block.
    """
    first = open_split(dataset, "train")
    plan = LanePlan(num_tokens=first.num_tokens, num_lanes=num_lanes, tgt_len=TGT_LEN)
    random = np.random.default_rng(0)
    seconds = []
    for position in random.integers(0, 10 * plan.lane_tokens, NUM_SEEKS).tolist():
        source = open_split(dataset, "train", manifest=first.manifest)
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
        reset="document",
        ordering=ORDERINGS["blocks"],
        seed=0,
    )


if __name__ == "__main__":
    main()
