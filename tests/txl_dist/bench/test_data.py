"""`txl bench data` at a small size: figures are valid numbers. Limits are not checked."""

from pathlib import Path

import numpy as np

from data_pipeline.shards.manifest import NO_TEXT, InputSummary, ShardManifest, SplitEntry
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_writer import ShardWriter
from data_pipeline.tokenizers import ByteTokenizer
from txl_dist.bench.data import measure_reading, measure_seek


def write_dataset(directory: Path) -> None:
    writer = ShardWriter(
        directory,
        "train",
        0,
        dtype=np.dtype(np.uint16),
        vocab_size=257,
        block_bytes=2**16,
    )
    random = np.random.default_rng(0)
    for number in range(60):
        tokens = random.integers(0, 256, 3000 + 7 * number)
        writer.add(str(number), [tokens], text_bytes=len(tokens))
    manifest = ShardManifest(
        tokenizer_digest=ByteTokenizer().digest,
        vocab_size=257,
        end_of_document=256,
        dtype="uint16",
        settings=PrepareSettings(),
        input=InputSummary(
            digest="0" * 64, files=1, documents=60, empty=0, rejected=0, duplicates=0
        ),
        splits={"train": SplitEntry.of([writer.close(NO_TEXT)])},
    )
    (directory / "manifest.json").write_bytes(manifest.to_bytes())


def test_rates_and_seek_times_are_positive_numbers(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    assert measure_reading(tmp_path, rounds=1) > 0
    median, best = measure_seek(tmp_path, num_lanes=3, seeks=5)
    assert 0 < best <= median < 5
