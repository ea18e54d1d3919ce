"""A small model with random weights as a directory of `txl export`, for a dataset of tests."""

from pathlib import Path

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from tests.support.small_models import small_model
from txl_dist.convert.stored_model import Reading, write_exported


def export_small_model(
    directory: Path, dataset: Path, *, seed: int = 0, memory: str = "recurrent"
) -> Path:
    """Write a model of 2 layers that reads segments of 12 tokens; returns its directory."""
    manifest = load_manifest(dataset)
    model = small_model(seed=seed, vocab_size=manifest.vocab_size, mem_len=8, memory=memory)
    tokenizer = open_tokenizer(dataset, manifest)
    write_exported(directory, model.float(), tokenizer, Reading(tgt_len=12, reset="document"))
    return directory
