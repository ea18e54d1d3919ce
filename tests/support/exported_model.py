"""A small dataset, and a small model with random weights for it as a directory of `txl export`."""

from pathlib import Path
from typing import Any

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from tests.support.prepared import prepared
from tests.support.small_models import small_model
from txl_dist.convert.stored_model import Reading, write_exported


def tide_dataset(folder: Path, **settings: object) -> Path:
    """Two documents in `train`, two in `valid`; each a few segments long."""
    texts = (f"{n}: the tide comes in, the tide goes out. " * (n + 1) for n in range(4))
    return prepared(folder / "data", *texts, split={"valid": 0.5}, **settings)


def export_small_model(directory: Path, dataset: Path, **options: Any) -> Path:
    """Write a model of 2 layers that reads segments of 12 tokens; returns its directory."""
    manifest = load_manifest(dataset)
    model = small_model(vocab_size=manifest.vocab_size, **({"mem_len": 8} | options))
    tokenizer = open_tokenizer(dataset, manifest)
    write_exported(directory, model.float(), tokenizer, Reading(tgt_len=12, reset="document"))
    return directory
