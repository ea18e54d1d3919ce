"""Small datasets of texts that a test writes down."""

from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings


def prepared(out: Path, *texts: str, **settings: object) -> Path:
    """Prepare these texts, one file per text, and return the directory of the dataset."""
    folder = out.with_name(f"{out.name}-texts")
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    prepare_dataset([folder], out, PrepareSettings(**settings))
    return out
