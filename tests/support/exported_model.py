"""A small dataset, and a small model with random weights for it as a directory of `txl export`."""

from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings, load_manifest, open_tokenizer
from tests.support.small_models import small_model
from txl_dist.convert.stored_model import Reading, write_exported


def tide_dataset(folder: Path, **settings: object) -> Path:
    """Two documents in `train`, two in `valid`; each a few segments long."""
    (folder / "corpus").mkdir()
    for number in range(4):
        text = f"{number}: the tide comes in, the tide goes out. " * (number + 1)
        (folder / "corpus" / f"{number}.txt").write_text(text)
    options = PrepareSettings(split={"valid": 0.5}, **settings)
    prepare_dataset([folder / "corpus"], folder / "data", options)
    return folder / "data"


def export_small_model(
    directory: Path, dataset: Path, *, seed: int = 0, memory: str = "recurrent"
) -> Path:
    """Write a model of 2 layers that reads segments of 12 tokens; returns its directory."""
    manifest = load_manifest(dataset)
    model = small_model(seed=seed, vocab_size=manifest.vocab_size, mem_len=8, memory=memory)
    tokenizer = open_tokenizer(dataset, manifest)
    write_exported(directory, model.float(), tokenizer, Reading(tgt_len=12, reset="document"))
    return directory
